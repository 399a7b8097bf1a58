"""What a simulated job does with a fault, to the second, and that no second is lost or counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import CORRUPTION
from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import NodeFault, NodesLeaving, NodeSlowdown, SimulatedEvent
from holdfast.simulator.results import RunResult
from holdfast.simulator.scenario import Scenario
from holdfast.simulator.systems import SYSTEMS
from tests.simulator.making import CABLE, DAY, GPU, HOUR, LOST, PROCESS, fault, scenario


def run(system: str, events: list[SimulatedEvent], made: Scenario | None = None, **fields: Any) -> RunResult:
    """Return what *system* makes of *events*, and check that the categories add up to all the time of all GPUs."""
    made = scenario(**fields) if made is None else made
    result = simulate(made, system, 0, events=events)
    assert result.held == pytest.approx(result.seconds * result.gpus, rel=1e-9)
    return result


def wall(result: RunResult, *names: str) -> float:
    """Return the wall seconds of the whole job in these categories."""
    return sum(result.gpu_seconds.get(name, 0.0) for name in names) / result.gpus


def test_without_faults_every_second_is_productive_but_for_checkpoints() -> None:
    """A stall of a minute in half an hour of training: 30 of 31 minutes are productive."""
    quiet = run("torchrun", [])
    assert (quiet.goodput, quiet.ettr) == (1.0, 1.0)
    assert run("torchrun", [], job={"checkpoint": {"interval": "30m", "stall": "1m"}}).goodput == pytest.approx(30 / 31)


def test_a_restart_from_disk_takes_its_phases_and_loses_the_steps_since_the_checkpoint() -> None:
    """A node is lost 47 minutes after the start: 17 minutes are lost, found after 600 s, replaced in 600 s, started in 300 s."""
    result = run("torchrun", [fault(47 * 60.0)])
    assert wall(result, "rollback") == pytest.approx(17 * 60)
    assert [wall(result, name) for name in ("detect", "reschedule", "resume")] == pytest.approx([600, 600, 300])
    assert result.jobs["training"].steps_lost == 17 * 6
    assert result.jobs["training"].actions == {"replace-node": 1}


@pytest.mark.parametrize(("system", "rollback"), [("holdfast-groups", 7), ("holdfast-state", 7), ("holdfast-script", 17 * 60 + 7)])
def test_each_level_of_integration_goes_back_as_far_as_it_must(system: str, rollback: float) -> None:
    """Managed groups and managed state lose the open step, an unchanged script what it did since its checkpoint."""
    result = run(system, [fault(47 * 60.0 + 7, cause=GPU)])
    assert wall(result, "rollback") == pytest.approx(rollback)
    action = RecoveryAction.REPLACE_RANKS if system == "holdfast-groups" else RecoveryAction.REPLACE_NODE
    assert result.jobs["training"].actions == {action: 1}


def test_managed_groups_pause_as_long_as_the_switch_to_a_hot_spare_takes() -> None:
    """21.1 s with a hot spare, 50 s without one, beside detection and decision."""
    hot, cold = (run("holdfast-groups", [fault(HOUR)], hot_spares=number) for number in (1, 0))
    assert [wall(one, "resume") for one in (hot, cold)] == pytest.approx([21.1, 50.0])
    assert 2.1 < wall(hot, "detect", "diagnose") < 2.4


def test_a_policy_of_another_order_decides_otherwise(tmp_path: Path) -> None:
    """The decisions are the policy's: the same faults under a policy file that only restarts workers."""
    file = tmp_path / "restart.yaml"
    file.write_text("based_on: balanced\nactions: [restart-workers]\n")
    events: list[SimulatedEvent] = [fault(HOUR, cause=PROCESS), fault(5 * HOUR, node=1, cause=PROCESS)]
    assert run("holdfast-groups", events).jobs["training"].actions == {"replace-ranks": 2}
    assert run("holdfast-groups", events, policy=str(file)).jobs["training"].actions == {"restart-workers": 2}


