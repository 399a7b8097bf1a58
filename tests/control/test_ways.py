"""Who is cut off, as connections tried between nodes tell it."""

from __future__ import annotations

import itertools

import pytest

from holdfast.control.faults.reachability import MOST, Pair, apart, pairs_of, severed

NODES = ("a", "b", "c", "d")


def tried(*failed: str, nodes: tuple[str, ...] = NODES) -> dict[Pair, str]:
    """Return what came of all pairs of *nodes*, of which those in *failed* did not meet."""
    return {pair: "timed out" if "".join(pair) in failed else "" for pair in itertools.combinations(nodes, 2)}


@pytest.mark.parametrize(
    ("failed", "found"),
    [
        ((), []),
        (("ab", "bc", "bd"), ["b"]),
        (("ab", "ac", "ad", "bc", "bd"), ["b", "a"]),
        (("ab",), []),
        (("ab", "bc"), []),
        (("ab", "cd"), []),
        (("ab", "ac", "ad", "bc", "bd", "cd"), []),
    ],
    ids=["all meet", "one alone", "two alone", "one pair", "one that still meets another", "two pairs", "nobody meets anybody"],
)
def test_who_meets_nobody_while_others_meet_is_cut_off(failed: tuple[str, ...], found: list[str]) -> None:
    """Of what else fails, nobody can tell from that whose doing it is."""
    assert [one.node for one in severed(tried(*failed), 5.0)] == found


def test_the_spare_node_tells_which_of_two_is_cut_off() -> None:
    """Of two alone it is not known, and nobody is named."""
    assert severed({("a", "b"): "timed out"}, 5.0) == []
    (found,) = severed({("a", "b"): "timed out", ("a", "c"): "", ("b", "c"): "no route"}, 5.0)
    assert (found.node, found.at, found.peers, found.why) == ("b", 5.0, ("a", "c"), "timed out")


@pytest.mark.parametrize(
    ("failed", "go"),
    [
        ((), {}),
        (("ab",), {"b": ("a",)}),
        (("ab", "bc"), {"b": ("a", "c")}),
        (("ab", "cd"), {}),
        (("ac", "ad", "bc", "bd"), {}),
        (("ab", "ac", "ad", "bc", "bd", "cd"), {}),
        (("ae", "be"), {}),
    ],
    ids=["all meet", "one pair", "one in two pairs", "two pairs", "two halves", "nobody meets anybody", "one that is no member"],
)
def test_of_those_that_do_not_meet_as_few_go_as_leave_only_such_as_do(failed: tuple[str, ...], go: dict[str, tuple[str, ...]]) -> None:
    """Of two the later one, as that with rank 0 may as well stay; nobody where many would have to go."""
    told = apart({(pair[0], pair[1]): "timed out" for pair in failed}, NODES, 5.0)
    assert {one.node: one.peers for one in told} == go
    assert not any(one.alone for one in told)
    assert {(one.at, one.why) for one in told} <= {(5.0, "timed out")}


def test_of_thousands_only_those_in_doubt_are_tried_with_some_others() -> None:
    """All pairs of four thousand nodes would be eight million connections."""
    nodes = [f"n{number:04}" for number in range(4096)]
    assert len(pairs_of([], nodes[:MOST])) == MOST * (MOST - 1) // 2
    pairs = pairs_of({"n0007", "n4000"}, nodes)
    assert {node for pair in pairs for node in pair} == {"n0007", "n4000", "n0000", "n0001", "n0002"}
    assert [one.node for one in severed({pair: "no route" if "n4000" in pair else "" for pair in pairs}, 0.0)] == ["n4000"]
    assert len(pairs_of(set(nodes), nodes)) == 3 * MOST + 3
