"""Logs as machines read them: one object a line, whoever logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Node

ROOT = Path(__file__).parent.parent
LOGGING = """
import logging
from holdfast.log import convert, note, set_up
{before}
{set_up}()
log = logging.getLogger("holdfast.test")
note(log, "node.isolated", node="w1", reason="a reason\\nof two lines", seconds=0.5)
logging.getLogger("other").warning("words %d", 3)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("went wrong")
"""
PREFECTS = """
from prefect.logging.configuration import setup_logging
setup_logging()
logging.getLogger("prefect.flow_runs").info("a flow's word")
"""


PREPARED = "from holdfast.prefect.output import prepare_output; prepare_output()"


def said(code: str, form: str) -> list[str]:
    """Return the lines that a program writes to stderr."""
    environment = {**os.environ, "HOLDFAST_LOG": form, "PYTHONPATH": str(ROOT), "PREFECT_LOGGING_TO_API_ENABLED": "false"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=100)
    return done.stderr.splitlines()


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """Return what each line holds; each has when, how grave, who."""
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "pid"} <= one.keys() for one in found)
    return found


@pytest.mark.parametrize(
    ("before", "set_up"), [("", "set_up"), (PREPARED, "prepare_output"), (PREFECTS.partition("logging.get")[0], "convert")]
)
def test_every_line_is_an_object_with_its_facts(before: str, set_up: str) -> None:
    """Ours with event and facts, others with their message, exceptions whole; also where Prefect has set logging up."""
    first, *more = objects(said(LOGGING.format(before=before, set_up=set_up), "json"))
    assert (first["event"], first["level"], first["logger"]) == ("node.isolated", "info", "holdfast.test")
    assert first["facts"] == {"node": "w1", "reason": "a reason\nof two lines", "seconds": 0.5}
    assert "ZeroDivisionError" in more[-1]["exception"]
    assert more[0]["message"] == "words 3"


def test_by_default_logs_are_for_people() -> None:
    """A time, the event and its facts."""
    first = said(LOGGING.format(before="", set_up="set_up"), "")[0]
    assert first.endswith("node.isolated node=w1 reason=a reason")


def test_an_agent_logs_json_when_configured(tmp_path: Path) -> None:
    """All lines, from its first to its last."""
    node = Node(tmp_path).begin(HOLDFAST_LOG="json")
    with node.flow() as flow:
        flow.raw(b"nonsense\n")
        flow.until(lambda: flow.gone, "the agent to hang up")
    node.end()
    assert {"agent.ready", "client.bad-line"} <= {one.get("event") for one in objects(node.log.read_text().splitlines())}


def test_the_command_line_prints_refusals_as_json() -> None:
    """By the option or the variable; another word is refused."""
    command = [sys.executable, "-m", "holdfast", "--log-format", "json", "validate", "no-such-file.yaml"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=100)
    (record,) = objects(done.stderr.splitlines())
    assert (done.returncode, record["event"], record["level"]) == (2, "refused", "error")
    assert "no-such-file.yaml" in record["message"]
