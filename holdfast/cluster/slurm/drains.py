"""Drain nodes in Slurm and resume them; only drains of our own are ever undone.

Other controllers drain nodes under the same user, some with their own history, and a history may be unreachable. So a node that this
controller does not exclude is resumed only where it excluded it before, or where the history has it back in service since the drain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.cluster.slurm.commands import run_command, user
from holdfast.cluster.slurm.parsing import SlurmNodeState, node_states
from holdfast.errors import HoldfastError, SlurmRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.policies.nodes.cordons import Node
    from holdfast.spec import SlurmCluster

MAX_REASON: Final = 200
"""Letters of a reason."""


class Drains:
    """Drains the nodes of one cluster in Slurm as one user."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._prefix = f"holdfast {user()}/{cluster.name}: "
        self._drained: set[str] = set()
        """Nodes that Slurm has drained, or refused to drain."""
        self._resumed: set[str] = set()
        self._excluded: set[str] = set()
        """Nodes that were excluded at any time."""

    def update(self, excluded: Mapping[str, str], returned: Mapping[str, float], states: Mapping[str, SlurmNodeState]) -> Iterator[str]:
        """Drain the *excluded* nodes and resume those that are excluded no longer; yield a message for each.

        *returned* maps nodes that are in service again to when that began (seconds since 1970).
        """
        self._excluded |= excluded.keys()
        for node, why in excluded.items():
            state = states.get(node)
            if state is not None and not state.is_leaving and node not in self._drained:
                refusal = self.drain(node, why)
                self._drained.add(node)
                self._resumed.discard(node)
                yield f"{node} is excluded from requests to Slurm: {refusal}" if refusal else f"{node} is drained in Slurm: {why}"
        for state in states.values():
            may_resume = state.name in self._excluded or 0 < state.since <= returned.get(state.name, 0.0)
            if state.is_leaving and self.are_of(state) and may_resume and state.name not in excluded and state.name not in self._resumed:
                self._resumed.add(state.name)
                self._drained.discard(state.name)
                refusal = self.resume(state.name)
                yield f"Slurm keeps {state.name} drained: {refusal}" if refusal else f"{state.name} is resumed in Slurm"

    def are_of(self, state: SlurmNodeState) -> bool:
        """Return whether this user's Holdfast drained a node, for this cluster."""
        return state.reason.startswith(self._prefix)

    def drain(self, node: str, why: str) -> str:
        """Drain *node*; return why Slurm refuses, or nothing."""
        return _update_node(node, "State=DRAIN", f"Reason={self._prefix}{' '.join(why.split())[:MAX_REASON]}")

    def resume(self, node: str) -> str:
        """Resume *node*; return why Slurm refuses, or nothing."""
        return _update_node(node, "State=RESUME")


def follow(cluster: SlurmCluster, node: Node) -> Iterator[str]:
    """Drain or resume *node* in Slurm after an operator's command; yield a message for what was done."""
    drains = Drains(cluster)
    try:
        state = node_states(run_command("sinfo", "--json")).get(node.name)
        if state is None or not cluster.drain:
            return
        if node.is_isolated and not state.is_leaving:
            why = drains.drain(node.name, node.cordons[-1].reason)
            yield f"Slurm still gives {node.name} to other jobs: {why}" if why else f"Slurm drains {node.name}."
        elif not node.is_isolated and state.is_leaving and drains.are_of(state):
            why = drains.resume(node.name)
            yield f"Slurm keeps {node.name} drained: {why}" if why else f"Slurm may give {node.name} to jobs again."
    except HoldfastError as error:
        yield f"{error}"


def _update_node(node: str, *fields: str) -> str:
    try:
        run_command("scontrol", "update", f"NodeName={node}", *fields)
    except SlurmRefused as error:
        permitted = "invalid user" not in error.why.lower() and "permission" not in error.why.lower()
        return error.why if permitted else f"Slurm does not let this user drain nodes ({error.why})"
    return ""
