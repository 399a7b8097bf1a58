"""The rank map answers as a plain mapping does, whatever moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.recovery.rank_map import RankMap, in_order

MOVES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c", "d", ""])), max_size=30)


@given(MOVES)
def test_a_rank_map_agrees_with_a_mapping_that_is_counted_anew(moves: list[tuple[int, str]]) -> None:
    """After any moves and drops: the same ranks on the same nodes, the same total and the same largest number on one node."""
    plain = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    ranks = RankMap(plain)
    for rank, node in moves:
        for some in plain.values():
            if rank in some:
                some.remove(rank)
        if node:
            plain.setdefault(node, []).append(rank)
            ranks.place(rank, node)
        else:
            ranks.drop(rank)
    left = {node: tuple(some) for node, some in plain.items() if some}
    assert dict(ranks) == left
    assert ranks.total == sum(map(len, left.values()))
    assert ranks.most == max(map(len, left.values()), default=1)
    assert {rank: ranks.node_of(rank) for rank in ranks.ranks()} == {rank: node for node, some in left.items() for rank in some}


@given(st.sets(st.sampled_from("abcdef")), st.permutations(list("abcd")))
def test_names_are_found_in_the_order_of_the_others(wanted: set[str], among: list[str]) -> None:
    """The order is that of the names among which they are looked for, whether these are a sequence or an iterator."""
    assert in_order(wanted, among) == in_order(wanted, iter(among)) == tuple(one for one in among if one in wanted)
