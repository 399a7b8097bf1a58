"""Who holds which ranks: from the nodes that stay to the next generation's membership."""

from __future__ import annotations

from collections.abc import Sequence

from policies.ladder import Decision

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
