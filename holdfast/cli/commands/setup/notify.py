"""`holdfast admin notify`: where notifications go. Prefect's server sends them; another process talks to it, as imports take seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, Final

import click

from holdfast.cli.output import echo, echo_json, echo_table, hint
from holdfast.errors import OperatorError
from holdfast.prefect.event_kinds import LOST_SECONDS
from holdfast.prefect.server import is_configured
from holdfast.report.text.wording import duration
from holdfast.source_tree import source_tree_env

MIN_SECONDS: Final = 10.0
"""Seconds without a heartbeat after which Prefect can alert at the earliest."""
NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
HEAD: Final = ("NAME", "BLOCK", "NOTIFICATIONS", "NO CONTROLLER", "SENT")


class NoServer(OperatorError):
    """No Prefect server is configured."""

    def __str__(self) -> str:
        return (
            "notifications are sent by a permanent Prefect server, and none is configured. "
            "Start one (`prefect server start`) and set PREFECT_API_URL to its API."
        )


class NotifyFailed(OperatorError):
    """The server, or the process that talks to it, refused."""

    why: str

    def __str__(self) -> str:
        return self.why


def add(name: str, address: str, *, everything: bool, lost_after: float | None, as_json: bool) -> int:
    """Send notifications to an address; `-`: it is read from standard input, as it may be a secret."""
    if NAME.fullmatch(name) is None or "-alert-" in f"{name}-":
        raise click.BadParameter("use lowercase letters, digits and dashes, and not the word `alert`.", param_hint="'NAME'")
    seconds = LOST_SECONDS if lost_after is None else lost_after
    if 0 < seconds < MIN_SECONDS:
        raise click.BadParameter(f"0, or at least {MIN_SECONDS:.0f}: Prefect checks no faster.", param_hint="'--no-controller-after'")
    url = sys.stdin.readline().strip() if address == "-" else address.strip()
    done = _request(do="add", name=name, url=url, everything=everything, lost_after=seconds)
    if as_json:
        echo_json(done)
        return 0
    echo(f"{name}: receives {'all notifications' if everything else 'what needs a person'} from now on.")
    if done["generic"]:
        scheme = url.partition("://")[0]
        hint(f"Prefect has no block type for {scheme}://, so a Slack Webhook block keeps the address: it passes any on to Apprise.")
    if seconds:
        hint(f"An alert is sent when a job has had no controller for {duration(seconds)}.")
    hint(f"`holdfast admin notify test {name}` sends a test notification.")
    return 0


def remove(name: str, *, as_json: bool) -> int:
    """Send nothing there any more."""
    return _simple("remove", name, f"{name}: receives nothing any more.", as_json=as_json)


def test(name: str, *, as_json: bool) -> int:
    """Send one notification."""
    return _simple("test", name, f"A test notification was sent to {name}.", as_json=as_json)


def _simple(do: str, name: str, text: str, *, as_json: bool) -> int:
    done = _request(do=do, name=name)
    if as_json:
        echo_json(done)
    else:
        echo(text)
    return 0


def addresses(*, as_json: bool) -> int:
    """List where notifications go."""
    found = _request(do="list")
    if as_json:
        echo_json(found)
    elif not found:
        echo("No address receives notifications.")
        hint("`holdfast admin notify add ops https://ops.example.com/hook` adds one.")
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
        echo_table(HEAD, rows)
    return 0


def _request(**request: Any) -> Any:  # noqa: ANN401 (any JSON)
    if not is_configured():
        raise NoServer
    environment = {**os.environ, **source_tree_env(os.environ), "PREFECT_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "holdfast.prefect_client.notifications"]
    ran = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it exited without an error message"])[-1]
        raise NotifyFailed(last.removeprefix("holdfast: "))
    return json.loads(ran.stdout)
