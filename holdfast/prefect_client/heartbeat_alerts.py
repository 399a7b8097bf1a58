"""Alerts for jobs without a controller: a proactive automation for each job and address, made by the controller and deleted at the end.

It waits after each heartbeat for the next one, so the Prefect server sends the alert when every process of Holdfast is gone. One automation
for all jobs, which the event of a job's end releases, would not do: to end a wait the server reads before it writes, which SQLite refuses
("database is locked") when anybody writes in between, as at the end of a flow; the event is dropped, and the alert sent for a job that is
over.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import ActionTypes, CallWebhook, SendNotification
from prefect.events.filters import AutomationFilter, AutomationFilterTags
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture

from holdfast.prefect.event_kinds import HEARTBEAT, JOB, resource_id
from holdfast.report.wording import about

PREFIX: Final = "holdfast-"
"""The names of our blocks and automations begin with it."""
ADDRESS: Final = "holdfast-address"
"""Tag of the automations that send notifications to an address."""
ALERT: Final = "holdfast-alert"
"""Tag of the automations that wait for the heartbeats of a job."""
AFTER: Final = "holdfast-no-controller-after-"
"""How the tag of an address begins that says after how many seconds it gets the alert."""

SUBJECT: Final = "{{ event.payload.alert.subject }}"
TEXT: Final = "{{ event.payload.alert.text }}"
WHOLE: Final = (
    '{"event": "holdfast.notification.attention", "at": {{ event.occurred.isoformat() | tojson }}, '
    '"resource": {{ event.resource.id | tojson }}, "payload": {{ event.payload.alert | tojson }}}'
)
"""What a webhook is sent: the last heartbeat brought the alert along."""


def of_job(job: str) -> str:
    """Return the tag of the automations that wait for the heartbeats of *job*."""
    return f"{ALERT}-{job}"


def after_tag(seconds: float) -> str:
    """Return the tag that says after how many seconds an address gets the alert."""
    return f"{AFTER}{seconds:g}"


def seconds_of(address: Automation) -> float:
    """Return after how many seconds without a heartbeat an address gets the alert; 0: never."""
    return next((float(tag.removeprefix(AFTER)) for tag in address.tags if tag.startswith(AFTER)), 0.0)


def tagged(client: SyncPrefectClient, *tags: str) -> list[Automation]:
    """Return the automations that have all of *tags*, by name."""
    found = client.read_automations(automations=AutomationFilter(tags=AutomationFilterTags(all_=list(tags))))
    return sorted(found, key=lambda one: one.name)


def watch(job: str) -> None:
    """Have an alert sent when the heartbeats of *job* stop, to each address that wants it; what waits already is kept."""
    with get_client(sync_client=True) as client:
        there = {one.name: one for one in tagged(client, of_job(job))}
        for address in tagged(client, ADDRESS):
            seconds = seconds_of(address)
            wanted = _alert(address, job, seconds)
            before = there.pop(wanted.name, None)
            if before is not None and _is_same(before, wanted):
                continue
            if before is not None:
                client.delete_automation(before.id)
            if seconds:
                client.create_automation(wanted)
        for one in there.values():  # of addresses that are gone
            client.delete_automation(one.id)


def unwatch(job: str) -> None:
    """Expect no heartbeat of *job* any more."""
    with get_client(sync_client=True) as client:
        for one in tagged(client, of_job(job)):
            client.delete_automation(one.id)


def _alert(address: Automation, job: str, seconds: float) -> AutomationCore:
    """Return the automation that waits for the heartbeats of *job* and sends the alert to *address*."""
    return AutomationCore(
        name=f"{address.name}-alert-{job}",
        description=f"Sends an alert when job {job} has had no controller for {about(seconds)}. Made and deleted by its controller.",
        tags=[ALERT, of_job(job)],
        trigger=EventTrigger(
            match=cast("Any", {"prefect.resource.id": resource_id(JOB, job)}),
            after={HEARTBEAT},
            expect={HEARTBEAT},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=max(seconds, 10.0)),
        ),
        actions=[action(one.block_document_id, one, SUBJECT, TEXT, WHOLE) for one in _sends(address)],
    )


def _sends(address: Automation) -> list[CallWebhook | SendNotification]:
    return [one for one in address.actions if isinstance(one, CallWebhook | SendNotification)]


def _is_same(before: Automation, wanted: AutomationCore) -> bool:
    """Tell whether an automation is as it should be."""
    assert isinstance(wanted.trigger, EventTrigger)
    trigger = before.trigger
    same_time = isinstance(trigger, EventTrigger) and trigger.within == wanted.trigger.within
    return same_time and [one.model_dump() for one in before.actions] == [one.model_dump() for one in wanted.actions]


def action(block: UUID, like: ActionTypes | type[ActionTypes], subject: str, text: str, whole: str) -> ActionTypes:
    """Return what the server does with an event: a webhook is sent JSON, everything else subject and text."""
    if like is CallWebhook or isinstance(like, CallWebhook):
        return CallWebhook(block_document_id=block, payload=whole)
    return SendNotification(block_document_id=block, subject=subject, body=text)
