"""Whatever comes, no policy drains a cluster, repeats itself forever, or keeps a job from training."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policies.nodes.cordons import QuarantineLimits
from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import NodeFault
from holdfast.simulator.results import RunResult
from holdfast.simulator.systems import SYSTEMS
from tests.simulator.making import CABLE, DAY, GPU, HOUR, LOST, PROCESS, fault, scenario

NODES, WIDTH = 12, 8
LIMIT = QuarantineLimits(size=NODES, isolated=0).most
POLICIES = st.sampled_from(["patient", "balanced", "aggressive"])
LEVELS = st.sampled_from(["holdfast-groups", "holdfast-state", "holdfast-script"])
CAUSES = st.sampled_from([LOST, GPU, CABLE, PROCESS])
EVENTS = st.lists(
    st.builds(fault, st.floats(0, 1.5 * DAY), st.integers(0, NODES - 1), CAUSES, st.floats(60.0, 6 * HOUR)), min_size=1, max_size=25
).map(lambda events: sorted(events, key=lambda one: one.at))


def ran(events: list[NodeFault], system: str, policy: str, **fields: Any) -> RunResult:
    """Return what comes of *events* within four days, of which the last two are quiet; check what holds of every run."""
    made = scenario(nodes=NODES, nnodes=f"4:{WIDTH}", copies=4, duration="4d", policy=policy, **fields)
    result = simulate(made, system, 0, events=events)
    job = result.jobs["training"]
    assert abs(result.held - result.seconds * result.gpus) < 1e-6 * result.held
    # Each fault leads to a few decisions at most, and a failed job to one start by a person.
    assert sum(job.actions.values()) <= 8 * (job.faults + job.failures)
    return result


def trains_in_the_end(result: RunResult) -> bool:
    """Return whether the job trained for most of the two quiet days at least."""
    return result.gpu_seconds["productive"] / result.gpus > 1.5 * DAY


@settings(max_examples=60, deadline=None)
@given(EVENTS, LEVELS, POLICIES)
def test_any_faults_are_survived_under_every_policy(events: list[NodeFault], system: str, policy: str) -> None:
    """Up to 25 faults of all kinds on twelve nodes in a day and a half."""
    assert trains_in_the_end(ran(events, system, policy))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, NODES - 1), st.floats(300, 2 * HOUR), LEVELS, POLICIES)
def test_a_flapping_node_is_left_and_takes_no_other_with_it(node: int, gap: float, system: str, policy: str) -> None:
    """It fails again as soon as it works; the others are never quarantined for it."""
    events = [fault(at * gap, node=node, cause=GPU, repair=gap / 2) for at in range(1, int(1.5 * DAY / gap))]
    result = ran(events, system, policy)
    assert result.most_out <= 1
    assert trains_in_the_end(result)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), LEVELS, POLICIES)
def test_a_bad_switch_quarantines_no_more_nodes_than_programs_may(times: int, system: str, policy: str) -> None:
    """The links of half the cluster go down at once, again and again, for ten minutes each time."""
    events = [
        fault(number * 2 * HOUR, node=node, cause=CABLE, repair=600.0) for number in range(1, times + 1) for node in range(NODES // 2)
    ]
    result = ran(events, system, policy)
    assert result.most_isolated <= LIMIT
    assert trains_in_the_end(result)


@settings(max_examples=10, deadline=None)
@given(LEVELS, POLICIES)
def test_repairs_that_are_slower_than_faults_leave_the_job_waiting_not_failing_forever(system: str, policy: str) -> None:
    """One crew for all: nodes pile up in its queue, and the job goes on with what is left."""
    events = [fault(number * HOUR, node=number % NODES, repair=3 * HOUR) for number in range(1, 30)]
    result = ran(events, system, policy, cluster={"repair_crews": 1})
    assert result.jobs["training"].failures <= 30
    assert result.gpu_seconds["productive"] > 0


@settings(max_examples=10, deadline=None)
@given(st.floats(1, 20), LEVELS, POLICIES)
def test_a_bug_that_crashes_everywhere_costs_no_node(hours: float, system: str, policy: str) -> None:
    """The policy stops the job instead of replacing its nodes one by one."""
    result = ran([], system, policy, faults={"bug": {"at": f"{hours:.3f}h"}})
    job = result.jobs["training"]
    assert job.failures == 1
    assert result.most_out == result.most_isolated == 0
    assert job.incidents <= 5
    assert trains_in_the_end(result)


def test_other_systems_survive_the_same_storm() -> None:
    """Thirty lost nodes in thirty hours: every system trains again afterwards."""
    events = [fault(number * HOUR, node=number % NODES, repair=3 * HOUR) for number in range(1, 30)]
    for system in SYSTEMS:
        assert trains_in_the_end(ran(events, system, "balanced")), system
