"""The size of a job's state and the links of its cluster: what they change in a recovery, and in which direction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import SimulatedEvent
from holdfast.simulator.results import RunResult
from holdfast.simulator.scenario import Scenario
from holdfast.simulator.systems import SYSTEMS
from holdfast.simulator.transfers import StateTransfers
from tests.simulator.making import GPU, PROCESS, fault, scenario

LINKS = {"network": "10GB/s", "storage": "40GB/s", "host": "50GB/s"}


def sized(state: str, links: dict[str, str] = LINKS, **fields: Any) -> Scenario:
    """Return eight nodes of two GPUs whose job has so large a *state*, saved every half an hour."""
    checkpoint = {"interval": "30m", "snapshot_overhead": "0%", **fields.pop("checkpoint", {})}
    return scenario(cluster={"links": links, **fields.pop("cluster", {})}, job={"state": state, "checkpoint": checkpoint}, **fields)


def transfers(made: Scenario) -> StateTransfers:
    """Return the times of the only job."""
    found = StateTransfers.of(made.jobs[0], made.cluster.links, made.cluster.gpus_per_node)
    assert found is not None
    return found


def run(system: str, made: Scenario, *events: SimulatedEvent) -> RunResult:
    """Return what *system* makes of *events*."""
    return simulate(made, system, 0, events=list(events))


def wall(result: RunResult, name: str) -> float:
    """Return the wall seconds in a category."""
    return result.gpu_seconds.get(name, 0.0) / result.gpus


def test_times_are_bytes_by_the_bandwidth_of_what_is_slowest() -> None:
    """800 GB on eight nodes are 100 GB each; two copies read twice as much of the storage, and hold 200 GB on each node."""
    one, two = transfers(sized("800GB")), transfers(sized("800GB", copies=2))
    assert (one.local, one.replica, one.disk) == pytest.approx((1.0, 10.0, 20.0))
    assert (two.local, two.replica, two.disk) == pytest.approx((2.0, 20.0, 40.0))
    assert transfers(sized("800GB", copies=2, checkpoint={"load_once": True})).disk == pytest.approx(20.0)
    assert (one.stall, one.write) == (two.stall, two.write) == pytest.approx((1.0, 20.0)), "a save has the state once"


def test_a_load_from_disk_and_one_from_a_peer_take_as_long_as_the_state_is_large() -> None:
    """An unchanged script loads 8 TB at 40 GB/s, managed state 1 TB a node at 10 GB/s; a process of a node that works reads its memory."""
    made = sized("8TB", checkpoint={"interval": "2h"})
    assert wall(run("holdfast-script", made, fault(10_000, cause=GPU)), "load") == pytest.approx(200)
    assert wall(run("holdfast-state", made, fault(10_000, cause=GPU)), "load") == pytest.approx(100)
    assert wall(run("holdfast-state", made, fault(10_000, cause=PROCESS)), "load") == pytest.approx(10)


def test_a_published_pause_is_as_long_as_the_transfer_at_least() -> None:
    """A switch of 21.1 s stays for a state that is moved in 10 s, and takes 100 s for one that needs 100 s; so does a start of 300 s."""
    assert wall(run("holdfast-groups", sized("800GB"), fault(10_000)), "resume") == pytest.approx(21.1)
    assert wall(run("holdfast-groups", sized("8TB"), fault(10_000)), "resume") == pytest.approx(100)
    assert wall(run("torchrun", sized("800GB"), fault(10_000)), "resume") == pytest.approx(300)
    assert wall(run("torchrun", sized("16TB"), fault(10_000)), "resume") == pytest.approx(400)


def test_a_snapshot_that_is_still_on_its_way_to_its_replica_cannot_be_used() -> None:
    """It takes 100 s: a fault in step 1,001 goes back ten steps or more, beyond the open one."""
    near, far = (run("holdfast-state", sized(size), fault(10_005.0)).jobs["training"].steps_lost for size in ("8GB", "8TB"))
    assert near <= 1
    assert 10 <= far <= 20


def test_snapshots_without_replicas_leave_the_disk_to_a_lost_node() -> None:
    """A crashed process finds the snapshot in the memory of its node; a lost node has taken it along."""
    made = sized("8GB", checkpoint={"snapshot_replicas": 0})
    assert run("holdfast-state", made, fault(10_005.0, cause=PROCESS)).jobs["training"].steps_lost <= 1
    assert run("holdfast-state", made, fault(10_005.0)).jobs["training"].steps_lost > 50


def test_a_second_replica_outlives_the_loss_of_two_racks() -> None:
    """Nodes 0 and 1 hold a snapshot and its replica where racks are single nodes."""
    lost = [fault(10_005.0), fault(10_005.0, node=1)]
    one, two = (
        run("holdfast-state", sized("8GB", cluster={"nodes_per_rack": 1}, checkpoint={"snapshot_replicas": number}), *lost)
        for number in (1, 2)
    )
    assert one.jobs["training"].steps_lost > 50 >= two.jobs["training"].steps_lost


def test_ranks_that_no_other_copy_has_go_back_to_their_snapshot() -> None:
    """With one copy of the model the state of a lost rank is in snapshots alone, every 20 steps here; a second copy has it alive."""
    plan = {"interval": "30m", "snapshot_interval": 20, "snapshot_overhead": "0%"}
    alone, twice = (
        run("holdfast-groups", scenario(copies=copies, job={"checkpoint": plan}), fault(10_195.0, cause=GPU)).jobs["training"]
        for copies in (1, 2)
    )
    assert alone.actions == twice.actions == {"replace-ranks": 1}
    assert alone.steps_lost > 10
    assert twice.steps_lost == 0


def test_bamboo_goes_back_to_the_disk_when_a_stage_and_the_one_before_are_lost() -> None:
    """Four stages on eight nodes: nodes 0 and 2 hold neighbouring stages, nodes 0 and 4 do not, nor do 0 and 1."""
    made = scenario(nodes=12, job={"stages": 4})
    lost = {other: run("bamboo", made, fault(10_205.0), fault(10_205.0, node=other)) for other in (1, 2, 4)}
    assert {other: result.jobs["training"].steps_lost > 50 for other, result in lost.items()} == {1: False, 2: True, 4: False}
    assert lost[2].jobs["training"].actions == {"rollback": 1}
    whole = run("bamboo", scenario(job={"stages": 8}))
    assert whole.goodput == pytest.approx(15 * 4.25 / (24 * 3.08)), "each step takes longer"


bandwidths = st.integers(min_value=1, max_value=4000).map(lambda number: f"{number}GB/s")
sizes = st.integers(min_value=1, max_value=500_000)


bandwidths_of_links = st.fixed_dictionaries(dict.fromkeys(("network", "storage", "host"), bandwidths))


@given(state=sizes, more=sizes, made=bandwidths_of_links, copies=st.sampled_from([1, 2, 4, 8]))
def test_a_larger_state_is_never_loaded_or_saved_faster(state: int, more: int, made: dict[str, str], copies: int) -> None:
    """Of every system, each action, and each tier."""
    small, large = (transfers(sized(f"{size}GB", made, copies=copies)) for size in (state, state + more))
    _ordered(small, large)


@given(
    state=sizes,
    which=st.sampled_from(["network", "storage", "host"]),
    slow=st.integers(min_value=1, max_value=2000),
    more=st.integers(min_value=1, max_value=2000),
)
def test_a_faster_link_never_makes_a_recovery_slower(state: int, which: str, slow: int, more: int) -> None:
    """Whichever link it is."""
    fast, slower = (transfers(sized(f"{state}GB", {**LINKS, which: f"{number}GB/s"})) for number in (slow + more, slow))
    _ordered(fast, slower)


def _ordered(less: StateTransfers, more: StateTransfers) -> None:
    """Check that nothing takes longer by *less* than by *more*."""
    for name in ("local", "replica", "disk", "stall", "write"):
        assert getattr(less, name) <= getattr(more, name), name
    for system in SYSTEMS.values():
        quick, late = less.applied_to(system), more.applied_to(system)
        for action, plan in quick.plans.items():
            assert plan.seconds(10.0) <= late.plans[action].seconds(10.0), (system.name, action)
        for action, plan in quick.cold.items():
            assert plan.seconds(10.0) <= late.cold[action].seconds(10.0), (system.name, action)
