"""When a job goes on with fewer copies of its model, and which ranks stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.nodes.placement import membership_after
from holdfast.policies.recovery.case import Case, Decision, HotSpare, ModelCopies, Pass, Placement, RecoveryAction
from holdfast.policies.recovery.case_codec import from_record, to_record
from holdfast.policies.recovery.escalation import ORDERS, POLICIES, decide
from holdfast.policies.recovery.in_process import ShrinkLive, complete_copies, placements_to_grow, restart_pays_off
from tests.mentions import mentions
from tests.policies.cases import NOW, a_recovery

PLAIN: ModelCopies = ((0,), (1,), (2,))
PIPELINES: ModelCopies = ((0, 2), (1, 3))
"""Two stages on two ranks each."""


def a_loss(lost: str = "c", *, nodes: str = "abc", ranks: int = 1, copies: ModelCopies = PLAIN, **facts: Any) -> Case:
    """Return a case in which node *lost*, that holds *ranks* ranks as each does, is lost, and there is no spare."""
    held = {node: tuple(range(place * ranks, (place + 1) * ranks)) for place, node in enumerate(nodes)}
    root = Fault(kind="node-lost", at=NOW, node=lost[0], quote="seen")
    diagnosis = Diagnosis(root=root, secondary_failures=(), reason="node-lost was seen")
    given = {"least": 1, "blocked_reason": "", "lost": frozenset(lost), "ranks": held, "copies": copies, **facts}
    return Case(now=NOW, diagnosis=diagnosis, members=tuple(nodes), **given)


ANSWERS: dict[str, tuple[Case, tuple[int, ...], tuple[Placement, ...]]] = {
    "one copy of three": (a_loss(), (2,), ()),
    "the first one": (a_loss("a"), (0,), ()),
    "two at once": (a_loss("ab"), (0, 1), ()),
    "two at once, a hot spare for one of them": (
        a_loss("ab", hot_spares=(HotSpare(id=4, node="c", role=0),)), (1,), (Placement(rank=0, node="c", hot_spare=4),),
    ),
    "a stage of one pipeline: the other stage of it has nothing to do": (
        a_loss("b", nodes="abcd", copies=PIPELINES), (1, 3), (),
    ),
    "a node that holds a whole pipeline": (a_loss("b", nodes="ab", ranks=2, copies=((0, 1), (2, 3))), (2, 3), ()),
    "a second one, after the job has shrunk": (
        a_loss("b", ranks=1, nodes="ab", copies=((0,), (1,))), (1,), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_who_finds_no_place_is_left_out_with_its_copy_of_the_model(name: str) -> None:
    """All others stay where they are."""
    case, vacate, seats = ANSWERS[name]
    answer = ShrinkLive()(case)
    assert isinstance(answer, Decision), answer
    assert (answer.action, answer.vacate, answer.seats) == (RecoveryAction.SHRINK_LIVE, vacate, seats)
    assert set(answer.drop) == case.lost


REFUSALS: dict[str, tuple[Case, str]] = {
    "groups of torch": (a_loss(blocked_reason="the groups are torch's"), "the groups are torch's"),
    "samples of its own for each rank": (a_loss(copies=()), "session.micro_batches"),
    "fewer nodes than the job needs": (a_loss(least=3), "2 nodes left, the job needs 3"),
    "a spare": (a_loss(spares=("s",)), "every lost rank has a place"),
    "no copy is whole": (a_loss("bc", nodes="abcd", copies=PIPELINES), "no copy of the model is complete"),
    "nobody is left who lives": (a_loss("ab", nodes="ab", copies=((0,), (1,)), hot_spares=(HotSpare(id=1, node="s"),)), "no copy"),
    "a sixth one": (a_loss(replacement_attempts=5), "5 recoveries in live processes"),
    "it failed, for a node that lives": (
        replace(a_loss(tried=(RecoveryAction.SHRINK_LIVE,), dead=frozenset({2})), lost=frozenset()), "tried already",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_the_obstacle_is_named(name: str) -> None:
    """The next action reads it, and so does a person."""
    case, why = REFUSALS[name]
    answer = ShrinkLive()(case)
    assert isinstance(answer, Pass), answer
    assert why in answer.why


def test_a_policy_goes_on_in_the_living_processes_before_it_restarts_on_fewer_nodes() -> None:
    """The patient one waits for its full width all the same."""
    actions = {name: decide(rules, a_loss(least=2)).decision.action for name, rules in POLICIES.items()}
    assert actions == {
        "patient": RecoveryAction.WAIT_FOR_CAPACITY,
        "balanced": RecoveryAction.SHRINK_LIVE,
        "aggressive": RecoveryAction.SHRINK_LIVE,
    }
    failed = a_loss(least=2, blocked_reason="it failed in this incident: a rank could not")
    assert decide(POLICIES["balanced"], failed).decision.action is RecoveryAction.SHRINK_RESTART
    assert all(
        RecoveryAction.SHRINK_LIVE not in order or order.index(RecoveryAction.SHRINK_LIVE) < order.index(RecoveryAction.SHRINK_RESTART)
        for order in ORDERS.values()
    )


def test_an_error_that_follows_the_step_is_not_answered_so_twice() -> None:
    """It would take one copy of the model after the other with it."""
    case = a_loss("c", past=(a_recovery(RecoveryAction.SHRINK_LIVE, made_progress=False),))
    root = Fault(kind="worker-exception", at=NOW, node="c", rank=2, quote="seen")
    case = replace(case, diagnosis=Diagnosis(root=root, secondary_failures=(), reason="x"))
    answer = ShrinkLive()(case)
    assert isinstance(answer, Pass)
    assert mentions(answer.why, "follow the step")


def test_a_case_stores_its_model_copies() -> None:
    """A replay decides from the same facts."""
    case = a_loss()
    assert from_record(to_record(case)) == case


@st.composite
def meshes(draw: st.DrawFn) -> tuple[ModelCopies, frozenset[int], int]:
    """Draw copies of the model over stages, in any numbering of ranks, lost ranks, and how many ranks a node holds."""
    stages, count = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(stages * count)))
    copies = tuple(tuple(sorted(ranks[place::count])) for place in range(count))
    lost = draw(st.sets(st.sampled_from(range(stages * count))))
    return copies, frozenset(lost), draw(st.sampled_from([one for one in (1, 2, 3) if stages * count % one == 0]))


@given(meshes())
def test_staying_ranks_form_exactly_the_complete_copies(mesh: tuple[ModelCopies, frozenset[int], int]) -> None:
    """Whatever is lost: each copy goes on whole or not at all, and the job never runs on fewer nodes than it needs."""
    copies, lost, width = mesh
    names = [f"n{place}" for place in range(sum(map(len, copies)) // width)]
    held = {name: tuple(range(place * width, (place + 1) * width)) for place, name in enumerate(names)}
    nodes = frozenset(name for name, ranks in held.items() if not lost.isdisjoint(ranks))
    if not nodes:
        return
    root = Fault(kind="node-lost", at=NOW, node=min(nodes), quote="seen")
    diagnosis = Diagnosis(root=root, secondary_failures=(), reason="lost")
    case = Case(now=NOW, diagnosis=diagnosis, members=tuple(names), least=2, blocked_reason="", lost=nodes, ranks=held, copies=copies)
    gone = {rank for name in nodes for rank in held[name]}
    whole = [one for one in copies if gone.isdisjoint(one)]
    answer = ShrinkLive()(case)
    left = {node for node, ranks in held.items() if any(rank in one for one in whole for rank in ranks)}
    if isinstance(answer, Pass):
        assert len(left) < 2
        return
    staying = {rank for ranks in membership_after({name: list(ranks) for name, ranks in held.items()}, answer.seats, answer.vacate).values()
               for rank in ranks}  # fmt: skip
    assert staying == {rank for one in whole for rank in one}
    assert len(left) >= 2
    assert complete_copies(copies, set(answer.vacate)) == tuple(whole)


@given(meshes(), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 4)))
def test_added_ranks_complete_copies_and_fit_on_their_nodes(mesh: tuple[ModelCopies, frozenset[int], int], room: dict[str, int]) -> None:
    """Ranks come for whole copies only; and none that there is room for stays away."""
    copies, lost, _ = mesh
    present = {rank for one in copies for rank in one} - lost
    found = placements_to_grow(copies, present, room)
    assert not found.keys() & present
    assert all(list(found.values()).count(node) <= most for node, most in room.items())
    whole = [set(one) <= present | found.keys() for one in copies]
    assert found.keys() == {rank for one, is_whole in zip(copies, whole, strict=True) if is_whole for rank in one} - present
    left = sum(room.values()) - len(found)
    assert all(len(set(one) - present) > left for one, is_whole in zip(copies, whole, strict=True) if not is_whole)


def test_all_ranks_start_again_to_be_more_where_that_wins_twice_what_it_costs() -> None:
    """Of a job on two nodes a third one saves a third of the time that is left."""
    assert restart_pays_off(left=60.0, cost=10.0, held=2, coming=1)
    assert not restart_pays_off(left=59.0, cost=10.0, held=2, coming=1)
    assert restart_pays_off(left=40.0, cost=10.0, held=1, coming=1)
    assert restart_pays_off(left=None, cost=600.0, held=2, coming=1)
    assert not restart_pays_off(left=None, cost=601.0, held=2, coming=1)
