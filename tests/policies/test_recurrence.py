"""What the past counts for: faults on many nodes are no node's, and a node that has the same one too often leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.recovery.case import Case, HotSpare, Noted, Pass, PastFault, RecoveryAction
from holdfast.policies.recovery.escalation import POLICIES, decide
from holdfast.policies.recovery.recurrence import ExcuseWhenCorrelated, LeaveWhenFlapping, LeaveWhenRecurring
from tests.mentions import mentions
from tests.policies.cases import NOW, a_case, a_recovery, decided

KILL, GPU, HANGS = "worker-sigkill", "gpu-memory-double-bit", "gpu-channel-timeout"
"""A process, a GPU that has to be reset, a GPU for which a restart does."""


def before(*ages: float, kind: str = KILL, node: str = "a", device: str = "", root: bool = True) -> tuple[PastFault, ...]:
    """Return a fault that came so many seconds ago, each time in an incident of its own."""
    return tuple(
        PastFault(kind=kind, at=NOW - age, node=node, device=device, incident=f"{kind}-{node}-{age}" if root else "", root=root)
        for age in sorted(ages, reverse=True)
    )


def noted(rule: Any, case: Case) -> Case:
    """Return the case as *rule* hands it on."""
    answer = rule(case)
    assert isinstance(answer, Noted), answer
    assert answer.why in answer.case.reason
    return answer.case


def passed(rule: Any, case: Case) -> str:
    """Return why *rule* has nothing to say."""
    answer = rule(case)
    assert isinstance(answer, Pass), answer
    return answer.why


# -- on many nodes --------------------------------------------------------------------------------------------------------


def test_a_fault_on_three_nodes_is_attributed_to_none() -> None:
    """Nodes that have left the job count too: they had it."""
    others = (*before(60, kind="gpu-off-bus", node="x"), *before(599, kind="gpu-off-bus", node="y"))
    case = a_case("gpu-off-bus", spares=("s",), earlier=others)
    assert a_case("gpu-off-bus", spares=("s",)).unfit == ("a",)
    after = noted(ExcuseWhenCorrelated(), case)
    assert (after.unfit, after.bad) == ((), ())
    decision = decided("balanced", case)
    assert decision.action is RecoveryAction.RESTART_WORKERS
    assert mentions(decision.reason, "gpu-off-bus", 3, "a, x, y", "600 s")
    assert decided("aggressive", case).action is RecoveryAction.RESTART_WORKERS


def test_faults_of_one_incident_count_as_well() -> None:
    """Three nodes that fail at once are as many as three that fail one after the other."""
    case = a_case("gpu-off-bus", "a", ("gpu-off-bus", "b"), ("gpu-off-bus", "c"), spares=("s", "t", "u"))
    assert noted(ExcuseWhenCorrelated(), case).correlated == {"gpu-off-bus"}
    assert decided("balanced", case).drop == ()


def test_hardware_that_breaks_on_a_few_of_many_nodes_counts_against_each() -> None:
    """Their ranks would fail there again; where most of the nodes have it, something else is the cause."""
    broken = ("gpu-off-bus", "a", ("gpu-off-bus", "b"), ("gpu-off-bus", "c"))
    few = a_case(*broken, members=tuple("abcdefgh"), spares=("s", "t", "u"))
    assert "not on 5" in passed(ExcuseWhenCorrelated(), few)
    decision = decided("balanced", few)
    assert (decision.action, decision.drop, decision.add) == (RecoveryAction.REPLACE_NODE, tuple("abc"), tuple("stu"))
    assert noted(ExcuseWhenCorrelated(hardware_share=0.0), few).unfit == ()
    crashes = a_case(KILL, "a", (KILL, "b"), (KILL, "c"), members=tuple("abcdefgh"))
    assert noted(ExcuseWhenCorrelated(), crashes).correlated == {KILL}
    assert noted(ExcuseWhenCorrelated(), a_case(*broken, members=tuple("abcde"))).correlated == {"gpu-off-bus"}


@pytest.mark.parametrize(
    "earlier",
    [
        (*before(60, node="b"), *before(600, node="c")),
        (*before(10, 20, 30, node="b"), *before(40)),
        (*before(10, kind="worker-sigsegv", node="b"), *before(10, kind="worker-sigsegv", node="c")),
    ],
    ids=["one too long ago", "two nodes", "another kind"],
)
def test_fewer_nodes_or_another_kind_or_time_is_no_common_fault(earlier: tuple[PastFault, ...]) -> None:
    """Each is answered for itself."""
    assert "not on 3" in passed(ExcuseWhenCorrelated(), a_case(earlier=earlier))


def test_a_node_that_is_lost_leaves_however_many_others_had_the_same() -> None:
    """Nobody can go on without it; and that nodes are lost is never common."""
    others = (*before(10, node="b"), *before(20, node="c"))
    case = a_case(lost="a", spares=("s",), earlier=others)
    assert noted(ExcuseWhenCorrelated(), case).unfit == ("a",)
    assert decided("balanced", case).drop == ("a",)
    dark = tuple(one for node in "bc" for one in before(10, kind="node-lost", node=node))
    assert decided("balanced", a_case("node-lost", spares=("s",), earlier=dark)).drop == ("a",)


def test_another_fault_of_the_same_node_still_counts() -> None:
    """What is common excuses its own kind only."""
    case = a_case(KILL, "a", ("gpu-off-bus", "b"), spares=("s",), earlier=(*before(10, node="b"), *before(20, node="c")))
    assert noted(ExcuseWhenCorrelated(), case).unfit == ("b",)


def test_restarts_for_a_common_fault_do_not_spend_the_budget_of_a_node() -> None:
    """They are not counted against it; the budget of the job still ends it."""
    past = tuple(a_recovery(at=NOW - 100 * n) for n in range(1, 4))
    spent = tuple(replace(one, kind=KILL) for one in past)
    others = (*before(10, node="b"), *before(20, node="c"))
    assert decided("balanced", a_case(past=spent, spares=("s",), earlier=others)).action is RecoveryAction.RESTART_WORKERS
    assert decided("balanced", a_case(past=spent, spares=("s",))).action is RecoveryAction.REPLACE_NODE


def test_a_share_of_the_nodes_is_enough_where_it_is_set() -> None:
    """Two nodes at least, and the number alone decides without it."""
    case = a_case(members=tuple("abcd"), earlier=before(10, node="b"))
    assert noted(ExcuseWhenCorrelated(min_share=0.5), case).correlated == {KILL}
    assert "not on 3" in passed(ExcuseWhenCorrelated(), case)
    assert "not on 2" in passed(ExcuseWhenCorrelated(min_share=0.1), a_case(members=("a",), least=1))
    assert passed(ExcuseWhenCorrelated(min_nodes=0), case) == "switched off"


# -- too often ------------------------------------------------------------------------------------------------------------


def again(*ages: float, **facts: Any) -> Case:
    """Return the case of a GPU that failed so many seconds ago too, and for which a restart would do."""
    return a_case(HANGS, earlier=before(*ages, kind=HANGS), **facts)


def test_the_fourth_incident_of_one_kind_on_one_node_moves_it_out() -> None:
    """Though a restart in place would be allowed."""
    case = again(7200, 40_000, 86_399, spares=("s",))
    decision = decided("balanced", case)
    assert (decision.action, decision.drop, decision.add) == (RecoveryAction.REPLACE_NODE, ("a",), ("s",))
    assert mentions(decision.reason, HANGS, 4, "86400 s", "a")
    assert decided("patient", case).action is RecoveryAction.RESTART_WORKERS
    assert decided("balanced", again(7200, 40_000, 86_400, spares=("s",))).action is RecoveryAction.RESTART_WORKERS


def test_what_is_possible_decides_a_node_stays_where_no_spare_is() -> None:
    """An unhealthy place is better than none."""
    case = again(10, 20, 30, least=1)
    assert mentions(passed(LeaveWhenRecurring(), case), "spare")
    assert decided("balanced", case).action is RecoveryAction.RESTART_WORKERS


def test_what_ends_processes_is_counted_only_where_somebody_says_so() -> None:
    """It points to the script as well, and has a budget of its own."""
    case = a_case(spares=("s",), earlier=before(10, 20, 30))
    assert passed(LeaveWhenRecurring(), case) == f"{KILL} is not counted"
    assert noted(LeaveWhenRecurring(process_times=4), case).worn == {"a"}
    assert "of 5" in passed(LeaveWhenRecurring(process_times=5), case)


@pytest.mark.parametrize(
    "case",
    [
        a_case(HANGS, spares=("s",), earlier=before(10, 20, 30, kind=HANGS, node="b")),
        a_case(HANGS, spares=("s",), earlier=before(10, 20, 30, kind=GPU)),
        a_case(HANGS, spares=("s",), earlier=before(10, 20, 30, kind=HANGS, root=False)),
        a_case("group-broken", spares=("s",), earlier=before(10, 20, 30, kind="group-broken")),
        a_case(HANGS, None, spares=("s",), earlier=before(10, 20, 30, kind=HANGS)),
    ],
    ids=["another node", "another kind", "no root", "a secondary failure", "no node"],
)
def test_only_roots_of_one_kind_on_one_node_are_counted(case: Case) -> None:
    """What happened elsewhere, or to others, is not this node's."""
    assert isinstance(LeaveWhenRecurring()(case), Pass)


