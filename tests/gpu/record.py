"""What becomes of each test on a card, written as soon as it is known: a test may hang, or take its process down.

`conftest.py` has these hooks for pytest; `python -m tests.gpu` names the file, and reads it with `outcomes`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

import pytest

RECORD: Final = "HOLDFAST_GPU_RECORD"
"""Names the file in the environment."""
NOT_RUN: Final = "not run"
UNFINISHED: Final = "unfinished"


class Outcome(NamedTuple):
    """What became of one test, and why where it did not pass."""

    name: str
    outcome: str
    """``passed``, ``failed``, ``skipped``; `NOT_RUN` and `UNFINISHED` while the tests run, or where they were ended."""
    seconds: float
    why: str


def _write(**facts: object) -> None:
    path = os.environ.get(RECORD)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(facts) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down what is to be run."""
    for item in session.items:
        _write(test=item.nodeid, when="collected")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down which test runs."""
    _write(test=nodeid, when="begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a phase of a test has ended."""
    shown = report.longrepr
    why = str(shown[2]) if isinstance(shown, tuple) else report.longreprtext.partition("\nE  ")[2].partition("\n")[0]
    _write(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, why=why.strip()[:200])


def outcomes(record: Path) -> dict[str, Outcome]:
    """Return what became of each test in *record*, by its id."""
    found: dict[str, Outcome] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        facts = json.loads(line)
        test, when = facts["test"], facts["when"]
        before = found.setdefault(test, Outcome(test.removeprefix("tests/gpu/").replace(".py::", ": "), NOT_RUN, 0.0, ""))
        if when == "begun":
            found[test] = before._replace(outcome=UNFINISHED)
        elif when != "collected":
            found[test] = _after_phase(before, when, facts)
    return found


def _after_phase(before: Outcome, when: str, facts: dict[str, object]) -> Outcome:
    outcome, seconds = str(facts["outcome"]), before.seconds + float(str(facts["seconds"]))
    if outcome == "failed" or (outcome == "skipped" and before.outcome == UNFINISHED):
        return Outcome(before.name, outcome, seconds, str(facts["why"]))
    ended = when == "teardown" and before.outcome == UNFINISHED
    return before._replace(outcome="passed" if ended else before.outcome, seconds=seconds)
