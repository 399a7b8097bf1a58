"""The runs that this process steers, by job name: Prefect's tasks take names, and look the live things up here."""

from __future__ import annotations

from holdfast.control.run import Run

_RUNS: dict[str, Run] = {}
_LET_GO: set[str] = set()


def enter(run: Run) -> None:
    """Make *run* known to the tasks of this process."""
    _RUNS[run.job.name] = run
    _LET_GO.discard(run.job.name)


def leave(job: str) -> None:
    """Forget the run of *job*."""
    _RUNS.pop(job, None)
    _LET_GO.add(job)


def was_let_go(job: str) -> bool:
    """Tell whether this process steered *job* once and does no more."""
    return job in _LET_GO


def of(job: str) -> Run:
    """Return the run of *job*."""
    return _RUNS[job]
