"""Alerts for jobs without a controller: one proactive automation per job and address, created by the controller and deleted at the end.

The automation waits after each heartbeat for the next one, so the Prefect server sends the alert even if every process of Holdfast is dead.
A single automation for all jobs, ended by the event of a job's end, does not work: to end a wait the server reads before it writes, and
SQLite fails ("database is locked") if another write comes in between, as at the end of a flow. The event is then dropped, and the alert is
sent for a job that has ended.
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
from holdfast.report.text.wording import about

PREFIX: Final = "holdfast-"
"""Prefix of the names of our blocks and automations."""
ADDRESS: Final = "holdfast-address"
"""Tag of the automations that send notifications to an address."""
ALERT: Final = "holdfast-alert"
"""Tag of the automations that wait for the heartbeats of a job."""
AFTER: Final = "holdfast-no-controller-after-"
"""Prefix of the tag of an address that gives the seconds after which it gets the alert."""

SUBJECT: Final = "{{ event.payload.alert.subject }}"
TEXT: Final = "{{ event.payload.alert.text }}"
WEBHOOK_BODY: Final = (
    '{"event": "holdfast.notification.attention", "at": {{ event.occurred.isoformat() | tojson }}, '
    '"resource": {{ event.resource.id | tojson }}, "payload": {{ event.payload.alert | tojson }}}'
)
"""JSON for a webhook: the last heartbeat carries the alert."""


def of_job(job: str) -> str:
    """Return the tag of the automations that wait for the heartbeats of *job*."""
    return f"{ALERT}-{job}"


def after_tag(seconds: float) -> str:
    """Return the tag for an address that gets the alert after *seconds*."""
    return f"{AFTER}{seconds:g}"


def seconds_of(address: Automation) -> float:
    """Return the seconds without a heartbeat after which an address gets the alert; 0: never."""
    return next((float(tag.removeprefix(AFTER)) for tag in address.tags if tag.startswith(AFTER)), 0.0)


def tagged(client: SyncPrefectClient, *tags: str) -> list[Automation]:
    """Return the automations that have all of *tags*, by name."""
    found = client.read_automations(automations=AutomationFilter(tags=AutomationFilterTags(all_=list(tags))))
    return sorted(found, key=lambda one: one.name)


def watch(job: str) -> None:
    """Have an alert sent to each subscribed address when the heartbeats of *job* stop; automations that are up to date are kept."""
    with get_client(sync_client=True) as client:
        existing = {one.name: one for one in tagged(client, of_job(job))}
        for address in tagged(client, ADDRESS):
            seconds = seconds_of(address)
            alert = _alert(address, job, seconds)
            before = existing.pop(alert.name, None)
            if before is not None and _is_same(before, alert):
                continue
            if before is not None:
                client.delete_automation(before.id)
            if seconds:
                client.create_automation(alert)
        for one in existing.values():  # of removed addresses
            client.delete_automation(one.id)


def unwatch(job: str) -> None:
    """Stop expecting heartbeats of *job*."""
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
        actions=[
            action(one.block_document_id, isinstance(one, CallWebhook), SUBJECT, TEXT, WEBHOOK_BODY)
            for one in address.actions
            if isinstance(one, CallWebhook | SendNotification)
        ],
    )


def _is_same(before: Automation, alert: AutomationCore) -> bool:
    """Return whether an existing automation is up to date."""
    assert isinstance(alert.trigger, EventTrigger)
    same_time = isinstance(before.trigger, EventTrigger) and before.trigger.within == alert.trigger.within
    return same_time and [one.model_dump() for one in before.actions] == [one.model_dump() for one in alert.actions]


def action(block: UUID, is_webhook: bool, subject: str, text: str, webhook_body: str) -> ActionTypes:  # noqa: FBT001 (one caller each way)
    """Return the server's action for an event: JSON to a webhook, subject and text to everything else."""
    if is_webhook:
        return CallWebhook(block_document_id=block, payload=webhook_body)
    return SendNotification(block_document_id=block, subject=subject, body=text)
