"""Where replicas live."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.nodes.replicas import assign_replica_nodes

NODES = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=10, unique=True)
DOMAINS = st.dictionaries(st.sampled_from("abcdefghij"), st.sampled_from("xyz"))


def alone(node: str) -> str:
    """Return a domain of its own for each node."""
    return node


def test_two_nodes_keep_each_others() -> None:
    """And one node has nobody."""
    assert assign_replica_nodes(["a", "b"], alone) == {"a": ("b",), "b": ("a",)}
    assert assign_replica_nodes(["a"], alone) == {"a": ()}
    assert assign_replica_nodes([], alone) == {}
    assert assign_replica_nodes(["a", "b"], alone, 0) == {"a": (), "b": ()}


def test_racks_take_turns() -> None:
    """Two racks of two: each node's replica is in the other one, and none has two."""
    racks = {"a": "x", "b": "x", "c": "y", "d": "y"}
    assert assign_replica_nodes("abcd", racks.__getitem__) == {"a": ("c",), "c": ("b",), "b": ("d",), "d": ("a",)}


@given(NODES, DOMAINS, st.integers(1, 3))
def test_a_home_is_another_node_of_another_domain_where_there_is_one(nodes: list[str], domains: dict[str, str], copies: int) -> None:
    """Never the node itself, never the same one twice."""
    homes = assign_replica_nodes(nodes, lambda node: domains.get(node, node), copies)
    assert list(homes) == nodes
    for node, held in homes.items():
        assert len(set(held)) == len(held) == min(copies, len(nodes) - 1)
        assert node not in held
        mine = domains.get(node, node)
        elsewhere = [other for other in nodes if domains.get(other, other) != mine]
        assert not elsewhere or domains.get(held[0], held[0]) != mine
        assert sum(domains.get(home, home) != mine for home in held) == min(len(held), len(elsewhere))


@given(NODES, st.integers(1, 3))
def test_where_each_node_fails_by_itself_all_keep_as_many(nodes: list[str], copies: int) -> None:
    """A ring."""
    homes = assign_replica_nodes(nodes, alone, copies)
    load = Counter(home for held in homes.values() for home in held)
    assert {load[node] for node in nodes} == {min(copies, len(nodes) - 1)}


@given(NODES, DOMAINS, st.data())
def test_a_change_of_one_node_moves_few(nodes: list[str], domains: dict[str, str], data: st.DataObject) -> None:
    """When one goes, those that it kept find another home, and one more may move to even out; so when one comes."""

    def domain_of(node: str) -> str:
        return domains.get(node, node)

    before = assign_replica_nodes(nodes, domain_of)
    gone = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != gone]
    after = assign_replica_nodes(left, domain_of, before=before)
    alone_now = {node for node in left if all(domain_of(other) == domain_of(node) for other in left)}
    orphans = {node for node in left if gone in before[node]}
    moved = {node for node in left if after[node] != before[node]} - orphans - alone_now
    if not domains:
        assert len(moved) <= 1
    again = assign_replica_nodes(nodes, domain_of, before=after)
    if not domains:
        assert len([node for node in left if again[node] != after[node]]) <= 1
    assert assign_replica_nodes(nodes, domain_of, before=before) == before


def test_homes_are_even_at_once() -> None:
    """Five nodes of eight fail together: those outside share them, and nothing is left to be evened out the next time."""
    nodes, domains = list("abcdefgh"), dict.fromkeys("abcde", "x")
    homes = assign_replica_nodes(nodes, lambda node: domains.get(node, node))
    assert assign_replica_nodes(nodes, lambda node: domains.get(node, node), before=homes) == homes


@given(NODES, DOMAINS)
def test_the_same_nodes_have_the_same_homes(nodes: list[str], domains: dict[str, str]) -> None:
    """A flow that comes after another one finds what that had arranged."""
    assert assign_replica_nodes(nodes, lambda node: domains.get(node, node)) == assign_replica_nodes(
        nodes, lambda node: domains.get(node, node)
    )
