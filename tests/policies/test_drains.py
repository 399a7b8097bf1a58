"""What is done about a node that is to be left: by table, and what holds at any time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.nodes.drains import AGAIN, STOP, Drain, DrainAction, DrainView, ends_at, next_action
from holdfast.policies.nodes.node_faults import find_node_faults
from holdfast.policies.recovery.escalation import RecoveryAction
from tests.mentions import mentions
from tests.policies.cases import a_case, decided

NOW = 1_000_000.0
DRAIN = Drain(node="n1", reason="drained by ann@desk until 18:00: new fan", since=NOW, by=NOW + 600)
CAN = DrainView(now=NOW, room=True, save=30.0)


@pytest.mark.parametrize(
    ("departure", "seen", "act", "words"),
    [
        (DRAIN, CAN, DrainAction.MOVE, ("new fan",)),
        (replace(DRAIN, by=None), CAN, DrainAction.MOVE, ("new fan",)),
        (
            DRAIN,
            replace(CAN, room=False),
            DrainAction.STAY,
            ("no other node", "deadline", "saved"),
        ),
        (replace(DRAIN, by=None), replace(CAN, room=False), DrainAction.STAY, ("no other node", "no deadline")),
        (DRAIN, replace(CAN, blocked_reason="the groups are not Holdfast's own"), DrainAction.STAY, ("the groups are not Holdfast's own",)),
        (
            DRAIN,
            replace(CAN, tried=NOW - 1, outcome="hot spare 3 is lost"),
            DrainAction.STAY,
            ("migration failed", "hot spare 3 is lost"),
        ),
        (DRAIN, replace(CAN, tried=NOW - AGAIN), DrainAction.MOVE, ("new fan",)),
        (DRAIN, replace(CAN, now=NOW + 559), DrainAction.MOVE, ("new fan",)),
        (DRAIN, replace(CAN, now=NOW + 560, room=False), DrainAction.LEAVE, ("new fan", "no other node")),
        (DRAIN, replace(CAN, now=NOW + 560, tried=NOW + 550), DrainAction.LEAVE, ("migration", "in progress")),
        (replace(DRAIN, by=None), replace(CAN, now=NOW + 1e9, room=False), DrainAction.STAY, ("no deadline",)),
    ],
)
def test_what_is_done_about_a_node_that_is_to_be_left(departure: Drain, seen: DrainView, act: DrainAction, words: tuple[str, ...]) -> None:
    """Room and time decide, and the words say so."""
    found = next_action(departure, seen)
    assert found.act is act
    assert mentions(found.reason, *words)


def test_a_short_notice_leaves_half_of_its_time_to_the_attempt_to_move() -> None:
    """Of the 25 s of a SIGTERM a last save of 30 s would leave none."""
    short = replace(DRAIN, by=NOW + 25)
    assert next_action(short, replace(CAN, now=NOW + 12)).act is DrainAction.MOVE
    assert next_action(short, replace(CAN, now=NOW + 12.5)).act is DrainAction.LEAVE
    assert short.is_urgent(NOW, save=30.0), "a job that has nowhere to go need not wait"
    assert not DRAIN.is_urgent(NOW, save=30.0)


TIMES = st.floats(0.0, 10_000.0)


@given(by=TIMES, at=TIMES, save=st.floats(0.0, 600.0), room=st.booleans(), blocked_reason=st.sampled_from(["", "its groups"]))
def test_ranks_never_stay_beyond_the_last_moment_and_never_leave_with_time_to_spare(
    by: float,
    at: float,
    save: float,
    room: bool,  # noqa: FBT001 (hypothesis names it)
    blocked_reason: str,
) -> None:
    """Of what is left then, a last save gets its seconds where the notice was that long, and half of the notice where it was not."""
    departure = replace(DRAIN, by=NOW + by)
    act = next_action(departure, DrainView(now=NOW + at, room=room, blocked_reason=blocked_reason, save=save)).act
    last = departure.latest(save)
    assert (act is DrainAction.LEAVE) == (NOW + at >= last)
    assert act is not DrainAction.MOVE or (room and not blocked_reason)
    assert NOW + by - last == pytest.approx(min(save + STOP, by / 2), abs=1e-6)


def test_a_drained_node_is_left_and_not_isolated() -> None:
    """With a spare it is replaced; without one the job goes on smaller where it may, or waits: nobody need be asked."""
    for facts, action, drop in (
        ({"spares": ("s",), "least": 3}, RecoveryAction.REPLACE_NODE, ("a",)),
        ({"least": 2}, RecoveryAction.SHRINK_RESTART, ("a",)),
        ({"least": 3, "approval_possible": True}, RecoveryAction.WAIT_FOR_CAPACITY, ("a",)),
    ):
        case = a_case("node-leaving", "a", **facts)
        made = decided("balanced", case)
        assert (made.action, made.drop) == (action, drop)
        assert find_node_faults(case, made.drop) == []


def test_nodes_that_leave_together_are_no_fault_of_the_software() -> None:
    """Three drained at once leave all the same."""
    case = a_case("node-leaving", "a", ("node-leaving", "b"), ("node-leaving", "c"))
    assert set(decided("balanced", case).drop) == {"a", "b", "c"}


def test_a_job_ends_before_its_walltime_with_time_for_what_it_has() -> None:
    """A short one gives a tenth of its time to that."""
    assert ends_at(submitted=NOW, walltime=7200, save=30) == NOW + 7200 - 40
    assert ends_at(submitted=NOW, walltime=60, save=30) == NOW + 54
