"""What a node that is let go has to answer for: a fault of its own that takes it out of service, or one that leaves a doubt."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, RecommendedActions
from detectors.node import AGENT_LOST, NODE_APART, NODE_LEAVING, NODE_LOST
from detectors.process import START_FAILED
from policies.case import Case
from policies.cordons import CordonedFault

ENDED: Final = frozenset({NODE_LOST.id, AGENT_LOST.id, START_FAILED.id, NODE_LEAVING.id})
"""Kinds that say that something ended, and not why: power, maintenance, a command that is not there. They are held against no node."""
UNSURE: Final = frozenset({NODE_APART.id})
"""Kinds of which another node may be the reason just as well: they leave a doubt."""
OUT: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
_HARDWARE: Final = frozenset({Blame.GPU, Blame.NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """What speaks against one node."""

    node: str
    severe: bool
    """It takes the node out of service; else it leaves a doubt."""
    reason: str
    evidence: tuple[str, ...]
    faults: tuple[CordonedFault, ...] = ()
    """The faults that the evidence is of."""
    seen: float
    """When the newest of the evidence was seen (seconds since 1970)."""


def find_node_faults(case: Case, gone: Collection[str]) -> list[NodeFault]:
    """Return what the nodes that were let *gone* have to answer for by *case*: not what others did to them or what came on many.

    A node that had the same fault too often leaves, and is out of service, whatever that fault asks for by itself.
    """
    found = []
    root = case.diagnosis.root
    for node in gone:
        own = [fault for fault in case.against_nodes() if fault.node == node]
        severe = isolating_fault(own, case.recommended_actions)
        if severe is not None:
            found.append(severe)
        elif own and node in case.worn:
            words = tuple(note for note in case.notes if node in note)
            found.append(_offence(node, own, severe=True, words=words))
        elif root in own and root.entry.blame in _HARDWARE and root.kind not in ENDED:
            found.append(_offence(node, [root], severe=False))
    return found


def isolating_fault(faults: Iterable[Fault], recommended_actions: RecommendedActions) -> NodeFault | None:
    """Return what takes the node of these *faults* out of service, if anything does."""
    severe = [fault for fault in faults if _is_grave(fault, recommended_actions.of(fault))]
    return _offence(str(severe[0].node), severe, severe=True) if severe else None


def _is_grave(fault: Fault, recommended_action: RecommendedAction) -> bool:
    if fault.node is None or fault.kind in ENDED | UNSURE or recommended_action not in OUT:
        return False
    return recommended_action is not RecommendedAction.RESET_GPU or fault.entry.blame in _HARDWARE


def _offence(node: str, faults: list[Fault], *, severe: bool, words: tuple[str, ...] = ()) -> NodeFault:
    quotes = (f"{fault.kind}: {fault.quote}" if fault.quote else fault.kind for fault in faults)
    words = tuple(dict.fromkeys((*words, *quotes)))
    held = tuple(dict.fromkeys(CordonedFault(kind=fault.kind, device=fault.device) for fault in faults))
    return NodeFault(node=node, severe=severe, reason=words[0], evidence=words, faults=held, seen=max(fault.at for fault in faults))