def test_a_timeout_that_is_too_short_cuts_an_action_off_and_the_next_one_is_tried() -> None:
    """Replacing ranks takes 21.1 s; without a timeout of its own it may."""
    assert run("holdfast-groups", [fault(HOUR, cause=GPU)], job={"timeouts": {}}).jobs["training"].timed_out == {}
    result = run("holdfast-groups", [fault(HOUR, cause=GPU)], job={"timeouts": {"replace_ranks": "20s", "restart_workers": "10m"}})
    job = result.jobs["training"]
    assert job.timed_out == {"replace-ranks": 1}
    assert job.actions == {"replace-ranks": 1, "restart-workers": 1}
    assert wall(result, "failed attempt") == pytest.approx(20)


def test_a_fault_during_a_recovery_is_answered_in_the_same_incident() -> None:
    """Ten seconds into the restart for the first lost node, the second one is lost."""
    result = run("holdfast-state", [fault(HOUR), fault(HOUR + 15, node=1)])
    job = result.jobs["training"]
    assert (job.incidents, job.faults, job.failures) == (1, 2, 0)
    assert job.actions == {"replace-node": 2}


def test_a_snapshot_and_its_replica_lost_together_leave_the_checkpoint() -> None:
    """The replica is one rack further: nodes 0 and 4."""
    apart, together = (run("holdfast-state", [fault(47 * 60.0), fault(47 * 60.0, node=node)]) for node in (1, 4))
    assert wall(apart, "rollback") == pytest.approx(0)
    assert wall(together, "rollback") == pytest.approx(17 * 60)


def test_an_elastic_job_goes_on_with_fewer_nodes_and_grows_again() -> None:
    """No spare: seven of eight nodes train until the lost one is repaired."""
    result = run("holdfast-state", [fault(HOUR, repair=6 * HOUR)], nodes=8, hot_spares=0, nnodes="4:8")
    job = result.jobs["training"]
    assert job.actions == {"shrink-restart": 1}
    assert wall(result, "lost capacity") * 8 == pytest.approx(6 * HOUR, rel=0.1)


def test_managed_groups_shrink_by_a_copy_of_the_model_and_grow_live() -> None:
    """Four copies on two nodes each: three go on without a restart."""
    result = run("holdfast-groups", [fault(HOUR, repair=6 * HOUR)], nodes=8, hot_spares=0, nnodes="4:8", copies=4)
    assert result.jobs["training"].actions == {"shrink-live": 1}
    assert wall(result, "lost capacity") * 4 == pytest.approx(6 * HOUR, rel=0.1)
    assert wall(result, "migrations") == pytest.approx(16.6)


def test_torchft_loses_a_replica_until_it_has_started_again() -> None:
    """A quarter of the job is away for 320 s; the others go on after a second."""
    result = run("torchft", [fault(HOUR)], copies=4)
    assert wall(result, "lost capacity") == pytest.approx(320 / 4)
    assert wall(result, "detect") == pytest.approx(1)


def test_a_job_that_cannot_shrink_waits_for_the_repair() -> None:
    """Six hours, less what detection and the stop took, under Holdfast and others alike."""
    for system in ("holdfast-script", "restart-hot-spares", "trainmover"):
        result = run(system, [fault(HOUR, repair=6 * HOUR)], nodes=8, hot_spares=0)
        assert wall(result, "wait") == pytest.approx(6 * HOUR, rel=0.02), system
        assert result.jobs["training"].actions["wait-for-capacity"] == 1


def test_planned_maintenance_is_left_while_training_runs_where_that_is_possible() -> None:
    """A pause of 16.6 s and no lost step; an unchanged script restarts at the deadline."""
    leaving: list[SimulatedEvent] = [NodesLeaving(HOUR, (0,), 4 * HOUR, 1800.0)]
    live, restarted = run("holdfast-groups", leaving), run("holdfast-script", leaving)
    assert wall(live, "migrations") == pytest.approx(16.6)
    assert live.jobs["training"].actions == {"migrate": 1}
    assert restarted.jobs["training"].actions == {"planned-restart": 1}
    assert wall(live, "rollback") == wall(restarted, "rollback") == 0


