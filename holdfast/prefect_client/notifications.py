"""Addresses of notifications: a Prefect block and an automation for each, so that the server sends them even if a flow dies.

``python -m holdfast.prefect_client.notifications`` reads one command as JSON from standard input, as addresses contain secrets;
`holdfast admin notify` runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from holdfast.errors import OperatorError
from holdfast.prefect.event_kinds import ADDRESS, ATTENTION, CLUSTER, INFO, JOB, LOST_SECONDS, RESOLVED, TEST, resource_id
from holdfast.prefect_client import events
from holdfast.prefect_client.heartbeat_alerts import ADDRESS as ADDRESS_TAG
from holdfast.prefect_client.heartbeat_alerts import ALERT, PREFIX, action, after_tag, seconds_of, tagged
from holdfast.prefect_client.notification_addresses import KINDS, block_of, is_generic
from holdfast.report.notifications import Notification, NotificationLevel

DEFAULT_EVENTS: Final = (ATTENTION, RESOLVED, TEST)
ALL_EVENTS: Final = (*DEFAULT_EVENTS, INFO)
SUBJECT: Final = "{{ event.payload.subject }}"
TEXT: Final = "{{ event.payload.text }}"
WEBHOOK_BODY: Final = (
    '{"event": {{ event.event | tojson }}, "at": {{ event.occurred.isoformat() | tojson }}, "resource": {{ event.resource.id | tojson }}, '
    '"payload": {{ event.payload | tojson }}}'
)
"""JSON for a webhook: of two with the same `payload.id` the later one replaces the earlier one."""


class NotSent(OperatorError):
    """The Prefect server did not carry out a command."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the Prefect server did not do it: {self.why}. Check PREFECT_API_URL, and that the server is up."


class NoSuchAddress(OperatorError):
    """There is no address of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def __str__(self) -> str:
        return f"no address is called '{self.name}'. " + (f"There are: {', '.join(self.known)}." if self.known else "There is none.")


def add(name: str, *, url: str, everything: bool, lost_after: float = LOST_SECONDS) -> dict[str, Any]:
    """Add or replace an address. It also gets an alert when a job has had no controller for *lost_after* seconds (0: never)."""
    block = block_of(url)
    block_id = cast("UUID", block.save(PREFIX + name, overwrite=True))
    with get_client(sync_client=True) as client:
        _delete(client, name)
        client.create_automation(_of_notifications(name, block, block_id, everything=everything, lost_after=lost_after))
    _delete_blocks(name, but=type(block))
    found = {"name": name, "block": type(block).get_block_type_slug(), "generic": is_generic(block, url), "all": everything}
    return {**found, "lost_after": lost_after}


def _of_notifications(name: str, block: Block, block_id: UUID, *, everything: bool, lost_after: float) -> AutomationCore:
    """Return the automation that forwards notification events; controllers read from its tags when the address gets an alert."""
    resources = [resource_id(JOB, "*"), resource_id(CLUSTER, "*"), resource_id(ADDRESS, name)]
    return AutomationCore(
        name=PREFIX + name,
        description="Sends notifications of Holdfast. Made by `holdfast admin notify`.",
        tags=[ADDRESS_TAG, *([after_tag(lost_after)] if lost_after else [])],
        trigger=EventTrigger(
            match=cast("Any", {"prefect.resource.id": resources}),
            expect=set(ALL_EVENTS if everything else DEFAULT_EVENTS),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[action(block_id, is_webhook(block), SUBJECT, TEXT, WEBHOOK_BODY)],
    )


def is_webhook(block: Block) -> bool:
    """Return whether a block is a webhook, which gets JSON."""
    return block.get_block_type_slug() == "webhook"


def remove(name: str) -> dict[str, Any]:
    """Delete the address *name* with its blocks and automations."""
    with get_client(sync_client=True) as client:
        known = tuple(one["name"] for one in _known(client))
        if not _delete(client, name):
            raise NoSuchAddress(name, known)
    return {"name": name, "removed": _delete_blocks(name)}


def _delete_blocks(name: str, but: type[Block] | None = None) -> list[str]:
    """Delete the blocks that store the address *name*, except the one of type *but*; return them."""
    deleted = []
    for kind in KINDS:
        if kind is but:
            continue
        try:
            kind.delete(PREFIX + name)
        except ValueError:
            continue
        deleted.append(f"{kind.get_block_type_slug()}/{PREFIX}{name}")
    return deleted


def addresses() -> list[dict[str, Any]]:
    """Return all addresses, without their secrets."""
    with get_client(sync_client=True) as client:
        return _known(client)


def test(name: str) -> dict[str, Any]:
    """Have the server send a test notification to *name*, and to no other address."""
    with get_client(sync_client=True) as client:
        known = tuple(one["name"] for one in _known(client))
    if name not in known:
        raise NoSuchAddress(name, known)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    notification = Notification(
        id=f"test {at}",
        state="over",
        level=NotificationLevel.INFO,
        subject="[holdfast] test notification",
        text=f"Requested with `holdfast admin notify test {name}` at {at}. Nothing is wrong.",
        host=events.host(),
    )
    if events.emit(TEST, events.Resource(role=ADDRESS, names=(name,)), **asdict(notification)) is None:
        raise NotSent("it accepts no events")
    return {"name": name}


def _known(client: SyncPrefectClient) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name.removeprefix(PREFIX),
            "block": _block_of(client, one),
            "all": isinstance(one.trigger, EventTrigger) and INFO in one.trigger.expect,
            "lost_after": seconds_of(one),
            "enabled": one.enabled,
        }
        for one in tagged(client, ADDRESS_TAG)
    ]


def _block_of(client: SyncPrefectClient, one: Automation) -> str:
    """Return the block type of an address."""
    idents = [action.block_document_id for action in one.actions if isinstance(action, CallWebhook | SendNotification)]
    try:
        block_type = client.read_block_document(idents[0], include_secrets=False).block_type
    except (ObjectNotFound, IndexError):
        return "lost"
    return block_type.name if block_type is not None else ""


def _delete(client: SyncPrefectClient, name: str) -> bool:
    """Delete the automation of an address, and those that send alerts to it; return whether there was one."""
    found = [one for one in tagged(client, ADDRESS_TAG) if one.name == PREFIX + name]
    for one in found:
        client.delete_automation(one.id)
    for one in tagged(client, ALERT):
        if one.name.startswith(f"{PREFIX}{name}-alert-"):
            client.delete_automation(one.id)
    return bool(found)


COMMANDS: Final[dict[str, Callable[..., Any]]] = {"add": add, "remove": remove, "list": addresses, "test": test}


def main() -> int:
    """Carry out the command on standard input; print its result as JSON."""
    command = json.load(sys.stdin)
    try:
        result = COMMANDS[command.pop("do")](**command)
    except OperatorError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except Exception as error:  # noqa: BLE001 (an unreachable server, or one that refuses: the client raises errors of several libraries)
        print(f"holdfast: {NotSent((str(error) or type(error).__name__).splitlines()[0])}", file=sys.stderr)  # noqa: T201
        return 2
    json.dump(result, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
