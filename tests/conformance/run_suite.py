"""Run one suite over one backend: a program that `python -m tests.conformance` starts, with the environment that PyTorch's tests need.

It reads an order as JSON, and writes a line for each test as it ends.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unittest
from typing import Any, Final

from holdfast.host.process import die_with_parent
from tests.conformance import suites

ATTEMPTS: Final = 3
"""How often a test may fail before it counts: some of PyTorch's race with the exit of another rank, over stock gloo as well."""
MAX_REASON: Final = 160
"""Characters of a reason."""


def main() -> None:
    """Run the ordered tests of a suite, one after the other."""
    die_with_parent(os.getppid())  # and its ranks die with it
    order = json.loads(sys.stdin.readline())
    suites.ForkedRanks.managed = order["managed"]
    out = sys.stdout
    sys.stdout = sys.stderr  # tests print
    for test in suites.tests_of(order["suite"], order["skipped"]):
        if not any(text in test for text in order["only"]):
            continue
        begin = time.monotonic()
        attempt, outcome = 1, run(order["suite"], test)
        while outcome.startswith("failed") and attempt < ATTEMPTS:
            attempt, outcome = attempt + 1, run(order["suite"], test)
        result = {"test": test, "outcome": outcome, "seconds": round(time.monotonic() - begin, 2), "attempts": attempt}
        out.write(json.dumps(result) + "\n")
        out.flush()


def run(suite: str, test: str) -> str:
    """Run one test; return how it ended."""
    print(f"=== {suite} {test}", file=sys.stderr, flush=True)
    found = unittest.TestResult()
    suites.suite(suite)(test).run(found)
    if found.errors or found.failures:
        return f"failed: {reason([*found.errors, *found.failures][0][1])}"
    return f"skipped: {reason(found.skipped[0][1])}" if found.skipped else "passed"


def reason(text: str) -> str:
    """Return what a traceback or a message says, in one line and without what differs from run to run."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    one: Any = (errors or lines or [""])[-1]
    one = re.sub(r"^(\w+\.)+(?=\w+(Error|Exception))", "", one)
    one = re.sub(r"\[[^\]]*\.(cc|cpp):\d+\] ", "", one)
    one = re.sub(r"\[?\b\d+\.\d+\.\d+\.\d+\]?(:\d+)?", "(address)", one)
    one = re.sub(r"after \d+\.\d+ seconds", "after a timeout", one)
    return str(one)[:MAX_REASON]


if __name__ == "__main__":
    main()
