"""The stored results: which tests pass over stock gloo and over managed groups, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

FILE: Final = Path(__file__).with_name("results.json")
PASSED: Final = "passed"
Backend: TypeAlias = Literal["gloo", "holdfast"]
Outcomes: TypeAlias = dict[str, dict[str, str]]
"""By backend, how a test ended: ``passed``, or ``skipped: ...`` or ``failed: ...`` with the reason. By the name of the test."""


@dataclass(slots=True)
class Results:
    """The outcome of every test of every suite."""

    torch: str
    """Version of PyTorch."""
    python: str
    ranks: int
    suites: dict[str, Outcomes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = FILE) -> Results:
        """Return the stored results. Raise ``OSError`` or ``ValueError`` when there are none."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path = FILE) -> None:
        """Store them, a line for each test."""
        head = {"torch": self.torch, "python": self.python, "ranks": self.ranks}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        suites = []
        for suite, outcomes in self.suites.items():
            tests = ",\n".join(f"   {json.dumps(test)}: {json.dumps(outcome)}" for test, outcome in sorted(outcomes.items()))
            suites.append(f"  {json.dumps(suite)}: {{\n{tests}\n  }}")
        path.write_text("\n".join(["{", *lines, ' "suites": {', ",\n".join(suites), " }", "}", ""]))

    def skipped(self) -> dict[str, str]:
        """Return why tests of PyTorch's suite are skipped as it is: other suites consist of them."""
        return {test: one["gloo"] for test, one in self.suites.get("distributed", {}).items() if not one["gloo"].startswith(PASSED)}


@dataclass(slots=True)
class Comparison:
    """How a run differs from what is stored."""

    failures: list[str] = field(default_factory=list)
    """Tests that passed or were skipped, and now fail; tests that passed, and are now skipped."""
    missing: list[str] = field(default_factory=list)
    """Listed tests that do not exist any more."""
    news: list[str] = field(default_factory=list)
    """Tests that are not listed, or pass and are listed otherwise: no regression, but the list is out of date."""

    @property
    def regressed(self) -> bool:
        """Whether anything became worse."""
        return bool(self.failures or self.missing)


def compare(stored: Mapping[str, Mapping[str, str]], found: Mapping[str, str], *, partly: bool) -> Comparison:
    """Compare the outcomes of a run over managed groups with those *stored* for the suite; *partly*: only some tests were to run."""
    made = Comparison()
    for test, outcome in found.items():
        before = stored.get(test, {}).get("holdfast")
        if before is None:
            made.news.append(f"{test}: {outcome} (not listed)")
        elif outcome == PASSED and before != PASSED:
            made.news.append(f"{test}: passes (listed as {before})")
        elif outcome != PASSED and _kind(outcome) != _kind(before) and not (_kind(outcome) == "skipped" and _kind(before) == "failed"):
            made.failures.append(f"{test}: {outcome} (listed as {before})")
    if not partly:
        made.missing = sorted(test for test in stored if test not in found)
    return made


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def counts(outcomes: Outcomes, backend: Backend) -> dict[str, int]:
    """Return how many tests passed, were skipped, and failed over *backend*."""
    kinds: dict[str, Any] = {PASSED: 0, "skipped": 0, "failed": 0}
    for one in outcomes.values():
        kinds[_kind(one[backend])] += 1
    return kinds
