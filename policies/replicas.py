"""Where each node's replicas live: on a node that does not fail together with it, spread evenly, moved as rarely as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Homes = dict[str, tuple[str, ...]]
"""Node to the nodes that keep its replicas."""


def assign_replica_nodes(
    nodes: Sequence[str], domain_of: Callable[[str], str], copies: int = 1, *, before: Mapping[str, Sequence[str]] | None = None
) -> Homes:
    """Return the homes of each of *nodes*: *copies* of them, fewer where there are not so many other nodes.

    A home lies in another failure domain where there is one. Homes that were chosen *before* stay where they can; no node keeps replicas of
    two more nodes than another one that could have had them.
    """
    homes: dict[str, list[str]] = {node: [] for node in nodes}
    load = dict.fromkeys(nodes, 0)
    for turn in range(copies):
        added = _one_each(
            _ring(nodes, domain_of), domain_of, homes, load, {node: old[turn] for node, old in (before or {}).items() if len(old) > turn}
        )
        for node, home in added.items():
            homes[node].append(home)
    return {node: tuple(held) for node, held in homes.items()}


def _one_each(
    ring: list[str], domain_of: Callable[[str], str], homes: Mapping[str, list[str]], load: dict[str, int], before: Mapping[str, str]
) -> dict[str, str]:
    """Return one more home for each node, and add it to *load*."""
    able = {node: _able(node, ring, domain_of, homes[node]) for node in ring}
    found = {node: before[node] for node in ring if before.get(node) in able[node]}
    for home in found.values():
        load[home] += 1
    for node in ring:
        if node not in found and able[node]:
            found[node] = min(able[node], key=lambda home: load[home])  # of equals the next one on the ring
            load[found[node]] += 1
    while _evened(found, able, load):
        pass
    return found


def _evened(found: dict[str, str], able: Mapping[str, list[str]], load: dict[str, int]) -> bool:
    """Take from homes that have too much; tell whether there was one. Each move makes the loads more even, so that there is a last one."""
    moved = False
    for node in sorted(found, key=lambda node: -load[found[node]]):
        best = min(able[node], key=lambda home: load[home])
        if load[found[node]] > load[best] + 1:
            load[found[node]] -= 1
            load[best] += 1
            found[node], moved = best, True
    return moved


def _able(node: str, ring: list[str], domain_of: Callable[[str], str], taken: Sequence[str]) -> list[str]:
    """Return who can keep replicas of *node*, its next one on the ring first: of other domains if there is any such node."""
    at = ring.index(node)
    others = [other for other in (*ring[at + 1 :], *ring[:at]) if other not in taken]
    domains = {domain_of(node), *map(domain_of, taken)}
    apart = [other for other in others if domain_of(other) not in domains]
    return apart or [other for other in others if domain_of(other) != domain_of(node)] or others


def _ring(nodes: Sequence[str], domain_of: Callable[[str], str]) -> list[str]:
    """Return *nodes* in an order in which domains take turns."""
    counts: dict[str, int] = {}
    places = {}
    for node in nodes:
        number = counts[domain_of(node)] = counts.get(domain_of(node), -1) + 1
        places[node] = number
    return sorted(nodes, key=lambda node: places[node])  # stable: within a turn as they were given
