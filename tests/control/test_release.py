"""What a controller does not touch when it releases its job without the lease, and that it can leave one it only began to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.nodes.allocations import AllocatedNodes
from holdfast.control.nodes.approvals import Approvals
from holdfast.control.supervisor import supervise
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.detach import was_detached
from holdfast.control.supervisor.reattach import reattach
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


def test_a_request_to_detach_waits_until_a_running_job_has_been_taken(
    holdfast_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then left as any other: with its lease released, and with the end of one who detached."""
    assert holdfast_home.is_dir()
    spec, cluster = TrainingJob(name="let-go", command=["true"], preflight=False), LocalCluster(name="c", nodes=1, directory=str(tmp_path))

    def begin(run: JobController) -> None:
        run.detach.request("SIGUSR1 while it reattaches")
        reattach(run)

    with control_job(spec, cluster) as run:
        assert isinstance(run, JobController)
        run.detach.request("the first one leaves")
        run.pump(0.0)
    monkeypatch.setattr(supervise, "reattach", begin)
    with control_job(spec, cluster) as run:
        assert isinstance(run, JobController)
        assert run.reattached
        run.pump(0.0)
        pytest.fail("it did not detach")
    assert was_detached("let-go")
    monkeypatch.setattr(supervise, "reattach", reattach)
    with control_job(spec, cluster) as run:  # at once: nobody has the lease
        assert isinstance(run, JobController)
        run.move(Event.STOP_ASKED, "stopped")
