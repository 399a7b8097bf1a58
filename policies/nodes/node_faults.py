"""Decide which faults isolate the nodes that a recovery drops, and which make them suspect."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.detectors.catalogue import HARDWARE_OF_NODE, TAKES_NODE_OUT, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.nodes.node import AGENT_LOST, NODE_APART, NODE_LEAVING, NODE_LOST
from holdfast.detectors.training.process import START_FAILED
from holdfast.policies.nodes.cordons import CordonedFault
from holdfast.policies.recovery.case import Case

ENDED: Final = frozenset({NODE_LOST.id, AGENT_LOST.id, START_FAILED.id, NODE_LEAVING.id})
"""Kinds that report an end without a cause (power, maintenance, a missing command). They count against no node."""
UNSURE: Final = frozenset({NODE_APART.id})
"""Kinds that another node may have caused as well: they make a node suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """Faults that count against one node."""

    node: str
    severe: bool
    """The node is isolated; otherwise it becomes suspect."""
    reason: str
    evidence: tuple[str, ...]
    faults: tuple[CordonedFault, ...] = ()
    """Faults of the evidence."""
    seen: float
    """When the newest evidence was seen (Unix time)."""


def find_node_faults(case: Case, dropped: Collection[str]) -> list[NodeFault]:
    """Return the faults that count against the *dropped* nodes: not what other nodes caused, and not correlated faults.

    A node with a recurring fault is isolated whatever action that fault recommends.
    """
    found = []
    root = case.diagnosis.root
    for node in dropped:
        own = [fault for fault in case.against_nodes() if fault.node == node]
        isolating = isolating_fault(own, case.recommended_actions)
        if isolating is not None:
            found.append(isolating)
        elif own and node in case.worn:
            remarks = tuple(note for note in case.notes if node in note)
            found.append(_node_fault(node, own, severe=True, remarks=remarks))
        elif root in own and root.entry.attributed_to in HARDWARE_OF_NODE and root.kind not in ENDED:
            found.append(_node_fault(node, [root], severe=False))
    return found


def isolating_fault(faults: Iterable[Fault], recommended_actions: RecommendedActions) -> NodeFault | None:
    """Return the faults that isolate their node, if any."""
    severe = [fault for fault in faults if _isolates(fault, recommended_actions.of(fault))]
    return _node_fault(str(severe[0].node), severe, severe=True) if severe else None


def _isolates(fault: Fault, recommended_action: RecommendedAction) -> bool:
    if fault.node is None or fault.kind in ENDED | UNSURE or recommended_action not in TAKES_NODE_OUT:
        return False
    return recommended_action is not RecommendedAction.RESET_GPU or fault.entry.attributed_to in HARDWARE_OF_NODE


def _node_fault(node: str, faults: list[Fault], *, severe: bool, remarks: tuple[str, ...] = ()) -> NodeFault:
    quotes = (f"{fault.kind}: {fault.quote}" if fault.quote else fault.kind for fault in faults)
    evidence = tuple(dict.fromkeys((*remarks, *quotes)))
    cordoned = tuple(dict.fromkeys(CordonedFault(kind=fault.kind, device=fault.device) for fault in faults))
    return NodeFault(
        node=node, severe=severe, reason=evidence[0], evidence=evidence, faults=cordoned, seen=max(fault.at for fault in faults)
    )
