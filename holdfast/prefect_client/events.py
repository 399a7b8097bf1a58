"""Send typed events to the Prefect server: only kinds and fields that `holdfast.prefect.event_kinds` lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventRelatedFilter, EventResourceFilter
from prefect.types import DateTime

from holdfast.history import this_host
from holdfast.prefect.event_kinds import (
    ATTENTION,
    CLUSTER,
    EVENTS,
    FLOW_RUN,
    HEARTBEAT,
    INFO,
    JOB,
    NODE,
    RESOLVED,
    resource_id,
)
from holdfast.prefect.links import ui_link
from holdfast.report.notifications import Notification, NotificationLevel, of_nodes

LOOK_BACK: Final = timedelta(days=7)
"""Events older than this are not searched."""
CHANNELS: Final = {NotificationLevel.ATTENTION: ATTENTION, NotificationLevel.RESOLVED: RESOLVED, NotificationLevel.INFO: INFO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """The object that an event is about, or is related to."""

    role: str
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        """Return its id in Prefect."""
        return resource_id(self.role, *self.names)

    def fields(self) -> dict[str, str]:
        """Return the fields that Prefect expects of an event's resource."""
        return {"prefect.resource.id": self.id, "prefect.resource.name": ".".join(self.names)}


def emit(name: str, about: Resource, related: Iterable[Resource] = (), **fields: object) -> Event | None:
    """Send the event *name* and return it; none if no server accepts events. Assert that the table of events lists all of it."""
    kind = EVENTS[name]
    others = list(related)
    assert fields.keys() == kind.fields.keys(), f"{name}: {sorted(fields.keys() ^ kind.fields.keys())}"
    unlisted = {one.role for one in others} - set(kind.related)
    assert not unlisted, f"{name} is not related to {unlisted}"
    event: Event | None = emit_event(
        event=name,
        resource=about.fields(),
        related=[{**one.fields(), "prefect.resource.role": one.role} for one in others],
        payload=fields,
    )
    return event


def notify(notification: Notification, about: Resource, related: Iterable[Resource] = ()) -> None:
    """Send *notification* to the addresses subscribed to its level."""
    emit(CHANNELS[notification.level], about, related, **asdict(notification))


class NodeChange(Protocol):
    """A state change of a node, as health checks and repairs report it."""

    @property
    def before(self) -> str:
        """Return the state before."""

    @property
    def after(self) -> str:
        """Return the state now."""

    @property
    def reason(self) -> str:
        """Return why."""


def flow_run_id() -> str:
    """Return the id of the flow run that this code runs in; empty outside of one."""
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context is not None and context.flow_run is not None else ""


def of_flow_run(ident: str) -> list[Resource]:
    """Return the flow run as a related resource, where there is one."""
    return [Resource(role=FLOW_RUN, names=(ident,))] if ident else []


def emit_nodes(cluster: str, changes: Sequence[tuple[str, NodeChange, dict[str, object]]]) -> None:
    """Send an event for each change of a node, and one notification for all changes that need attention."""
    resource, run = Resource(role=CLUSTER, names=(cluster,)), flow_run_id()
    for node, change, facts in changes:
        emit_node(cluster, node, change, [resource, *of_flow_run(run)], facts)
    states = {node: (str(change.after), change.reason) for node, change, _ in changes}
    notification = of_nodes(cluster, states, host=host(), link=ui_link("flow-run", run) if run else "")
    if notification is not None:
        emit(ATTENTION, resource, of_flow_run(run), **asdict(notification))


def emit_node(cluster: str, node: str, change: NodeChange, related: Iterable[Resource], facts: dict[str, object]) -> None:
    """Send the event of one node's change: of its state of service if *facts* name a `cordon`, else of its health."""
    states = {"before": str(change.before), "after": str(change.after), "reason": change.reason}
    about = Resource(role=NODE, names=(cluster, node))
    name = f"holdfast.node.service.{change.after}" if "cordon" in facts else f"holdfast.node.{change.after}"
    emit(name, about, related, cluster=cluster, node=node, **states, **facts)


def host() -> str:
    """Return the name of this host."""
    return this_host().partition("/")[0]


def last_heartbeat(job: str) -> str:
    """Return the id of the job's newest heartbeat that the server has recorded; empty if there is none."""
    return _newest(event=EventNameFilter(name=[HEARTBEAT]), resource=EventResourceFilter(id=[resource_id(JOB, job)]))


def alerted(heartbeat: str) -> bool:
    """Return whether an automation has fired on a heartbeat: an alert was sent that the job has no controller."""
    name = EventNameFilter(name=["prefect.automation.triggered"])
    return bool(_newest(event=name, related=EventRelatedFilter(id=[f"prefect.event.{heartbeat}"])))


def _newest(**filters: Any) -> str:  # noqa: ANN401 (fields of an EventFilter)
    """Return the id of the newest event that *filters* select; empty if there is none."""
    recent = EventOccurredFilter(since=DateTime.now("UTC") - LOOK_BACK)
    with get_client(sync_client=True) as client:
        found: Any = client.read_events(filter=EventFilter(occurred=recent, **filters), limit=1)
    return str(found.events[0].id) if found.events else ""
