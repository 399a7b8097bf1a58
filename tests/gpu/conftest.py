"""Real ranks of managed groups, as the tests of the runtime have them, and a record of each outcome as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.runtime.conftest import _no_agent_around, agent, job, workers  # noqa: F401 (fixtures)

RECORD = "HOLDFAST_GPU_RECORD"
"""Names the file that gets a line for each test that begins, and for each phase of it that ends: `python -m tests.gpu` reads it."""


def _write(**facts: object) -> None:
    path = os.environ.get(RECORD)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(facts) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs: its process may not live to see the end."""
    _write(test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a phase of a test has ended."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext.rpartition("\nE  ")[2].partition("\n")[0]
    _write(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, why=why.strip()[:200])
