"""Table of the events that Holdfast sends to the Prefect server: names, resources and fields. It generates docs/reference/events.md.

`holdfast.prefect_client.events` sends them and rejects what the table does not list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.policies.nodes.node_health import NodeHealthState
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.states import State

JOB: Final = "job"
NODE: Final = "node"
CLUSTER: Final = "cluster"
INCIDENT: Final = "incident"
FLOW_RUN: Final = "flow-run"
ADDRESS: Final = "address"

RESOURCES: Final[Mapping[str, str]] = {
    JOB: "holdfast.job.JOB",
    NODE: "holdfast.node.CLUSTER.NODE",
    CLUSTER: "holdfast.cluster.CLUSTER",
    INCIDENT: "holdfast.incident.JOB.NUMBER",
    FLOW_RUN: "prefect.flow-run.ID",
    ADDRESS: "holdfast.notify.NAME",
}
"""Resources of events: role to resource id."""

HEARTBEAT: Final = "holdfast.job.controller-alive"
HEARTBEAT_SECONDS: Final = 20.0
"""Seconds between two heartbeats of a controller."""
LOST_SECONDS: Final = 80.0
"""Seconds without a heartbeat after which an alert is sent: by then the job has had no controller for a minute at least."""
ATTENTION: Final = "holdfast.notification.attention"
RESOLVED: Final = "holdfast.notification.resolved"
INFO: Final = "holdfast.notification.info"
TEST: Final = "holdfast.notification.test"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    """One kind of event."""

    name: str
    about: str
    """Role of the resource that the event is about."""
    meaning: str
    related: tuple[str, ...] = ()
    """Roles of related resources, if any."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Payload: field name to meaning."""


_OF_JOB: Final = (FLOW_RUN, CLUSTER)
_OF_INCIDENT: Final = (FLOW_RUN, CLUSTER, INCIDENT, NODE)
_OF_NODE: Final = (CLUSTER, JOB, FLOW_RUN)

_STATES: Final[Mapping[State, str]] = {
    State.LAUNCHING: "Workers are being started",
    State.RUNNING: "Training runs",
    State.DIAGNOSING: "A fault was seen and is being diagnosed",
    State.DECIDING: "The policy decides what to do about a fault",
    State.ISOLATING: "Ranks are being stopped and unhealthy nodes taken out",
    State.RESCHEDULING: "Ranks are being placed on nodes",
    State.RESUMING: "Ranks are being started again, or taken over by hot spares",
    State.WAITING: "The job waits for nodes or for an approval",
    State.MIGRATING: "Ranks are being moved while training runs",
    State.SUSPENDED: "The job is saved, holds no nodes, and can be resumed",
    State.COMPLETED: "The job completed",
    State.FAILED: "The job failed for good",
    State.CANCELLED: "The job was stopped, or its time is over",
}
_MOVE: Final = {"before": "state before", "event": "event that caused it", "after": "state now", "reason": "reason"}
_NODE_MOVE: Final = {"cluster": "cluster", "node": "node", "before": "state before", "after": "state now", "reason": "reason"}
_INCIDENT: Final = {
    "number": "number of the incident in this job",
    "kind": "fault kind of the root cause",
    "target": "rank, node or device that it is attributed to",
    "summary": "the incident in one sentence",
}
_ENDED: Final = {
    **_INCIDENT,
    "outcome": "`recovered`, `passed`, `stopped` or `failed`",
    "action": "last recovery action",
    "downtime_s": "seconds from the fault to the first new step; until all processes had started where no steps are reported",
    "steps_lost": "steps that are computed again",
    "reason": "reason for the action",
}
_APPROVAL: Final = {"number": "number for the answer", "nodes": "nodes that may be isolated", "reason": "reason for the request"}
_NOTIFICATION: Final = {
    "id": "a later notification with the same id replaces the earlier one",
    "state": "`open`, `asked`, `over` or `ended`; `many` for several in one",
    "level": "`attention`, `resolved` or `info`",
    "subject": "one line",
    "text": "full text",
    "job": "job; empty where it is about nodes only",
    "cluster": "cluster",
    "host": "host of the controller",
    "nodes": "nodes concerned",
    "link": "page of the flow run in the Prefect UI",
}

