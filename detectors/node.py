"""Faults of agents and whole nodes."""

from __future__ import annotations

from functools import partial
from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, fault_kind
from detectors.evidence import AgentUnreachable, HangLimits, NodeLeaving, NodePartitioned, Sample, SchedulerNodeState, Unknown

_GONE: Final = "its connection ended"

_define = partial(fault_kind, component="node", recommended_action=RecommendedAction.EVICT, blame=Blame.NODE)
AGENT_LOST: Final = _define(
    id="agent-lost",
    title="An agent died, but its node still answers",
    component="agent",
    source="agent connection, second look at the node",
    recommended_action=RecommendedAction.RESTART,
    blame=Blame.PROCESS,
    action="start a new agent on the node and restart the workers, which died with the old one",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=True)),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=True)),
    weight=95,
)
NODE_LOST: Final = _define(
    id="node-lost",
    title="A whole node is gone: neither its agent nor the node answers",
    source="agent connection, second look at the node",
    action="replace the node by a spare and restart the workers",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=False)),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=False)),
    weight=100,
)
NODE_UNKNOWN: Final = _define(
    id="node-unknown",
    title="An agent is gone and nobody could look whether its node lives",
    source="agent connection",
    action="treat the node as lost: its workers cannot be reached",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=Unknown("the probe could not run"))),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=Unknown("the probe could not run"))),
    weight=97,
)
NODE_LEAVING: Final = _define(
    id="node-leaving",
    title="A node is about to be taken away, and ranks are still on it",
    source="drains, maintenance windows and notices",
    action="save what the ranks have and go on without the node: nothing is held against it",
    unhealthy=Sample(NodeLeaving(node="n0", at=0.0, why="drained by ann@desk until 18:00: new fan; no other node is free")),
    healthy=Sample(NodeLeaving(node="n0", at=0.0, why="")),
    weight=90,
)
NODE_SEVERED: Final = _define(
    id="node-severed",
    title="A node answers, and other nodes do not reach it while they reach each other",
    source="connections tried between nodes",
    action="replace the node by a spare; look at its interface for training traffic, its cable and the rules of its firewall",
    unhealthy=Sample(NodePartitioned(node="n0", at=0.0, peers=("n1", "n2"), why="timed out after 1 s")),
    healthy=Sample(NodePartitioned(node="n0", at=0.0, peers=(), why="")),
    weight=98,
)
NODE_APART: Final = _define(
    id="node-apart",
    title="Two nodes answer and do not reach each other: they cannot train together",
    source="connections tried between nodes",
    action="look at what is between the two, routes, switch and firewalls; the job goes on without one of them until they meet",
    unhealthy=Sample(NodePartitioned(node="n0", at=0.0, peers=("n1",), why="timed out after 1 s", alone=False)),
    healthy=Sample(NodePartitioned(node="n0", at=0.0, peers=(), why="", alone=False)),
    weight=97,
    confused_with=("node-severed",),
)


def see_severed(seen: NodePartitioned, _limits: HangLimits) -> Fault | None:
    """Name a node that is cut off from its peers, or from some of them; None where none was tried in vain."""
    if not seen.peers:
        return None
    entry, answers = (NODE_SEVERED, "it answers here") if seen.alone else (NODE_APART, "all answer here")
    quote = f"{seen.node} and {', '.join(seen.peers)} do not reach each other ({seen.why}), and {answers}"
    return Fault(kind=entry.id, at=seen.at, node=seen.node, quote=quote, signature=entry.id)


def see_leaving(seen: NodeLeaving, _limits: HangLimits) -> Fault | None:
    """Name a node whose time is up."""
    if not seen.why:
        return None
    return Fault(kind=NODE_LEAVING.id, at=seen.at, node=seen.node, step=seen.step, quote=seen.why, signature=NODE_LEAVING.id)


def see_silence(seen: AgentUnreachable, _limits: HangLimits) -> Fault | None:
    """Name what an agent's silence means, by a second look at its node; None while the agent speaks."""
    if not seen.why:
        return None
    if isinstance(seen.node_answers, Unknown):
        entry, second = NODE_UNKNOWN, f"whether the node lives could not be seen ({seen.node_answers.why})"
    elif seen.node_answers:
        entry, second = AGENT_LOST, "the node itself answers"
    else:
        entry, second = NODE_LOST, "the node does not answer either"
    quote = f"the agent is gone ({seen.why}); {second}"
    return Fault(kind=entry.id, at=seen.at, node=seen.node, step=seen.step, quote=quote, signature=entry.id)


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
