"""What a controller leaves alone when it releases its job without the lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.nodes.allocations import AllocatedNodes
from holdfast.control.nodes.approvals import Approvals
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.policies.states import Event
from holdfast.spec import LocalCluster, TrainingJob


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lease_that_is_lost_while_the_job_ends_leaves_its_allocations(
    is_lost: bool,  # noqa: FBT001 (a table)
    holdfast_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end may take minutes; whoever has the job by then needs its nodes and its approvals."""
    assert holdfast_home.is_dir()
    closed = list[tuple[str, bool]]()
    monkeypatch.setattr(AllocatedNodes, "close", lambda _self, *, end: closed.append(("allocations", end)))
    monkeypatch.setattr(Approvals, "close", lambda _self, *, ended: closed.append(("approvals", ended)))
    spec, cluster = TrainingJob(name="lost", command=["true"], preflight=False), LocalCluster(name="c", nodes=1, directory=str(tmp_path))
    with control_job(spec, cluster) as run:
        assert isinstance(run, JobController)
        end = run.generations.end

        def lose_lease() -> None:
            end()
            if is_lost:
                run.depose("another controller")

        monkeypatch.setattr(run.generations, "end", lose_lease)
        run.move(Event.STOP_ASKED, "stopped")
    assert closed == [("allocations", not is_lost), ("approvals", not is_lost)]
