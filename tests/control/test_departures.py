"""When a job has to end by itself, to be run again."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.control.departures import Departures
from holdfast.control.run import Run
from holdfast.history import Job
from holdfast.spec import TrainingJob


def a_run(ago: float, **limits: Any) -> Run:
    """Return what counts of a job that was submitted so many seconds *ago*: a real one would have to run for that long."""
    spec = TrainingJob.model_validate({"name": "a", "script": "b.py", "limits": limits})
    job = Job(name="a", spec={}, cluster={}, directory="/", at=time.time() - ago)
    return cast("Run", SimpleNamespace(spec=spec, job=job, members=(), borrowing=SimpleNamespace(end="", is_lent=False)))


@pytest.mark.parametrize(
    ("limits", "ago", "ends"),
    [
        ({}, 1e9, False),
        ({"walltime": "2h"}, 7_000, False),
        ({"walltime": "2h"}, 7_160, True),
        ({"walltime": "2h", "last_save": "10m"}, 6_600, True),
        ({"walltime": "2h", "last_save": "10m"}, 6_000, False),
    ],
)
def test_a_job_ends_in_time_for_its_walltime(limits: dict[str, Any], ago: float, ends: bool) -> None:  # noqa: FBT001 (a table)
    """With as long as its last save may take, and says how to go on."""
    why = Departures(a_run(ago, **limits)).end
    assert bool(why) == ends
    assert not ends or ("the walltime of 2 h" in why and "the same `holdfast run` goes on from there" in why)
