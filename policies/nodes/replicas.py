"""Assign replica nodes: in another failure domain, evenly spread, and moved as rarely as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

ReplicaNodes = dict[str, tuple[str, ...]]
"""Node to its replica nodes."""


def assign_replica_nodes(
    nodes: Sequence[str], domain_of: Callable[[str], str], copies: int = 1, *, before: Mapping[str, Sequence[str]] | None = None
) -> ReplicaNodes:
    """Return *copies* replica nodes for each of *nodes*, fewer if there are not enough other nodes.

    A replica node is in another failure domain if there is one. Those assigned *before* stay if possible. No node keeps replicas of two
    more nodes than another node that could keep them.
    """
    assigned: dict[str, list[str]] = {node: [] for node in nodes}
    load = dict.fromkeys(nodes, 0)
    for turn in range(copies):
        added = _one_each(
            _ring(nodes, domain_of), domain_of, assigned, load, {node: old[turn] for node, old in (before or {}).items() if len(old) > turn}
        )
        for node, home in added.items():
            assigned[node].append(home)
    return {node: tuple(held) for node, held in assigned.items()}


def _one_each(
    ring: list[str], domain_of: Callable[[str], str], assigned: Mapping[str, list[str]], load: dict[str, int], before: Mapping[str, str]
) -> dict[str, str]:
    """Return one more replica node for each node, and add it to *load*."""
    possible = {node: _possible(node, ring, domain_of, assigned[node]) for node in ring}
    found = {node: before[node] for node in ring if before.get(node) in possible[node]}
    for home in found.values():
        load[home] += 1
    for node in ring:
        if node not in found and possible[node]:
            found[node] = min(possible[node], key=lambda home: load[home])  # a tie goes to the next node on the ring
            load[found[node]] += 1
    while _rebalance(found, possible, load):
        pass
    return found


def _rebalance(found: dict[str, str], possible: Mapping[str, list[str]], load: dict[str, int]) -> bool:
    """Move replicas away from overloaded nodes; return whether one moved. Each move makes the loads more even, so this terminates."""
    moved = False
    for node in sorted(found, key=lambda node: -load[found[node]]):
        best = min(possible[node], key=lambda home: load[home])
        if load[found[node]] > load[best] + 1:
            load[found[node]] -= 1
            load[best] += 1
            found[node], moved = best, True
    return moved


def _possible(node: str, ring: list[str], domain_of: Callable[[str], str], taken: Sequence[str]) -> list[str]:
    """Return the possible replica nodes of *node*, the next one on the ring first; in other failure domains if there are any."""
    at = ring.index(node)
    others = [other for other in (*ring[at + 1 :], *ring[:at]) if other not in taken]
    domains = {domain_of(node), *map(domain_of, taken)}
    separate = [other for other in others if domain_of(other) not in domains]
    return separate or [other for other in others if domain_of(other) != domain_of(node)] or others


def _ring(nodes: Sequence[str], domain_of: Callable[[str], str]) -> list[str]:
    """Return *nodes* ordered so that failure domains alternate."""
    counts: dict[str, int] = {}
    places = {}
    for node in nodes:
        number = counts[domain_of(node)] = counts.get(domain_of(node), -1) + 1
        places[node] = number
    return sorted(nodes, key=lambda node: places[node])  # stable: within a turn as they were given
