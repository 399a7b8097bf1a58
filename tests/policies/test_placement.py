"""Who holds which ranks after a decision."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.nodes.placement import members_after, place
from holdfast.policies.recovery.escalation import Decision, RecoveryAction

MEMBERS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True).map(tuple)
CHOICE = st.randoms(use_true_random=False)


def decision(drop: tuple[str, ...] = (), add: tuple[str, ...] = (), *, rotate: bool = False) -> Decision:
    """Return a decision that changes who is in."""
    return Decision(action=RecoveryAction.REPLACE_NODE, reason="a test", drop=drop, add=add, rotate=rotate)


def test_a_spare_takes_the_place_of_the_node_it_replaces() -> None:
    """Most ranks stay where they are, with their caches."""
    assert members_after(("a", "b", "c"), decision(("b",), ("s",))) == ("a", "s", "c")
    assert members_after(("a", "b", "c"), decision(("c", "a"), ("s", "t"))) == ("s", "b", "t")


def test_a_spare_beyond_the_places_comes_last() -> None:
    """A job that waited may get more than it lost."""
    assert members_after(("a", "b"), decision(("a",), ("s", "t"))) == ("s", "b", "t")
    assert members_after((), decision((), ("s",))) == ("s",)


@given(MEMBERS, CHOICE)
def test_who_stays_keeps_the_place_when_all_are_replaced(members: tuple[str, ...], choice: Random) -> None:
    """Wherever the holes are."""
    drop = tuple(choice.sample(members, choice.randint(0, len(members))))
    add = tuple(f"spare-{node}" for node in drop)
    after = members_after(members, decision(drop, add))
    assert [node for node in after if node in members] == [node for node in members if node not in drop]
    assert all(after[at] == node for at, node in enumerate(members) if node not in drop)
    assert {after[at] for at, node in enumerate(members) if node in drop} == set(add)


@given(MEMBERS, CHOICE)
def test_a_shrink_keeps_the_order(members: tuple[str, ...], choice: Random) -> None:
    """Ranks move up, none overtakes another."""
    drop = tuple(choice.sample(members, choice.randint(0, len(members))))
    assert members_after(members, decision(drop)) == tuple(node for node in members if node not in drop)


@given(MEMBERS, st.integers(1, 4))
def test_a_rotation_moves_every_rank_to_another_node_and_loses_none(members: tuple[str, ...], ranks: int) -> None:
    """A failure that follows the rank must meet another node."""
    rotated = members_after(members, decision(rotate=True))
    assert sorted(rotated) == sorted(members)
    before, after = place(members, ranks), place(rotated, ranks)
    assert len(members) == 1 or all(set(before[node]).isdisjoint(after[node]) for node in members)


@given(MEMBERS, st.integers(1, 8))
def test_ranks_are_consecutive_on_each_node_and_over_all_of_them(members: tuple[str, ...], ranks: int) -> None:
    """From 0 to the world size less one, in the order of the members."""
    placed = place(members, ranks)
    assert tuple(placed) == members
    assert [rank for held in placed.values() for rank in held] == list(range(len(members) * ranks))
    assert {len(held) for held in placed.values()} == {ranks}
