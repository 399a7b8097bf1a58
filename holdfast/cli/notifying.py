"""`holdfast notify`: where messages go. Prefect's server sends them; what talks to it is a process of its own, as Prefect takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli.output import hint, say, say_json, say_rows
from holdfast.errors import OperatorError
from holdfast.prefect_server import is_configured

ROOT: Final = Path(__file__).resolve().parents[2]


class NoServer(OperatorError):
    """No Prefect server is configured."""

    def __str__(self) -> str:
        return (
            "messages are sent by a Prefect server that stays, and none is configured. "
            "Start one (`prefect server start`) and set PREFECT_API_URL to its API."
        )


class NotDone(OperatorError):
    """The server, or what talks to it, refused."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


def add(name: str, address: str, *, kind: str, everything: bool, as_json: bool) -> int:
    """Send messages to an address; `-`: it is read from standard input, as it may be a secret."""
    url = sys.stdin.readline().strip() if address == "-" else address
    if not url.partition("://")[0].isascii() or "://" not in url:
        raise click.BadParameter("this is no address: it has no `://`.", param_hint=f"'--{kind}'")
    if kind == "webhook" and url.partition("://")[0] not in {"http", "https"}:
        raise click.BadParameter("a webhook begins with http:// or https://; `--apprise` takes others.", param_hint="'--webhook'")
    done = _order(do="add", name=name, kind=kind, url=url, everything=everything)
    if as_json:
        say_json(done)
    else:
        say(f"{name}: {'all messages go' if everything else 'what needs a person goes'} there from now on.")
        hint(f"`holdfast notify test {name}` sends one.")
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
    """Send one message."""
    done = _order(do="test", name=name)
    if as_json:
        say_json(done)
    else:
        say(f"A message is on its way to {', '.join(done['sent_to'])}.")
    return 0


def addresses(*, as_json: bool) -> int:
    """List where messages go."""
    found = _order(do="list")
    if as_json:
        say_json(found)
    elif not found:
        say("No messages go anywhere.")
        hint("`holdfast notify add ops --webhook URL` changes that.")
    else:
        rows = [(one["name"], one["kind"], "all" if one["all"] else "attention", "yes" if one["enabled"] else "paused") for one in found]
        say_rows(("NAME", "KIND", "MESSAGES", "SENT"), rows)
    return 0


def _order(**order: Any) -> Any:  # noqa: ANN401 (whatever JSON the order answers)
    if not is_configured():
        raise NoServer
    environment = {**os.environ, "PREFECT_LOGGING_LEVEL": "ERROR"}
    if (ROOT / "pyproject.toml").exists():  # a source tree need not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "tasks.notify"]
    ran = subprocess.run(command, input=json.dumps(order), env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise NotDone(last.removeprefix("holdfast: "))
    return json.loads(ran.stdout)