_KINDS: Final = (
    *(
        EventKind(name=f"holdfast.job.{state.lower()}", about=JOB, related=_OF_JOB, meaning=meaning, fields=_MOVE)
        for state, meaning in _STATES.items()
    ),
    EventKind(
        name="holdfast.job.reattached",
        about=JOB,
        related=_OF_JOB,
        meaning="A new controller reattached to a job that ran without one",
        fields={"state": "state of the job", "host": "host of the new controller"},
    ),
    EventKind(
        name=HEARTBEAT,
        about=JOB,
        related=_OF_JOB,
        meaning=f"A controller runs the job; sent every {HEARTBEAT_SECONDS:.0f} s. While the job has not ended, an automation "
        "sends an alert when these stop",
        fields={
            "state": "state of the job",
            "host": "host of the controller",
            "step": "newest step",
            "alert": "the notification to send when no further heartbeat comes",
        },
    ),
    EventKind(
        name="holdfast.fault.seen",
        about=JOB,
        related=_OF_INCIDENT,
        meaning="A fault was seen; the same kind on the same target is sent once an hour, and once for each incident",
        fields={
            "kind": "fault kind",
            "target": "rank, node or device",
            "quote": "evidence, verbatim",
            "recommended_action": "what the fault asks for",
            "node": "node, if known",
            "rank": "rank, if known",
        },
    ),
    EventKind(name="holdfast.incident.opened", about=JOB, related=_OF_INCIDENT, meaning="An incident began", fields=_INCIDENT),
    EventKind(name="holdfast.incident.recovered", about=JOB, related=_OF_INCIDENT, meaning="Training continues", fields=_ENDED),
    EventKind(
        name="holdfast.incident.closed", about=JOB, related=_OF_INCIDENT, meaning="An incident ended without a recovery", fields=_ENDED
    ),
    EventKind(name="holdfast.approval.asked", about=JOB, related=_OF_JOB, meaning="An approval is requested", fields=_APPROVAL),
    EventKind(
        name="holdfast.approval.answered",
        about=JOB,
        related=_OF_JOB,
        meaning="The request was answered, expired, or was withdrawn",
        fields={**_APPROVAL, "answer": "`isolate`, `keep` or `withdrawn`", "by": "who answered", "summary": "summary of the answer"},
    ),
    *(
        EventKind(
            name=f"holdfast.node.{health}",
            about=NODE,
            related=_OF_NODE,
            meaning=f"A health check found the node {health}; its health was different before",
            fields={**_NODE_MOVE, "kinds": "new fault kinds"},
        )
        for health in NodeHealthState
    ),
    *(
        EventKind(
            name=f"holdfast.node.service.{state}",
            about=NODE,
            related=_OF_NODE,
            meaning=f"The node's state of service became {state}: by a job, or by node-repair",
            fields={**_NODE_MOVE, "cordon": "number of the cordon that it is about"},
        )
        for state in NodeState
    ),
    EventKind(name=ATTENTION, about=JOB, related=_OF_INCIDENT, meaning="A notification that a person should act on", fields=_NOTIFICATION),
    EventKind(
        name=RESOLVED,
        about=JOB,
        related=_OF_INCIDENT,
        meaning="A notification that replaces one that asked for attention: no action is needed any more",
        fields=_NOTIFICATION,
    ),
    EventKind(
        name=INFO,
        about=JOB,
        related=_OF_INCIDENT,
        meaning="A notification for information: an incident that recovered, a job that completed",
        fields=_NOTIFICATION,
    ),
    EventKind(name=TEST, about=ADDRESS, meaning="`holdfast admin notify test NAME`: goes to this address only", fields=_NOTIFICATION),
)
EVENTS: Final[Mapping[str, EventKind]] = {kind.name: kind for kind in _KINDS}
"""Event name to kind. Notifications about nodes only have the cluster as their resource."""


def resource_id(role: str, *names: object) -> str:
    """Return the id of the resource of *role*: `resource_id("node", "lab", "node-1")`."""
    prefix = RESOURCES[role].partition(".")[0]
    return ".".join([prefix, "notify" if role == ADDRESS else role, *map(str, names)])


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the table as text: name, meaning, resource, related resources, payload."""
    for kind in EVENTS.values():
        yield (
            f"`{kind.name}`",
            kind.meaning,
            kind.about,
            ", ".join(kind.related),
            "; ".join(f"`{name}`: {meaning}" for name, meaning in kind.fields.items()),
        )
