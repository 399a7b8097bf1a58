"""Convert a notification address into the Prefect block that stores it; the block type follows from the address."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

from apprise import Apprise
from prefect.blocks.core import Block
from prefect.blocks.notifications import (
    DiscordWebhook,
    MattermostWebhook,
    MicrosoftTeamsWebhook,
    OpsgenieWebhook,
    PagerDutyWebHook,
    SendgridEmail,
    SlackWebhook,
    TwilioSMS,
)
from prefect.blocks.webhook import Webhook
from pydantic import SecretStr

from holdfast.errors import OperatorError

HTTP: Final = frozenset({"http", "https"})
EXAMPLES: Final = "https://ops.example.com/hook, https://hooks.slack.com/services/..., https://discord.com/api/webhooks/..., mailto://user:password@example.com"


class BadAddress(OperatorError):
    """An address that notifications cannot be sent to."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"this is not a notification address: {self.why}. Examples: {EXAMPLES}"


def block_of(address: str) -> Block:
    """Return the unsaved block for *address*; raise `BadAddress` if notifications cannot be sent to it.

    A web address that Apprise recognizes belongs to that service; any other one is a webhook that gets JSON.
    """
    scheme, host = _parse(address)
    service: Any = Apprise.instantiate(address, suppress_exceptions=True)
    if service is None and scheme in HTTP:
        if not host:
            raise BadAddress("it has no host")
        return Webhook(url=SecretStr(address), headers=cast("Any", {"Content-Type": "application/json"}))
    if service is None:
        raise BadAddress(f"its parts are not those of {scheme}://" if scheme in _schemes() else f"{scheme}:// is unknown")
    make = BLOCKS.get(type(service).__name__)
    try:
        return make(service, address) if make is not None else _generic(service, address)
    except (ValueError, TypeError) as error:
        raise BadAddress(str(error).splitlines()[0].replace(address, "the address")) from error


def is_generic(block: Block, address: str) -> bool:
    """Return whether Prefect has no block type for *address*, so that *block* forwards it to Apprise."""
    return isinstance(block, SlackWebhook) and "slack" not in address.partition("?")[0].lower()


def _parse(address: str) -> tuple[str, str]:
    """Return scheme and host of *address*; the address itself is a secret and appears in no error."""
    scheme, separator, rest = address.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        raise BadAddress("it does not start with a scheme such as https://")
    if not rest or any(char.isspace() or not char.isprintable() for char in address):
        raise BadAddress("nothing follows the scheme" if not rest else "it contains spaces or unprintable characters")
    try:
        parts = urlsplit(address)
        _ = parts.port if scheme.lower() in HTTP else None
    except ValueError as error:
        raise BadAddress(str(error).replace(address, "the address")) from error
    return scheme.lower(), parts.hostname or ""


def _schemes() -> set[str]:
    """Return the schemes that Apprise supports."""
    services = cast("list[dict[str, list[str] | None]]", Apprise().details()["schemas"])
    return {name for one in services for names in ("protocols", "secure_protocols") for name in one[names] or ()}


def _generic(_service: Any, address: str) -> Block:  # noqa: ANN401 (a plugin of Apprise, which has no types)
    """Return the one block type of Prefect that accepts any Apprise address: it is named Slack, and forwards the address unchanged."""
    return SlackWebhook(url=SecretStr(address))


def _teams(_service: Any, address: str) -> Block:  # noqa: ANN401 (as above)
    if not address.startswith("https://"):
        raise BadAddress("Teams needs the https:// address that its workflow shows")
    return MicrosoftTeamsWebhook(url=SecretStr(address))


def _mattermost(service: Any, _address: str) -> Block:  # noqa: ANN401
    return MattermostWebhook(
        hostname=service.host,
        token=SecretStr(service.token),
        secure=service.secure,
        port=service.port or (443 if service.secure else 80),
        path=service.fullpath or None,
        botname=service.user,
        channels=[name if mark == "#" else f"{mark}{name}" for mark, name in service.targets] or None,
    )


def _opsgenie(service: Any, _address: str) -> Block:  # noqa: ANN401
    named = [(one["type"], str(one.get("name") or one.get("username") or one.get("id"))) for one in service.targets]

    def of(kind: str) -> list[str] | None:
        return [name for type_, name in named if type_ == kind] or None

    return OpsgenieWebhook(
        apikey=SecretStr(service.apikey),
        region_name=service.region_name,
        target_user=of("user"),
        target_team=of("team"),
        target_schedule=of("schedule"),
        target_escalation=of("escalation"),
    )


BLOCKS: Final[Mapping[str, Callable[[Any, str], Block]]] = {
    "NotifySlack": _generic,
    "NotifyWorkflows": _teams,
    "NotifyDiscord": lambda service, _: DiscordWebhook(
        webhook_id=SecretStr(service.webhook_id), webhook_token=SecretStr(service.webhook_token), botname=service.user
    ),
    "NotifyPagerDuty": lambda service, _: PagerDutyWebHook(
        integration_key=SecretStr(service.integration_key),
        api_key=SecretStr(service.apikey),
        region_name=service.region_name,
        source="Holdfast",
        notify_type="warning",
    ),
    "NotifyOpsgenie": _opsgenie,
    "NotifyMattermost": _mattermost,
    "NotifyTwilio": lambda service, _: TwilioSMS(
        account_sid=service.account_sid,
        auth_token=SecretStr(service.auth_token),
        from_phone_number=service.source,
        to_phone_numbers=[name for _, name in service.targets],
    ),
    "NotifySendGrid": lambda service, _: SendgridEmail(
        api_key=SecretStr(service.apikey), sender_email=service.from_email, to_emails=list(service.targets)
    ),
}
"""Apprise plugin to the function that creates Prefect's block for it."""
KINDS: Final[tuple[type[Block], ...]] = (
    Webhook,
    SlackWebhook,
    MicrosoftTeamsWebhook,
    DiscordWebhook,
    PagerDutyWebHook,
    OpsgenieWebhook,
    MattermostWebhook,
    TwilioSMS,
    SendgridEmail,
)
"""Every block type that may store an address."""
