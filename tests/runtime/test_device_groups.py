"""Groups whose operations a device runs, on a stand-in without a GPU (`device_stand_in.py`): order, marks, aborts, culprits, batches.

This validates the runtime's logic, and not NCCL.
"""

from __future__ import annotations

import pytest

from holdfast.control.faults.rank_status import parse_rank_status
from holdfast.detectors.evidence import RankProgress
from holdfast.detectors.training.hang_analysis import explain
from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed
from tests.runtime.test_rank_status import standings


@pytest.fixture(scope="module")
def on_device(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return a run of the same ranks that nothing disturbs."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "device_groups", UNTIL))


def test_survivors_in_healthy_groups_are_freed_when_a_rank_dies_in_backward(job: Job, on_device: Ended) -> None:
    """No communicator reports anything: rank 3 waits for ranks 1 and 2, which wait for rank 0, until the controller's command ends all."""
    flow = job("silent", script="device_groups", chaos=[fault(0, "backward", 4), fault(3, "forward", 9)])
    first = dict(flow.pids)
    for lost in (0, 3):
        flow.until_dead(lost)
        assert not [one for one in flow.of("broken") if one["generation"] == flow.generation]
        flow.regroup([lost])
        assert {(one["source"], one["kept"]) for one in flow.mended()} == {("live", 0)}
    assert [flow.pids[rank] for rank in (1, 2)] == [first[rank] for rank in (1, 2)]
    assert_undisturbed(flow, on_device)
    for rank in (1, 2):  # three groups, made three times, of which the last ones work still
        report = flow.receive("device", rank)
        assert (report["communicators"], report["aborted"], report["batches"]) == (9, 6, [2])


def test_a_rank_notices_a_failed_communicator_by_itself_and_a_rank_that_hangs_is_named(job: Job, on_device: Ended) -> None:
    """Rank 1 dies, and those that wait for it on the device report it; later rank 2 starts no step, and the others' marks show it."""
    flow = job("gate-12-2", script="device_groups", chaos=[fault(1, "backward", 5)])
    flow.until_dead(1)
    flow.until(lambda: flow.of("broken"), "a report of a broken group")
    flow.regroup([1])
    flow.mended()
    flow.receive("at the gate", 2)
    flow.until(lambda: all(standings(flow)[rank]["waits"] == "device" for rank in (0, 1, 3)), "the waits of the others for their devices")
    statuses = standings(flow)
    assert all(any(group["pending"] for group in statuses[rank]["groups"]) for rank in (0, 3))
    assert not any(group["pending"] for group in statuses[2]["groups"])
    finding = explain({rank: RankProgress(node="n", step=12, age=1.0, status=parse_rank_status(one)) for rank, one in statuses.items()})
    assert finding is not None
    assert finding.rank == 2
    flow.pass_gate()
    assert_undisturbed(flow, on_device)
