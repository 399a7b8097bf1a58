"""The runs that this process steers, by job name: Prefect's tasks take names, and look the live things up here."""

from __future__ import annotations

from holdfast.control.supervisor.controller import JobController

_RUNS: dict[str, JobController] = {}
_LET_GO: dict[str, bool] = {}
"""Jobs that this process steers no more, and whether it handed them over."""


def enter(run: JobController) -> None:
    """Make *run* known to the tasks of this process."""
    _RUNS[run.job.name] = run
    _LET_GO.pop(run.job.name, None)


def leave(job: str, *, handed_over: bool = False, suspended: bool = False) -> None:
    """Forget the run of *job*; one that is suspended may be taken up by this process again."""
    _RUNS.pop(job, None)
    if not suspended:
        _LET_GO[job] = handed_over


def was_let_go(job: str) -> bool:
    """Tell whether this process steered *job* once and does no more."""
    return job in _LET_GO


def was_handed_over(job: str) -> bool:
    """Tell whether this process was told to let go of *job*, which goes on."""
    return _LET_GO.get(job, False)


def of(job: str) -> JobController:
    """Return the run of *job*."""
    return _RUNS[job]
