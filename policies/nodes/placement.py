"""Assign ranks to nodes, and replicas to replica nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.policies.recovery.case import Decision, Placement

Membership = dict[str, list[int]]
"""Node to its global ranks, in order of local rank."""


def members_after(members: Sequence[str], decision: Decision) -> tuple[str, ...]:
    """Return the members after *decision*: a spare takes the position of the node it replaces, so that most ranks stay on their nodes."""
    added = list(decision.add)
    after: list[str] = []
    for node in members:
        if node not in decision.drop:
            after.append(node)
        elif added:
            after.append(added.pop(0))
    if decision.rotate:
        after = after[1:] + after[:1]
    return tuple(after + added)


def place(members: Sequence[str], ranks_per_node: int, world: int = 0) -> Membership:
    """Assign consecutive ranks to *members*, in the order given.

    If they are too few for *world* ranks, the first ones get more, so that no rank is lost; this can happen after ranks were replaced.
    """
    over, membership, first = max(0, world - len(members) * ranks_per_node), dict[str, list[int]](), 0
    for place, node in enumerate(members):
        count = ranks_per_node + over // len(members) + (place < over % len(members))
        membership[node] = list(range(first, first + count))
        first += count
    return membership


def with_spares(members: Sequence[str], spares: Sequence[str], width: int) -> tuple[str, ...]:
    """Return *members*, filled up with *spares* to *width* nodes."""
    known = set(members)
    more = [node for node in spares if node not in known]
    return (*members, *more[: max(0, width - len(members))])


def nodes_needed(membership: Membership, ranks_per_node: int, lost: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the nodes that all ranks need if each node takes as many as it can, in rank order.

    After ranks were replaced they may be on more nodes than they need: nodes with the most ranks count first, lost ones last.
    """
    width = -(-sum(map(len, membership.values())) // ranks_per_node)
    if width >= len(membership):
        return tuple(membership)
    chosen = set(sorted(membership, key=lambda node: (node in lost, -len(membership[node]), min(membership[node], default=0)))[:width])
    return tuple(node for node in membership if node in chosen)


def membership_after(membership: Membership, seats: tuple[Placement, ...], vacate: Collection[int] = ()) -> Membership:
    """Return the membership after moving ranks to *seats* and dropping those to *vacate*; a rank that stays keeps its position."""
    after = {node: [rank for rank in ranks if rank not in vacate] for node, ranks in membership.items()}
    for seat in seats:
        if seat.rank in after.get(seat.node, ()):
            continue
        for ranks in after.values():
            if seat.rank in ranks:
                ranks.remove(seat.rank)
        after.setdefault(seat.node, []).append(seat.rank)
    return {node: ranks for node, ranks in after.items() if ranks}
