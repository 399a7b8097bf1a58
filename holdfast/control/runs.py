"""The runs that this process steers, by job name: Prefect's tasks take names, and look the live things up here."""

from __future__ import annotations

from holdfast.control.run import Run

_RUNS: dict[str, Run] = {}


def enter(run: Run) -> None:
    """Make *run* known to the tasks of this process."""
    _RUNS[run.job.name] = run


def leave(run: Run) -> None:
    """Forget *run*."""
    _RUNS.pop(run.job.name, None)


def of(job: str) -> Run:
    """Return the run of *job*."""
    return _RUNS[job]
