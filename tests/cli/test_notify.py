"""`holdfast admin notify`: what cannot be done is refused with the cure. That messages arrive is shown in tests/integration."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.prefect_client.notification_addresses import BadAddress, block_of, is_generic
from tests.cli.conftest import Command

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Apprise imports the libraries of all services that are there
TEAMS = f"https://prod-1.westus.logic.azure.com:443/workflows/{'6' * 32}/triggers/manual/paths/invoke?sig={'K' * 43}"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add", "ops"), "Missing argument 'ADDRESS'"),
        (("add", "Ops Team", "http://a"), "lowercase letters"),
        (("add", "ops", "http://a", "--no-controller-after", "5s"), "0, or at least 10"),
        (("add", "ops", "http://a"), "set PREFECT_API_URL"),
        (("ls",), "set PREFECT_API_URL"),
        (("test", "ops"), "set PREFECT_API_URL"),
    ],
)
def test_an_impossible_notification_is_refused_with_the_cure(
    here: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    """Before any request to a server."""
    monkeypatch.setenv("PREFECT_HOME", "/nowhere")
    refused = here("admin", "notify", *words)
    assert refused.returncode == 2
    assert why in refused.stderr


def test_a_server_that_is_away_is_named(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to check."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refused = here("admin", "notify", "ls")
    assert refused.returncode == 2
    assert "Check PREFECT_API_URL" in refused.stderr


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ops.example.com", "start with a scheme"),
        ("https://", "nothing follows"),
        ("https://ops.example.com:99999/", "Port out of range"),
        ("https:///hook", "it has no host"),
        ("https://ops example.com/", "it contains spaces"),
        ("nonsense://x", "nonsense:// is unknown"),
        ("slack://bad", "parts are not those"),
        ("workflows://host/id/sig", "Teams needs the https:// address"),
    ],
)
def test_an_address_that_nothing_can_be_sent_to_is_refused_before_it_is_kept(address: str, why: str) -> None:
    """With the reason, and examples."""
    with pytest.raises(BadAddress, match=re.escape(why)):
        block_of(address)


@pytest.mark.parametrize(
    ("address", "block_type", "generic"),
    [
        ("https://ops.example.com/hook", "webhook", False),
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "slack-webhook", False),
        (f"https://discord.com/api/webhooks/123456789012345678/{'a' * 36}", "discord-webhook", False),
        (
            f"https://prod-1.westus.logic.azure.com:443/workflows/{'6' * 32}/triggers/manual/paths/invoke?sig={'K' * 43}",
            "ms-teams-webhook",
            False,
        ),
        (f"pagerduty://{'A' * 20}@{'B' * 20}", "pager-duty-webhook", False),
        ("opsgenie://aaaaaaaa-bbbb-cccc-dddd-ffffffffffff/@me/#ops", "opsgenie-webhook", False),
        ("mmosts://chat.example.com:8443/abcdefghijklmn?channels=ops", "mattermost-webhook", False),
        (f"twilio://AC{'a' * 32}:{'b' * 32}@+18005551234/+18005551235", "twilio-sms", False),
        ("sendgrid://SG.abcdef:me@example.com/you@example.com", "sendgrid-email", False),
        ("mailto://user:password@example.com?to=a@example.com", "slack-webhook", True),
    ],
)
def test_an_address_is_kept_in_the_block_type_that_matches(address: str, block_type: str, generic: bool) -> None:  # noqa: FBT001 (a table)
    """An address without a block type of its own is kept in the one that passes any on to Apprise, and that is shown."""
    block = block_of(address)
    assert block.get_block_type_slug() == block_type
    assert is_generic(block, address) is generic


def test_other_parts_of_an_address_with_a_secret_are_kept() -> None:
    """Channels, targets, port and so on."""
    mattermost: Any = block_of("mmosts://chat.example.com:8443/abcdefghijklmn?channels=ops")
    assert (mattermost.hostname, mattermost.port, mattermost.secure, mattermost.channels) == ("chat.example.com", 8443, True, ["ops"])
    opsgenie: Any = block_of("opsgenie://aaaaaaaa-bbbb-cccc-dddd-ffffffffffff/@me/#ops")
    assert (opsgenie.target_user, opsgenie.target_team) == (["me"], ["ops"])
