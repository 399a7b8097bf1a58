"""Where messages go: a Prefect block and an automation for each address, so that the server sends them whatever becomes of a flow.

``python -m tasks.notify`` takes one order as JSON on its standard input, as addresses hold secrets: `holdfast notify` runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from prefect.blocks.notifications import SlackWebhook
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import Event, emit_event
from prefect.events.actions import ActionTypes, CallWebhook, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from pydantic import SecretStr

from holdfast.errors import OperatorError
from holdfast.report.messages import Message

PREFIX: Final = "holdfast-"
"""What our blocks and automations are called begins with it."""
ATTENTION: Final = ("holdfast.message.attention", "holdfast.node.sick", "holdfast.node.unreachable")
ALL: Final = (*ATTENTION, "holdfast.message.info", "holdfast.node.ok", "holdfast.node.degraded")
SUBJECT: Final = (
    "{% if event.payload.subject %}{{ event.payload.subject }}{% else %}{{ event.resource.name }}: {{ event.event }}{% endif %}"
)
TEXT: Final = "{% if event.payload.text %}{{ event.payload.text }}{% else %}{{ event.payload.because }}{% endif %}"
WHOLE: Final = (
    '{"event": {{ event.event | tojson }}, "at": {{ event.occurred.isoformat() | tojson }}, "resource": {{ event.resource.id | tojson }}, '
    '"payload": {{ event.payload | tojson }}}'
)
"""What a webhook is sent: `payload.id` tells which earlier message a new one takes the place of."""


class Unheard(OperatorError):
    """The Prefect server did not do what was asked."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the Prefect server did not do it: {self.why}. Look at PREFECT_API_URL, and whether the server is up."


class NoSuchAddress(OperatorError):
    """No messages go there."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def __str__(self) -> str:
        return f"no address is called '{self.name}'. " + (f"There are: {', '.join(self.known)}." if self.known else "There is none.")


def add(name: str, *, kind: str, url: str, everything: bool) -> dict[str, Any]:
    """Send messages to *url* from now on: to a webhook as JSON, or to whatever apprise makes of it. Takes the place of one of that name."""
    address = SecretStr(url)
    action: ActionTypes
    if kind == "webhook":
        headers = cast("Any", {"Content-Type": "application/json"})
        ident = cast("UUID", Webhook(url=address, headers=headers).save(PREFIX + name, overwrite=True))
        action = CallWebhook(block_document_id=ident, payload=WHOLE)
    else:  # this block hands any address on to apprise as it is
        ident = cast("UUID", SlackWebhook(url=address).save(PREFIX + name, overwrite=True))
        action = SendNotification(block_document_id=ident, subject=SUBJECT, body=TEXT)
    automation = AutomationCore(
        name=PREFIX + name,
        description="Messages of Holdfast, made by `holdfast notify`.",
        trigger=EventTrigger(
            expect=set(ALL if everything else ATTENTION),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[action],
    )
    with get_client(sync_client=True) as client:
        _delete(client, name)
        client.create_automation(automation)
    return {"name": name, "kind": kind, "all": everything}


def remove(name: str) -> dict[str, Any]:
    """Send nothing there any more, and forget the address."""
    with get_client(sync_client=True) as client:
        known = tuple(one["name"] for one in _known(client))
        if not _delete(client, name):
            raise NoSuchAddress(name, known)
        for kind in (Webhook, SlackWebhook):
            document = f"{kind.get_block_type_slug()}/{PREFIX}{name}"
            try:
                kind.delete(PREFIX + name)
            except ValueError:
                continue
            return {"name": name, "removed": document}
    return {"name": name, "removed": ""}


def addresses() -> list[dict[str, Any]]:
    """Return where messages go; what is secret of an address stays with the server."""
    with get_client(sync_client=True) as client:
        return _known(client)


def test(name: str) -> dict[str, Any]:
    """Have the server send one message on its whole way."""
    with get_client(sync_client=True) as client:
        known = tuple(one["name"] for one in _known(client))
    if name not in known:
        raise NoSuchAddress(name, known)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    message = Message(
        id=f"test {at}", state="over", attention=True, subject="[holdfast] a test", text=f"Asked for at {at}. Nothing is wrong."
    )
    facts = {slot: getattr(message, slot) for slot in Message.__slots__}
    sent: Event | None = emit_event(event=ATTENTION[0], resource={"prefect.resource.id": "holdfast.test"}, payload=facts)
    if sent is None:
        raise Unheard("it takes no events")
    return {"name": name, "sent_to": list(known)}


def _known(client: SyncPrefectClient) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name.removeprefix(PREFIX),
            "kind": "webhook" if any(isinstance(action, CallWebhook) for action in one.actions) else "apprise",
            "all": isinstance(one.trigger, EventTrigger) and ALL[-1] in one.trigger.expect,
            "enabled": one.enabled,
        }
        for one in _ours(client)
    ]


def _ours(client: SyncPrefectClient) -> list[Automation]:
    return sorted((one for one in client.read_automations() if one.name.startswith(PREFIX)), key=lambda one: one.name)


def _delete(client: SyncPrefectClient, name: str) -> bool:
    found = [one for one in _ours(client) if one.name == PREFIX + name]
    for one in found:
        client.delete_automation(one.id)
    return bool(found)


ORDERS: Final[dict[str, Callable[..., Any]]] = {"add": add, "remove": remove, "list": addresses, "test": test}


def main() -> int:
    """Carry out the order on standard input; print what came of it as JSON."""
    order = json.load(sys.stdin)
    try:
        done = ORDERS[order.pop("do")](**order)
    except OperatorError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except Exception as error:  # noqa: BLE001 (a server that is away or refuses: the client raises errors of several libraries)
        print(f"holdfast: {Unheard((str(error) or type(error).__name__).splitlines()[0])}", file=sys.stderr)  # noqa: T201
        return 2
    json.dump(done, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
