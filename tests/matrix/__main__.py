"""Run the tests of the runtime with several versions of torch, each in an environment of its own: `make matrix`."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.matrix.results import INTEGRATION, LEVELS, VERSIONS, Level, Result, level_of, read, store

ROOT: Final = Path(__file__).parent.parent.parent
PLACE: Final = ROOT / "build/matrix"
PROCESSES: Final = 2
DISK: Final = 12 * 10**9
"""Free bytes without which no environment is made: one with CUDA takes 6 GB, and as much for a moment while pip unpacks it."""
OF_TORCH: Final = re.compile(r"(?:torch|triton|sympy|networkx|mpmath|setuptools|cuda-[\w-]+|nvidia-(?!ml-py)[\w-]+)==")
"""Lines of constraints.txt for torch and what only it needs: each version of torch needs others."""
ABOUT: Final = "import platform, torch; print(torch.__version__, platform.python_version())"

Outcomes = dict[str, tuple[str, str]]
"""By the name of a test: ``passed``, ``skipped`` or ``failed``, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return the exit status."""
    options = _parser().parse_args(arguments)
    unknown = [version for version in options.versions if version not in VERSIONS]
    if unknown:
        sys.exit(f"matrix: {', '.join(unknown)} is not among the supported versions of torch: {', '.join(VERSIONS)}")
    PLACE.mkdir(parents=True, exist_ok=True)
    failed = False
    for version in options.versions or VERSIONS:
        environment = PLACE / version
        known = next((one for one in read() if one.key[0] == version), None) if options.failed else None
        try:
            interpreter = _make(environment, version, options.python)
            result = run(interpreter, environment) if known is None else run_failed(known, interpreter, environment)
        finally:
            if not options.keep:
                shutil.rmtree(environment, ignore_errors=True)
        store(result)
        subprocess.run([sys.executable, "-m", "docs.generate"], cwd=ROOT, check=True)
        _report(result)
        failed = failed or not all(one.passes for one in result.levels.values())
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"only these, of {', '.join(VERSIONS)}")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="the interpreter for the environments")
    parser.add_argument("--failed", action="store_true", help="of a version with stored results, only the tests that failed")
    parser.add_argument("--keep", action="store_true", help="keep the environments, for another run")
    return parser


# -- an environment -----------------------------------------------------------------------------------------------------


def _make(environment: Path, version: str, python: str) -> Path:
    """Make the environment for torch *version*, or take the one that was kept; return its interpreter."""
    interpreter, complete = environment / "bin/python", environment / ".complete"
    if complete.exists():
        return interpreter
    shutil.rmtree(environment, ignore_errors=True)
    if shutil.disk_usage(PLACE).free < DISK:
        sys.exit(f"matrix: less than {DISK // 10**9} GB are free in {PLACE}, and the environment for torch {version} needs that")
    print(f"matrix: making {environment.relative_to(ROOT)} (up to 6 GB)", flush=True)
    constraints = PLACE / f"constraints-{version}.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not OF_TORCH.match(line)))
    given = {**os.environ, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    install = [str(interpreter), "-m", "pip", "install", "-qq", "--no-cache-dir"]
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    for wanted in (["torch==" + version + ".*"], ["-e", ".[all,dev]"]):  # in this order, or pip may look for another torch
        subprocess.run([*install, *wanted], cwd=ROOT, env=given, check=True)
    complete.touch()
    return interpreter


# -- the tests ----------------------------------------------------------------------------------------------------------


def run(interpreter: Path, environment: Path) -> Result:
    """Run the tests with *interpreter*, those that fail a second time and alone; return how they ended."""
    torch, python = subprocess.run([interpreter, "-c", ABOUT], check=True, capture_output=True, text=True).stdout.split()
    print(f"matrix: torch {torch}, Python {python}: running the tests", flush=True)
    files = ["tests/runtime", *(f"tests/integration/{name}" for name in INTEGRATION)]
    log = PLACE / f"{environment.name}.log"
    outcomes = _run_tests(interpreter, ["--numprocesses", str(PROCESSES), *files], log)
    failures = [name for name, (outcome, _) in outcomes.items() if outcome == "failed"]
    again: Outcomes = {}
    for name in failures:
        again.update(_run_tests(interpreter, ["-p", "no:xdist", name], log.with_suffix(".again.log")))
    return Result(torch, python, _levels({**outcomes, **again}, failures))


def run_failed(known: Result, interpreter: Path, environment: Path) -> Result:
    """Run those tests of the stored result *known* that failed, each alone; return it with how they ended."""
    log = PLACE / f"{environment.name}.again.log"
    for name, level in known.levels.items():
        for test in list(level.failed):
            after = _levels(_run_tests(interpreter, ["-p", "no:xdist", test], log), ())[name]
            del level.failed[test]
            level.failed.update(after.failed)
            level.passed += after.passed
            level.skipped += after.skipped
    return known


def _run_tests(interpreter: Path, arguments: Sequence[str], log: Path) -> Outcomes:
    """Run pytest; return how each test ended. Exit where pytest itself fails: that says nothing of torch."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [str(interpreter), "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit1", "-rfE", *arguments]
    with log.open("w") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    outcomes = _outcomes(report) if report.exists() else {}
    if not outcomes or status not in (0, 1):
        sys.exit(f"matrix: pytest exited with status {status} before all tests had run: see {log}")
    return outcomes


def _outcomes(report: Path) -> Outcomes:
    found: Outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 (pytest wrote it)
        file, test = case.get("file"), case.get("name") or ""
        name = f"{file}::{test}" if file else f"{test.replace('.', '/')}.py"  # a file that could not be read is named as a module
        wrong = next((one for one in case if one.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if wrong is not None:
            found[name] = "failed", _line(wrong.get("message"))
        elif name not in found:  # an error at its end is a case of its own
            found[name] = ("skipped", _line(skip.get("message"))) if skip is not None else ("passed", "")
    return found


def _line(message: str | None) -> str:
    return next((line.strip()[:300] for line in (message or "").splitlines() if line.strip()), "without a message")


def _levels(outcomes: Outcomes, repeated: Sequence[str]) -> dict[str, Level]:
    levels = {name: Level() for name in LEVELS}
    for name, (outcome, why) in outcomes.items():
        level = levels[level_of(name.partition("::")[0])]
        if outcome == "failed":
            level.failed[name] = why
        elif outcome == "skipped":
            level.skipped += 1
        else:
            level.passed += 1
            if name in repeated:
                level.repeated.append(name)
    return levels


def _report(result: Result) -> None:
    levels: Mapping[str, Level] = result.levels
    for name, level in levels.items():
        print(f"torch {result.torch}: {name}: {level.passed} passed, {level.skipped} skipped, {len(level.failed)} failed")
        for test, why in level.failed.items():
            print(f"  {test}: {why}")
        for test in level.repeated:
            print(f"  {test}: passed when it ran again, alone")


if __name__ == "__main__":
    sys.exit(main())
