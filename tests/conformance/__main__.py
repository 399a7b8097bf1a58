"""Run PyTorch's own tests and ours over managed groups, and compare with the stored list: `make conformance`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests.conformance.results import FILE, PASSED, Backend, Comparison, Outcomes, Results, compare
from tests.runtime.agent_double import AgentDouble

ROOT: Final = Path(__file__).parent.parent.parent
LOGS: Final = ROOT / "build/conformance"
RANKS: Final = 4
STORED_SUITES: Final = ("distributed", "distributed-mpi", "public-api")
SUITES: Final = (*STORED_SUITES, "distributed-gpu")
"""What can be asked for; without a GPU much of the last one fails over gloo too, so it runs only where it is named."""
ENVIRONMENT: Final = {
    "BACKEND": "gloo",  # what a script asks for, whether or not a managed group takes its place
    "WORLD_SIZE": str(RANKS),
    "OMP_NUM_THREADS": "1",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "PYTHONWARNINGS": "ignore",
}
"""What PyTorch's tests read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        stored = Results.read()
    except FileNotFoundError:
        stored = Results(version("torch"), "", RANKS)
        if not options.update:
            sys.exit(
                f"{FILE.relative_to(ROOT)} is missing: `make conformance ARGS=--update` makes it, from runs over gloo and managed groups"
            )
    installed = version("torch").partition("+")[0]
    if installed != stored.torch and not options.update:
        print(f"PyTorch {installed} is installed, and the list is for {stored.torch}: tests may be new, or gone")
    return _update(stored, options) if options.update else _check(stored, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--update", action="store_true", help="run over stock gloo too, and write the list and its page anew")
    parser.add_argument("--suite", choices=SUITES, action="append", help="only this suite (may be repeated)")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only tests with TEXT in their names (may be repeated)")
    return parser


def _check(stored: Results, options: argparse.Namespace) -> int:
    """Run over managed groups and compare with the list."""
    regressed, passed, total, out_of_date = False, 0, 0, False
    for suite in options.suite or STORED_SUITES:
        found = run(suite, "holdfast", stored.skipped(), options.only)
        passed, total = passed + sum(one == PASSED for one in found.values()), total + len(found)
        comparison = compare(stored.suites.get(suite, {}), found, partly=bool(options.only))
        _report(suite, comparison)
        regressed, out_of_date = regressed or comparison.regressed, out_of_date or bool(comparison.news)
    if not total:
        sys.exit("no test has such a name")
    print(f"conformance: {passed} of {total} tests pass; logs in {LOGS.relative_to(ROOT)}/")
    if regressed:
        print("conformance: FAILED: the tests above are listed otherwise. If that is intended: `make conformance ARGS=--update`")
    elif out_of_date:
        print("conformance: fine, and the list can be brought up to date: `make conformance ARGS=--update`")
    else:
        print("conformance: as listed in docs/reference/conformance.md")
    return int(regressed)


def _report(suite: str, comparison: Comparison) -> None:
    for title, lines in (("regression", comparison.failures), ("missing", comparison.missing), ("new", comparison.news)):
        for line in lines:
            print(f"  {title}: {suite}: {line}")


def _update(stored: Results, options: argparse.Namespace) -> int:
    """Run over both backends, and write what was found; of tests that did not run the list keeps what it says."""
    stored.torch, stored.python, stored.ranks = version("torch").partition("+")[0], platform.python_version(), RANKS
    for suite in options.suite or STORED_SUITES:
        before = stored.suites.get(suite, {}) if options.only else {}
        outcomes: Outcomes = {test: dict(one) for test, one in before.items()}
        backends: tuple[Backend, Backend] = ("gloo", "holdfast")
        for backend in backends:
            for test, outcome in run(suite, backend, stored.skipped(), options.only).items():
                outcomes.setdefault(test, {})[backend] = outcome
        stored.suites[suite] = outcomes
        stored.write()
    subprocess.run([sys.executable, "-m", "docs.generate"], cwd=ROOT, check=True)
    print(
        f"conformance: {FILE.relative_to(ROOT)} and docs/reference/conformance.md are written; look at the difference before you commit it"
    )
    return 0


def run(suite: str, backend: Backend, skipped: dict[str, str], only: Sequence[str] | None) -> dict[str, str]:
    """Run the tests of a *suite* over *backend*; return how each ended."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, begin, found = LOGS / f"{suite}-{backend}.log", time.monotonic(), dict[str, str]()
    order = {"suite": suite, "managed": backend == "holdfast", "skipped": skipped, "only": list(only or [""])}
    with tempfile.TemporaryDirectory(prefix="conform-") as folder, log.open("w") as errors:
        agent = AgentDouble(Path(folder) / "agent")
        places = {"TEMP_DIR": folder, "TMPDIR": folder, "INIT_METHOD": f"file://{folder}/shared", "HOLDFAST_HOME": folder}
        environment = {**os.environ, **ENVIRONMENT, **places, **(agent.environment if order["managed"] else {})}
        command = [sys.executable, "-m", "tests.conformance.run_suite"]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.close()
            for line in child.stdout:
                result = json.loads(line)
                found[result["test"]] = result["outcome"]
                _show(suite, backend, result, len(found))
        agent.close()
    if child.returncode:
        sys.exit(f"the suite {suite} over {backend} ended with status {child.returncode}: see {log}")
    passed = sum(one == PASSED for one in found.values())
    print(f"{suite} over {backend}: {passed} of {len(found)} pass ({time.monotonic() - begin:.0f} s)", flush=True)
    return found


def _show(suite: str, backend: Backend, result: dict[str, object], number: int) -> None:
    """Print a line for a test that failed, or needed several attempts, and now and then one that shows the progress."""
    if str(result["outcome"]).startswith("failed") or result["attempts"] != 1:
        print(
            f"  {suite} over {backend}: {result['test']}: {result['outcome']} (attempt {result['attempts']}, {result['seconds']} s)",
            flush=True,
        )
    elif number % 50 == 0:
        print(f"  {suite} over {backend}: {number} tests", flush=True)


if __name__ == "__main__":
    sys.exit(main())