def test_a_slow_node_is_replaced_if_the_policy_finds_it_worth_the_pause() -> None:
    """A tenth slower for a day: managed groups migrate; an unchanged script stays slow."""
    slow: list[SimulatedEvent] = [NodeSlowdown(HOUR, 0, 0.1, DAY)]
    assert run("holdfast-groups", slow).jobs["training"].actions == {"migrate": 1}
    assert wall(run("holdfast-script", slow), "slow nodes") == pytest.approx(0.1 * DAY)


def test_silent_corruption_goes_back_to_the_checkpoint_before_it() -> None:
    """It begins after 47 minutes and is noticed an hour later: the checkpoint of 30 minutes is the last good one."""
    made = scenario(faults={"silent_corruption": {"per_1000_node_days": 0.0, "detected_after": "1h"}})
    result = run("holdfast-groups", [NodeFault(47 * 60.0, 0, CORRUPTION, DAY, HOUR)], made)
    assert wall(result, "rollback") == pytest.approx(77 * 60, abs=10)


def test_a_bug_of_the_script_ends_the_job_instead_of_repeating_it_forever() -> None:
    """The policy finds the script at fault at the second crash at the same step; a person mends it."""
    result = run("holdfast-groups", [], faults={"bug": {"at": "10h"}})
    job = result.jobs["training"]
    assert (job.incidents, job.failures) == (2, 1)
    assert "script" in job.failed_reason


def test_two_jobs_share_the_spares_of_their_cluster() -> None:
    """The first one takes the only spare, the second one waits for the repair."""
    jobs = [{"nnodes": 4, "name": name, "timeouts": {"replace_node": "20m"}} for name in ("one", "two")]
    made = Scenario.model_validate(
        {
            "name": "two",
            "duration": "2d",
            "cluster": {"nodes": 9},
            "jobs": jobs,
            "faults": {"constant_rate": {"per_1000_node_days": 0}},
        }
    )
    result = run("restart-hot-spares", [fault(HOUR, node=0), fault(2 * HOUR, node=5, repair=3 * HOUR)], made)
    assert result.jobs["one"].actions == {"replace-node": 1}
    assert result.jobs["two"].actions == {"wait-for-capacity": 1}


def test_a_job_with_an_end_is_complete_when_its_work_is_done() -> None:
    """Ten hours of training and a restart."""
    result = run("restart-hot-spares", [fault(47 * 60.0)], job={"work": "10h"})
    assert result.seconds == result.jobs["training"].completed_at
    assert result.seconds == pytest.approx(10 * HOUR + 17 * 60 + 31.2 + 65.4 + 93.6 + 108 + 20, abs=10)


def test_every_system_gets_through_every_kind_of_event() -> None:
    """Faults of all kinds in a crowded cluster: the job trains on in the end, whatever the system."""
    events: list[SimulatedEvent] = [
        fault(HOUR),
        fault(HOUR + 5, node=1, cause=GPU),
        NodeSlowdown(3 * HOUR, 2, 0.2, HOUR),
        fault(4 * HOUR, node=3, cause=CABLE, repair=2 * HOUR),
        fault(4 * HOUR + 40, node=4, cause=PROCESS),
        NodesLeaving(6 * HOUR, (5, 6), HOUR, 600.0),
        *(fault(20 * HOUR, node=node, cause=LOST, repair=HOUR) for node in range(4)),
    ]
    for system in SYSTEMS:
        result = run(system, events, copies=4, nnodes="2:8")
        assert result.goodput > 0.4, system
        assert simulate(scenario(copies=4, nnodes="2:8"), system, 0, events=events) == result, system