def test_attempts_of_one_incident_are_one() -> None:
    """A recovery that fails three times is one bad moment."""
    same = tuple(PastFault(kind=HANGS, at=NOW - age, node="a", incident="i", root=True) for age in (30, 20, 10))
    assert "for time 2" in passed(LeaveWhenRecurring(), a_case(HANGS, spares=("s",), earlier=same))


def test_a_known_device_is_distinguished_from_others() -> None:
    """Two GPUs with one fault each are no GPU with two."""
    earlier = (*before(10, kind=GPU, device="0000:18:00"), *before(20, kind=GPU, device="0000:3b:00"))
    unknown = a_case(GPU, spares=("s",), earlier=earlier)
    assert "for time 3" in passed(LeaveWhenRecurring(), unknown)
    root = Fault(kind=GPU, at=NOW, node="a", device="0000:3b:00")
    known = replace(unknown, diagnosis=Diagnosis(root=root, secondary_failures=(), reason="seen"))
    assert mentions(passed(LeaveWhenRecurring(), known), 2, "86400 s", "a", "0000:3b:00")


def test_replace_ranks_moves_all_ranks_of_a_removed_node() -> None:
    """Those that live there too: they go where the spare is."""
    ranks = {"a": (0, 1), "b": (2, 3)}
    case = again(
        10, 20, 30, members=("a", "b"), least=2, blocked_reason="", ranks=ranks, dead=frozenset({1}), spares=("s",),
        hot_spares=(HotSpare(id=5, node="s"),),
    )  # fmt: skip
    decision = decided("balanced", case)
    assert decision.action is RecoveryAction.REPLACE_RANKS
    assert {seat.rank: seat.node for seat in decision.seats} == {0: "s", 1: "s"}
    assert decision.drop == ("a",)


