"""Nodes that Slurm is told to give to nobody, and those that it may use again: only what we drained ourselves is ever undone.

Other flows drain nodes in the same name, some by a history of their own, and a history may be away: a node that this flow does not keep out
is given back only where it did so before, or where the history has it back in service since the node was drained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.cluster.slurm.commands import asked
from holdfast.cluster.slurm.parsing import SlurmNodeState, node_states
from holdfast.cluster.slurm.transport import user
from holdfast.errors import HoldfastError, SlurmRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.spec import SlurmCluster
    from policies.cordons import Node

LONGEST: Final = 200
"""Letters of a reason."""


class Drains:
    """Drains nodes of one cluster in Slurm, in the name of one user."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._mark = f"holdfast {user()}/{cluster.name}: "
        self._drained: dict[str, str] = {}
        """Nodes that Slurm was asked to drain, and why it did not; empty when it did."""
        self._resumed: set[str] = set()
        self._kept_out: set[str] = set()
        """Nodes that were to be out at some time."""

    def keep_up(self, out: Mapping[str, str], back: Mapping[str, float], states: Mapping[str, SlurmNodeState]) -> Iterator[str]:
        """Have Slurm drain the nodes that are *out*, and give those back that are so no more; say what came of it.

        *back* says which nodes are in service again, and since when.
        """
        self._kept_out |= out.keys()
        for node, why in out.items():
            state = states.get(node)
            if state is not None and not state.is_leaving and node not in self._drained:
                refusal = self._drained[node] = self.drain(node, why)
                self._resumed.discard(node)
                yield f"{node} is excluded from what Slurm is asked for: {refusal}" if refusal else f"{node} is drained in Slurm: {why}"
        for state in states.values():
            is_back = state.name in self._kept_out or 0 < state.since <= back.get(state.name, 0.0)
            if state.is_leaving and self.are_of(state) and is_back and state.name not in out and state.name not in self._resumed:
                self._resumed.add(state.name)
                self._drained.pop(state.name, None)
                refusal = self.resume(state.name)
                yield f"Slurm keeps {state.name} drained: {refusal}" if refusal else f"{state.name} is given back to Slurm"

    def are_of(self, state: SlurmNodeState) -> bool:
        """Tell whether it was this user's Holdfast, for this cluster, that drained a node."""
        return state.reason.startswith(self._mark)

    def drain(self, node: str, why: str) -> str:
        """Have Slurm give *node* to no further job; return why it does not let us, or nothing."""
        return _updated(node, "State=DRAIN", f"Reason={self._mark}{' '.join(why.split())[:LONGEST]}")

    def resume(self, node: str) -> str:
        """Have Slurm give *node* to jobs again; return why it does not let us, or nothing."""
        return _updated(node, "State=RESUME")


def follow(cluster: SlurmCluster, node: Node) -> Iterator[str]:
    """Have Slurm know what a person said about *node*; yield what came of it."""
    drains = Drains(cluster)
    try:
        state = node_states(asked("sinfo", "--json")).get(node.name)
        if state is None or not cluster.drain:
            return
        if node.is_isolated and not state.is_leaving:
            why = drains.drain(node.name, node.holds[-1].reason)
            yield f"Slurm gives {node.name} to others still: {why}" if why else f"Slurm drains {node.name}."
        elif not node.is_isolated and state.is_leaving and drains.are_of(state):
            why = drains.resume(node.name)
            yield f"Slurm keeps {node.name} drained: {why}" if why else f"Slurm may give {node.name} to jobs again."
    except HoldfastError as error:
        yield f"{error}"


def _updated(node: str, *words: str) -> str:
    try:
        asked("scontrol", "update", f"NodeName={node}", *words)
    except SlurmRefused as error:
        permitted = "invalid user" not in error.why.lower() and "permission" not in error.why.lower()
        return error.why if permitted else f"Slurm does not let this user drain nodes ({error.why})"
    return ""
