"""Who holds which ranks: from the nodes that stay to the next generation's membership."""

from __future__ import annotations

from collections.abc import Sequence

from policies.case import Decision, Seat

Membership = dict[str, list[int]]
"""Node to its global ranks in order of local rank."""


def members_after(members: Sequence[str], decision: Decision) -> tuple[str, ...]:
    """Return the members after *decision*: a spare takes the very place of the node it replaces, so that most ranks stay where they are."""
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


def place(members: Sequence[str], ranks_per_node: int) -> Membership:
    """Return which ranks each of *members* holds: consecutive, in the order given."""
    return {node: list(range(i * ranks_per_node, (i + 1) * ranks_per_node)) for i, node in enumerate(members)}


def regular(membership: Membership, ranks_per_node: int, lost: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the nodes that would hold all ranks if each held as many as it can, in the order of their ranks.

    After a take-over ranks may be spread over more nodes than they need: those that hold most of them count, lost ones last.
    """
    width = -(-sum(map(len, membership.values())) // ranks_per_node)
    chosen = sorted(membership, key=lambda node: (node in lost, -len(membership[node]), min(membership[node], default=0)))[:width]
    return tuple(node for node in membership if node in chosen)


def membership_after(membership: Membership, seats: tuple[Seat, ...]) -> Membership:
    """Return who holds which ranks once the *seats* are taken; one that stays on its node stays in its place there."""
    after = {node: list(ranks) for node, ranks in membership.items()}
    for seat in seats:
        if seat.rank in after.get(seat.node, ()):
            continue
        for ranks in after.values():
            if seat.rank in ranks:
                ranks.remove(seat.rank)
        after.setdefault(seat.node, []).append(seat.rank)
    return {node: ranks for node, ranks in after.items() if ranks}
