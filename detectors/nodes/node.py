"""Faults of agents and whole nodes."""

from __future__ import annotations

from functools import partial
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import AgentUnreachable, HangLimits, NodeLeaving, NodePartitioned, Sample, SchedulerNodeState, Unknown

_GONE: Final = "its connection ended"

_define = partial(fault_kind, component="node", recommended_action=RecommendedAction.EVICT, attributed_to=Attribution.NODE)
AGENT_LOST: Final = _define(
    id="agent-lost",
    title="An agent died, but its node still answers",
    component="agent",
    source="agent connection, second check of the node",
    recommended_action=RecommendedAction.RESTART,
    attributed_to=Attribution.PROCESS,
    action="start a new agent on the node and restart the workers, which died with the old one",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=True)),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=True)),
    weight=95,
)
NODE_LOST: Final = _define(
    id="node-lost",
    title="A node is lost: neither its agent nor the node answers",
    source="agent connection, second check of the node",
    action="replace the node by a spare and restart the workers",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=False)),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=False)),
    weight=100,
)
NODE_UNKNOWN: Final = _define(
    id="node-unknown",
    title="An agent is lost and its node could not be checked",
    source="agent connection",
    action="treat the node as lost: its workers are unreachable",
    unhealthy=Sample(AgentUnreachable(node="n0", at=0.0, why=_GONE, node_answers=Unknown("the probe could not run"))),
    healthy=Sample(AgentUnreachable(node="n0", at=0.0, why="", node_answers=Unknown("the probe could not run"))),
    weight=97,
)
NODE_LEAVING: Final = _define(
    id="node-leaving",
    title="A node will be taken away while ranks are still on it",
    source="drains, maintenance windows and notices",
    action="save the state of the ranks and continue without the node: it is not faulty",
    unhealthy=Sample(NodeLeaving(node="n0", at=0.0, why="drained by ann@desk until 18:00: new fan; no other node is free")),
    healthy=Sample(NodeLeaving(node="n0", at=0.0, why="")),
    weight=90,
)
NODE_SEVERED: Final = _define(
    id="node-partitioned",
    title="A node answers, but other nodes cannot reach it while they reach each other",
    source="test connections between nodes",
    action="replace the node by a spare; check its interface for training traffic, its cable and its firewall rules",
    unhealthy=Sample(NodePartitioned(node="n0", at=0.0, peers=("n1", "n2"), why="timed out after 1 s")),
    healthy=Sample(NodePartitioned(node="n0", at=0.0, peers=(), why="")),
    weight=98,
)
NODE_APART: Final = _define(
    id="pairwise-partition",
    title="Two nodes answer but cannot reach each other, so they cannot train together",
    source="test connections between nodes",
    action="check the routes, switches and firewalls between the two; the job continues without one of them until they reach each other",
    unhealthy=Sample(NodePartitioned(node="n0", at=0.0, peers=("n1",), why="timed out after 1 s", alone=False)),
    healthy=Sample(NodePartitioned(node="n0", at=0.0, peers=(), why="", alone=False)),
    weight=97,
    confused_with=("node-partitioned",),
)


def see_partition(seen: NodePartitioned, _limits: HangLimits) -> Fault | None:
    """Report a node that cannot reach some or all of its peers; None if it reaches all."""
    if not seen.peers:
        return None
    entry, answers = (NODE_SEVERED, "it answers here") if seen.alone else (NODE_APART, "all answer here")
    quote = f"{seen.node} and {', '.join(seen.peers)} do not reach each other ({seen.why}), and {answers}"
    return Fault(kind=entry.id, at=seen.at, node=seen.node, quote=quote, signature=entry.id)


def see_leaving(seen: NodeLeaving, _limits: HangLimits) -> Fault | None:
    """Report a node that must be left."""
    if not seen.why:
        return None
    return Fault(kind=NODE_LEAVING.id, at=seen.at, node=seen.node, step=seen.step, quote=seen.why, signature=NODE_LEAVING.id)


def see_agent_unreachable(seen: AgentUnreachable, _limits: HangLimits) -> Fault | None:
    """Report an unreachable agent, by a second check of its node; None while the agent answers."""
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
"""States in which the scheduler considers a node unusable."""
LEAVING: Final = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAILING", "REBOOT_REQUESTED", "REBOOT_ISSUED"})
"""States in which it assigns no further job to a node."""

NODE_DOWN: Final = fault_kind(
    id="scheduler-node-down",
    title="The scheduler considers a node down",
    component="scheduler",
    source="node states in Slurm",
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.NODE,
    action="check the node and its slurmd: its part of the allocation is lost, or soon will be",
    reference="https://slurm.schedmd.com/scontrol.html",
    unhealthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("DOWN", "NOT_RESPONDING"), reason="Not responding")),
    healthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED",))),
    weight=60,
)
NODE_DRAINED: Final = fault_kind(
    id="scheduler-node-drained",
    title="A node was drained in the scheduler",
    component="scheduler",
    source="node states in Slurm",
    recommended_action=RecommendedAction.RECORD,
    attributed_to=Attribution.NODE,
    action="leave the node when that does not interrupt training",
    reference="https://slurm.schedmd.com/scontrol.html",
    unhealthy=Sample(SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED", "DRAIN"), reason="fan 3 is loud")),
    healthy=Sample(
        evidence=SchedulerNodeState(node="n0", at=0.0, states=("ALLOCATED", "DRAIN"), reason="holdfast: gpu-off-bus", ours=True)
    ),
    weight=40,
)


def see_scheduler_state(seen: SchedulerNodeState, _limits: HangLimits) -> Fault | None:
    """Report a node that the scheduler considers down or drained, unless Holdfast drained it."""
    states = frozenset(seen.states)
    entry = NODE_DOWN if states & DEAD else NODE_DRAINED if states & LEAVING and not seen.ours else None
    if entry is None:
        return None
    quote = f"{'+'.join(seen.states)}{f' ({seen.reason})' if seen.reason else ''}"
    return Fault(kind=entry.id, at=seen.at, node=seen.node, quote=quote, signature=entry.id)
