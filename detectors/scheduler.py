"""Faults that the scheduler (Slurm) knows of a node: evidence for whoever asks why it was lost, and a reason to leave it."""

from __future__ import annotations

from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, fault_kind
from detectors.evidence import HangLimits, Sample, SchedulerNodeState

DEAD: Final = frozenset({"DOWN", "NOT_RESPONDING", "ERROR", "FAIL", "INVALID", "INVALID_REG", "POWERED_DOWN", "POWERING_DOWN"})
"""States in which the scheduler does not count on a node."""
LEAVING: Final = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAILING", "REBOOT_REQUESTED", "REBOOT_ISSUED"})
"""States in which it gives a node to no further job."""

NODE_DOWN: Final = fault_kind(
    id="scheduler-node-down",
    title="The scheduler does not count on a node any more",
    component="scheduler",
    source="states of nodes, as Slurm has them",
    recommended_action=RecommendedAction.MONITOR,
    blame=Blame.NODE,
    action="look at the node and at slurmd on it: its part of the allocation is gone, or will be in a moment",
    reference="https://slurm.schedmd.com/scontrol.html",
    unhealthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("DOWN", "NOT_RESPONDING"), reason="Not responding")),
    healthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED",))),
    weight=60,
)
NODE_DRAINED: Final = fault_kind(
    id="scheduler-node-drained",
    title="Somebody has the scheduler give a node to no further job",
    component="scheduler",
    source="states of nodes, as Slurm has them",
    recommended_action=RecommendedAction.RECORD,
    blame=Blame.NODE,
    action="leave the node when that interrupts nobody: who drained it wants to have it",
    reference="https://slurm.schedmd.com/scontrol.html",
    unhealthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED", "DRAIN"), reason="fan 3 is loud")),
    healthy=Sample(
        evidence=SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED", "DRAIN"), reason="holdfast: gpu-off-bus", ours=True)
    ),
    weight=40,
)


def see_word(seen: SchedulerNodeState, _limits: HangLimits) -> Fault | None:
    """Name what the scheduler holds against a node; nothing where it is we who told it."""
    states = frozenset(seen.states)
    entry = NODE_DOWN if states & DEAD else NODE_DRAINED if states & LEAVING and not seen.ours else None
    if entry is None:
        return None
    quote = f"{'+'.join(seen.states)}{f' ({seen.reason})' if seen.reason else ''}"
    return Fault(kind=entry.id, at=seen.at, node=seen.node, quote=quote, signature=entry.id)
