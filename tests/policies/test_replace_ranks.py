"""When a replacement of ranks answers, and who goes on with the lost ranks."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.nodes.placement import membership_after, nodes_needed, place, with_spares
from holdfast.policies.recovery.case import Case, Decision, HotSpare, Pass, Placement, RecoveryAction
from holdfast.policies.recovery.escalation import POLICIES, decide
from holdfast.policies.recovery.in_process import ReplaceRanks
from tests.mentions import mentions
from tests.policies.cases import NOW, a_recovery

RANKS = {"a": (0, 1), "b": (2, 3)}
BESIDE = HotSpare(id=7, node="a", role=0)
ELSEWHERE = HotSpare(id=8, node="s", role=0)


def a_loss(kind: str = "worker-sigkill", rank: int | None = 1, *beside: Fault, **facts: Any) -> Case:
    """Return a case of two nodes with two ranks each, in which *rank* had a fault."""
    node = next((node for node, ranks in RANKS.items() if rank in ranks), None)
    root = Fault(kind=kind, at=NOW, node=facts.pop("node", node), rank=rank, quote="seen")
    diagnosis = Diagnosis(root=root, secondary_failures=beside, reason=f"{kind} was seen")
    given = {"blocked_reason": "", "ranks": RANKS, "roles": ((0, 2), (1, 3)), **facts}
    return Case(now=NOW, diagnosis=diagnosis, members=("a", "b"), least=2, **given)


def seats(case: Case) -> tuple[Placement, ...]:
    """Return where the unhealthy ranks go on."""
    answer = ReplaceRanks()(case)
    assert isinstance(answer, Decision), answer
    assert answer.action is RecoveryAction.REPLACE_RANKS
    return answer.seats


def why_not(case: Case) -> str:
    """Return why a replacement of ranks does not answer."""
    answer = ReplaceRanks()(case)
    assert isinstance(answer, Pass), answer
    return answer.why


PLACES: dict[str, tuple[Case, tuple[Placement, ...]]] = {
    "a hot spare beside it": (a_loss(hot_spares=(ELSEWHERE, BESIDE)), (Placement(rank=1, node="a", hot_spare=7),)),
    "a hot spare elsewhere": (a_loss(hot_spares=(ELSEWHERE,)), (Placement(rank=1, node="s", hot_spare=8),)),
    "a failure that may follow the step goes to another node": (
        a_loss("worker-exception", hot_spares=(BESIDE, ELSEWHERE)), (Placement(rank=1, node="s", hot_spare=8),),
    ),
    "its own role rather than its own node": (
        a_loss(hot_spares=(BESIDE, HotSpare(id=9, node="s", role=1))), (Placement(rank=1, node="s", hot_spare=9),),
    ),
    "no hot spare: fresh where it was": (a_loss(), (Placement(rank=1, node="a"),)),
    "a stopped rank": (a_loss("worker-stopped", 3), (Placement(rank=3, node="b"),)),
    "a rank that hangs": (a_loss("job-hang", 3), (Placement(rank=3, node="b"),)),
    "a lost node: hot spares elsewhere, then fresh ones on a spare": (
        a_loss("node-lost", None, node="b", lost=frozenset("b"), hot_spares=(ELSEWHERE, HotSpare(id=9, node="b")), spares=("s",)),
        (Placement(rank=2, node="s", hot_spare=8), Placement(rank=3, node="s")),
    ),
    "a node that is cut off: who was suspected of the standstill that follows from it stays": (
        a_loss("node-partitioned", None, Fault(kind="job-hang", at=NOW, node="a", rank=0), node="b", spares=("s",)),
        (Placement(rank=2, node="s"), Placement(rank=3, node="s")),
    ),
    "a lost agent whose node answers": (a_loss("agent-lost", None, node="b"), (Placement(rank=2, node="b"), Placement(rank=3, node="b"))),
    "an end beside a lost node: who lost the node chooses first": (
        a_loss(
            "node-lost", None, Fault(kind="worker-sigkill", at=NOW, node="a", rank=0), node="b", lost=frozenset("b"),
            hot_spares=(ELSEWHERE, HotSpare(id=9, node="s", role=1)),
        ),
        (Placement(rank=0, node="a"), Placement(rank=2, node="s", hot_spare=8), Placement(rank=3, node="s", hot_spare=9)),
    ),
    "broken groups alone: all stay": (a_loss("group-broken"), ()),
    "broken groups and a process that has ended": (a_loss("group-broken", 0, dead=frozenset({3})), (Placement(rank=3, node="b"),)),
    "a new process that was killed": (a_loss(seated=frozenset({1}), replacement_attempts=1), (Placement(rank=1, node="a"),)),
    "a new process that was stopped": (a_loss("worker-stopped", seated=frozenset({1})), (Placement(rank=1, node="a"),)),
    "a new process that lost a peer": (
        a_loss("worker-peer-lost", seated=frozenset({1}), dead=frozenset({1})),
        (Placement(rank=1, node="a"),),
    ),
    "another rank that raised": (a_loss("worker-exception", seated=frozenset({3})), (Placement(rank=1, node="a"),)),
    "a failure after a rank was lost in the replacement of ranks before": (
        a_loss(tried=(RecoveryAction.REPLACE_RANKS,), replacement_attempts=4), (Placement(rank=1, node="a"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_each_unhealthy_rank_gets_its_best_place(name: str) -> None:
    """A hot spare in its role, then one in the right place, then a fresh process."""
    case, expected = PLACES[name]
    assert seats(case) == expected


REFUSALS: dict[str, tuple[Case, str]] = {
    "groups of torch": (a_loss(blocked_reason="the groups are torch's"), "the groups are torch's"),
    "a hang of nobody": (a_loss("job-output-silent", None), "do not name"),
    "a flow that died": (a_loss("recovery-cut-short", None), "do not name"),
    "one that failed": (a_loss("recovery-overrun", None, tried=(RecoveryAction.REPLACE_RANKS,)), "tried already"),
    "a fifth one": (a_loss(replacement_attempts=5), "5 attempts to replace ranks"),
    "a new process that raised": (a_loss("worker-exception", seated=frozenset({1})), "rank 1 failed by itself"),
    "a new process that ran out of memory": (a_loss("host-no-memory", seated=frozenset({1})), "rank 1 failed by itself"),
    "a new process that raised beside a lost one": (
        a_loss("worker-sigkill", 2, Fault(kind="worker-exception", at=NOW, node="a", rank=1), seated=frozenset({1})), "failed by itself",
    ),
    "nobody left": (a_loss(dead=frozenset({0, 2, 3})), "no rank with a usable state is left"),
    "no place": (a_loss("node-lost", None, node="b", lost=frozenset("b")), "no hot spare for ranks 2–3"),  # noqa: RUF001 (a range)
    "an exception again": (
        a_loss("worker-exception", past=(a_recovery(RecoveryAction.REPLACE_RANKS, made_progress=False),)), "may follow the step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_replace_ranks_that_cannot_help_says_why(name: str) -> None:
    """The next action reads it, and so does a person."""
    case, why = REFUSALS[name]
    assert why in why_not(case)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_first_answer_of_every_policy(policy: str) -> None:
    """Before anything restarts; and after the stops."""
    assert decide(POLICIES[policy], a_loss()).decision.action is RecoveryAction.REPLACE_RANKS
    assert decide(POLICIES[policy], a_loss("user-error")).decision.action is RecoveryAction.FAIL


def test_the_reason_names_who_goes_where_and_who_stays() -> None:
    """It goes unchanged into log, history and report."""
    reason = decide(POLICIES["balanced"], a_loss(hot_spares=(ELSEWHERE,))).decision.reason
    assert mentions(reason, "worker-sigkill", "rank 1", "hot spare 8 on s", 3)


def test_a_membership_after_replacing_ranks_keeps_places_and_drops_empty_nodes() -> None:
    """A rank replaced on its node stays in its place there."""
    before = {"a": [0, 1], "b": [2]}
    assert membership_after(before, (Placement(rank=0, node="a"), Placement(rank=2, node="s"))) == {"a": [0, 1], "s": [2]}
    assert membership_after(before, (Placement(rank=0, node="b"),)) == {"a": [1], "b": [2, 0]}
    assert before == {"a": [0, 1], "b": [2]}


def test_a_restart_after_replaced_ranks_uses_as_many_nodes_as_needed() -> None:
    """Ranks that were spread come together again on those that hold most of them and are not lost."""
    spread = {"a": [1], "b": [2, 3], "s": [0]}
    assert nodes_needed(spread, 2) == ("b", "s")
    assert nodes_needed(spread, 2, frozenset("s")) == ("a", "b")
    assert nodes_needed({"a": [0, 1], "b": [2, 3]}, 2) == ("a", "b")


def test_a_restart_loses_no_rank_when_one_node_has_several_replaced_ranks() -> None:
    """A spare node takes the place that is missing; without one some node goes on holding more."""
    crowded = nodes_needed({"a": [0, 2], "b": [1]}, 1)
    assert crowded == ("a", "b")
    assert place(with_spares(crowded, ("b", "s", "t"), 3), 1, 3) == {"a": [0], "b": [1], "s": [2]}
    assert place(with_spares(crowded, (), 3), 1, 3) == {"a": [0, 1], "b": [2]}
    assert place(("a", "b"), 2, 7) == {"a": [0, 1, 2, 3], "b": [4, 5, 6]}
    assert place(("a", "b"), 2, 4) == place(("a", "b"), 2) == {"a": [0, 1], "b": [2, 3]}
