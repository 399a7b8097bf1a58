"""Which nodes are partitioned, by connections tried between nodes."""

from __future__ import annotations

import itertools

import pytest

from holdfast.control.faults.network import ALL_PAIRS, Pair, nodes_to_drop, pairs_of, partitioned

NODES = ("a", "b", "c", "d")


def tried(*failed: str, nodes: tuple[str, ...] = NODES) -> dict[Pair, str]:
    """Return the results of all pairs of *nodes*, of which those in *failed* did not connect."""
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
def test_a_node_that_reaches_none_while_others_reach_each_other_is_partitioned(failed: tuple[str, ...], found: list[str]) -> None:
    """Other failures do not show which node causes them."""
    assert [one.node for one in partitioned(tried(*failed), 5.0)] == found


def test_the_spare_node_shows_which_of_two_is_partitioned() -> None:
    """With two nodes alone that is unknown, and neither is named."""
    assert partitioned({("a", "b"): "timed out"}, 5.0) == []
    (found,) = partitioned({("a", "b"): "timed out", ("a", "c"): "", ("b", "c"): "no route"}, 5.0)
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
def test_as_few_nodes_as_possible_leave_so_that_the_others_reach_each_other(
    failed: tuple[str, ...], go: dict[str, tuple[str, ...]]
) -> None:
    """Of two the later one, as rank 0 is on the first; none where many would have to leave."""
    dropped = nodes_to_drop({(pair[0], pair[1]): "timed out" for pair in failed}, NODES, 5.0)
    assert {one.node: one.peers for one in dropped} == go
    assert not any(one.alone for one in dropped)
    assert {(one.at, one.why) for one in dropped} <= {(5.0, "timed out")}


def test_of_thousands_of_nodes_only_suspects_are_tried_with_some_others() -> None:
    """All pairs of four thousand nodes would be eight million connections."""
    nodes = [f"n{number:04}" for number in range(4096)]
    assert len(pairs_of([], nodes[:ALL_PAIRS])) == ALL_PAIRS * (ALL_PAIRS - 1) // 2
    pairs = pairs_of({"n0007", "n4000"}, nodes)
    assert {node for pair in pairs for node in pair} == {"n0007", "n4000", "n0000", "n0001", "n0002"}
    assert [one.node for one in partitioned({pair: "no route" if "n4000" in pair else "" for pair in pairs}, 0.0)] == ["n4000"]
    assert len(pairs_of(set(nodes), nodes)) == 3 * ALL_PAIRS + 3