# -- comes and goes -------------------------------------------------------------------------------------------------------


def test_a_flapping_fault_replaces_the_node_though_training_continued() -> None:
    """Also one that is only watched, beside the root of another node."""
    comings = before(100, 200, 300, 400, kind="link-down", root=False)
    case = a_case(KILL, "b", ("link-down", "a"), spares=("s",), earlier=comings)
    assert noted(LeaveWhenFlapping(), case).worn == {"a"}
    decision = decided("balanced", case)
    assert (decision.action, decision.drop) == (RecoveryAction.REPLACE_NODE, ("a",))
    assert mentions(decision.reason, "link-down", 5, "600 s", "a")


def test_reports_within_moments_are_one_occurrence() -> None:
    """A storm of lines is not a storm of faults, however long it lasts."""
    storm = before(*(2.0 + 3 * n for n in range(100)), kind="link-down", root=False)
    assert "came 1 time within" in passed(LeaveWhenFlapping(), a_case("link-down", spares=("s",), earlier=storm))


def test_processes_that_die_again_and_again_do_not_flap() -> None:
    """A node's parts come and go; a process only ends."""
    deaths = before(100, 200, 300, 400)
    assert mentions(passed(LeaveWhenFlapping(), a_case(spares=("s",), earlier=deaths)), "no fault")


def test_what_is_only_recorded_or_long_ago_does_not_flap() -> None:
    """Its level says that it does not matter; and a week is no flapping."""
    comings = before(100, 200, 300, 400, kind="link-down", root=False)
    silent = RecommendedActions(changed={"link-down": RecommendedAction.RECORD})
    assert isinstance(
        LeaveWhenFlapping()(a_case(KILL, "b", ("link-down", "a"), spares=("s",), earlier=comings, recommended_actions=silent)), Pass
    )
    rare = before(100, 700, 1300, 1900, kind="link-down", root=False)
    assert isinstance(LeaveWhenFlapping()(a_case(KILL, "b", ("link-down", "a"), spares=("s",), earlier=rare)), Pass)
    assert passed(LeaveWhenFlapping(times=0), a_case()) == "switched off"


# -- together -------------------------------------------------------------------------------------------------------------


def test_a_common_fault_is_not_counted_against_a_node_that_had_it_often() -> None:
    """One broken script must not take a cluster apart node by node."""
    often = (*before(10, 20, 30, 40, 50, kind=HANGS), *before(15, kind=HANGS, node="b"), *before(25, kind=HANGS, node="c"))
    answer = decide(POLICIES["balanced"], a_case(HANGS, spares=("s",), earlier=often))
    assert answer.decision.action is RecoveryAction.RESTART_WORKERS
    assert list(answer.noted) == ["ExcuseWhenCorrelated"]
    assert mentions(answer.passed_over["LeaveWhenRecurring"], "many nodes")
