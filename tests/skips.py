"""Skips that a machine without a person must not pass over: where `CI` is set, only absent hardware is a reason to skip a test.

Another is a library or a server for which a make target of its own has an environment.

Whatever else a skip says there (a server that is not installed, an import of our own that fails) would hide what nobody has looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Final

import pytest

ACCEPTED: Final = re.compile(r"\bGPUs?\b|\bNVIDIA device\b|`make (?:frameworks|kubernetes)` runs these tests")
"""What nobody can install, or another target has installed: reasons that name it are accepted everywhere."""


def refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip that is for no hardware, where `CI` is set."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
    if not ACCEPTED.search(reason):
        report.outcome = "failed"
        report.longrepr = f"Skipped, and CI is set: {reason}. Install what is missing (scripts/system_packages.sh), or mend what is ours."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at each test's report."""
    report = yield
    refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Look at the report of each module's collection: a whole one may be skipped."""
    report = yield
    refuse(report)
    return report
