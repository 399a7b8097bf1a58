"""`holdfast notify`: where notifications go. Prefect's server sends them; what talks to it is its own process, as Prefect takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, Final

import click

from holdfast.cli.output import hint, say, say_json, say_rows
from holdfast.errors import OperatorError
from holdfast.prefect.event_kinds import LOST_SECONDS
from holdfast.prefect.server import is_configured
from holdfast.report.wording import duration
from holdfast.source_tree import source_tree_env

SHORTEST: Final = 10.0
"""Seconds without a heartbeat after which Prefect can alert at the earliest."""
NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class NoServer(OperatorError):
    """No Prefect server is configured."""

    def __str__(self) -> str:
        return (
            "notifications are sent by a Prefect server that stays, and none is configured. "
            "Start one (`prefect server start`) and set PREFECT_API_URL to its API."
        )


class NotDone(OperatorError):
    """The server, or what talks to it, refused."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


def add(name: str, address: str, *, everything: bool, lost_after: float | None, as_json: bool) -> int:
    """Send notifications to an address; `-`: it is read from standard input, as it may be a secret."""
    if NAME.fullmatch(name) is None or "-alert-" in f"{name}-":
        raise click.BadParameter("use small letters, digits and dashes, and not the word `alert`.", param_hint="'NAME'")
    seconds = LOST_SECONDS if lost_after is None else lost_after
    if 0 < seconds < SHORTEST:
        raise click.BadParameter(f"0, or {SHORTEST:.0f} at least: Prefect watches no faster.", param_hint="'--no-controller-after'")
    url = sys.stdin.readline().strip() if address == "-" else address.strip()
    done = _order(do="add", name=name, url=url, everything=everything, lost_after=seconds)
    if as_json:
        say_json(done)
        return 0
    say(f"{name}: {'all notifications go' if everything else 'what needs a person goes'} there from now on.")
    if done["generic"]:
        scheme = url.partition("://")[0]
        hint(f"Prefect has no block type for {scheme}://, so a Slack Webhook block keeps the address: it passes any on to Apprise.")
    if seconds:
        hint(f"An alert is sent when a job has had no controller for {duration(seconds)}.")
    hint(f"`holdfast notify test {name}` sends a test notification.")
    return 0


def remove(name: str, *, as_json: bool) -> int:
    """Send nothing there any more."""
    done = _order(do="remove", name=name)
    if as_json:
        say_json(done)
    else:
        say(f"{name}: nothing goes there any more.")
    return 0


def test(name: str, *, as_json: bool) -> int:
    """Send one notification."""
    done = _order(do="test", name=name)
    if as_json:
        say_json(done)
    else:
        say(f"A test notification is on its way to {name}.")
    return 0


def addresses(*, as_json: bool) -> int:
    """List where notifications go."""
    found = _order(do="list")
    if as_json:
        say_json(found)
    elif not found:
        say("No notifications go anywhere.")
        hint("`holdfast notify add ops https://ops.example.com/hook` changes that.")
    else:
        rows = [
            (
                one["name"],
                one["block"],
                "all" if one["all"] else "attention",
                duration(one["lost_after"]) if one["lost_after"] else "never",
                "yes" if one["enabled"] else "paused",
            )
            for one in found
        ]
        say_rows(("NAME", "BLOCK", "NOTIFICATIONS", "NO CONTROLLER", "SENT"), rows)
    return 0


def _order(**order: Any) -> Any:  # noqa: ANN401 (whatever JSON the order answers)
    if not is_configured():
        raise NoServer
    environment = {**os.environ, **source_tree_env(os.environ), "PREFECT_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "holdfast.prefect_client.notifications"]
    ran = subprocess.run(command, input=json.dumps(order), env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise NotDone(last.removeprefix("holdfast: "))
    return json.loads(ran.stdout)
