"""The project's own files agree with each other."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from holdfast import __version__
from holdfast.torch_versions import untested
from tests.matrix.results import INTEGRATION, LEVELS, RUNTIME, VERSIONS, read

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def locked() -> list[Requirement]:
    """Return the lines of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def versions() -> dict[NormalizedName, Version]:
    """Return the one version of each locked package."""
    return {canonicalize_name(lock.name): Version(str(lock.specifier).removeprefix("==")) for lock in locked()}


def wanted() -> Iterator[Requirement]:
    """Yield what the extras ask for, leaving out their references to each other."""
    for lines in EXTRAS.values():
        yield from (need for line in lines if (need := Requirement(line)).name != "holdfast")


def closure() -> dict[NormalizedName, str]:
    """Return every package that the extras lead to in this environment, with the one that asks for it."""
    seen: dict[NormalizedName, str] = {}
    waiting = [(need, "pyproject.toml") for need in wanted()]
    while waiting:
        need, asker = waiting.pop()
        name = canonicalize_name(need.name)
        if name not in seen:
            waiting += [(child, name) for child in needs_of(need)]
        seen[name] = asker
    return seen


def needs_of(need: Requirement) -> list[Requirement]:
    """Return what an installed package with the extras of *need* asks for here; nothing for one that is not installed."""
    try:
        children = [Requirement(line) for line in requires(need.name) or ()]
    except PackageNotFoundError:
        return []
    return [c for c in children if c.marker is None or any(c.marker.evaluate({"extra": extra}) for extra in need.extras | {""})]


def test_every_lock_is_one_exact_version() -> None:
    """One version for every Python and machine, so that a bug report needs no more than the commit."""
    assert all(str(lock.specifier).startswith("==") and "*" not in str(lock.specifier) for lock in locked())
    assert len(locked()) == len(versions())


@pytest.mark.parametrize("need", list(wanted()), ids=lambda need: need.name)
def test_what_an_extra_asks_for_is_locked_at_a_version_it_allows(need: Requirement) -> None:
    """`make lock` mends what this refuses."""
    assert versions()[canonicalize_name(need.name)] in need.specifier


def test_the_whole_closure_is_locked() -> None:
    """A package that comes in by the back door floats otherwise."""
    loose = {name: asker for name, asker in closure().items() if name not in versions()}
    assert not loose


def test_torch_is_locked_without_a_local_version() -> None:
    """An index with CPU builds and one with CUDA builds both satisfy it."""
    assert versions()[canonicalize_name("torch")] == Version("2.13.0")
    assert versions()[canonicalize_name("torch")].local is None


def test_every_supported_torch_is_in_the_matrix_and_no_other() -> None:
    """What pip installs, what `make matrix` runs, and what is not called untested are the same versions."""
    (need,) = (one for one in wanted() if one.name == "torch")
    minors = [f"2.{minor}" for minor in range(9, 18)]
    assert [one for one in minors if f"{one}.1" in need.specifier] == list(VERSIONS)
    assert [one for one in minors if not untested(f"{one}.0+cu132")] == list(VERSIONS)
    assert all(one.key[0] in VERSIONS and set(one.levels) == set(LEVELS) for one in read())
    assert all((ROOT / "tests/integration" / name).is_file() for name in INTEGRATION)
    assert all((ROOT / "tests/runtime" / name).is_file() for name in RUNTIME)


def test_a_node_needs_no_package() -> None:
    """The base install is the agent's: standard library only."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] == []


def job_names(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each job that a test in *file* starts (`stage.play("NAME", ...)`, `play = begun(stage, "NAME", ...)`), and the test."""
    for test in (one for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)):
        for node in ast.walk(test):
            named: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"play", "submits", "job"}:
                named = node.args[:1]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "play" and isinstance(node.value, ast.Call):
                named = node.value.args[1:2] if [ast.unparse(one) for one in node.value.args[:1]] == ["stage"] else []
            for one in named:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value, f"{file.name}::{test.name}"


def test_no_two_tests_give_a_job_the_same_name() -> None:
    """All jobs of a run are flow runs on one Prefect server, and what a test asks for there it asks for by the job's name."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests" / "integration").glob("test_*.py"):
        for name, test in job_names(file):
            found.setdefault(name, set()).add(test)
    assert len(found) > 100
    assert {name: tests for name, tests in found.items() if len(tests) > 1} == {}


def test_the_version_is_written_once_and_the_changelog_describes_it() -> None:
    """The build reads it from the package; until its release it is a development version of the changelog's first entry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (project["project"].get("version"), project["project"]["dynamic"]) == (None, ["version"])
    source = project["tool"]["hatch"]["version"]
    found = re.search(source["pattern"], (ROOT / source["path"]).read_text(), re.MULTILINE)
    assert found is not None
    assert found["version"] == __version__
    entry = re.search(r"^## \[(?P<version>[^]]+)\](?P<unreleased> - Unreleased)?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entry is not None
    assert Version(__version__).base_version == entry["version"]
    assert Version(__version__).is_prerelease is bool(entry["unreleased"])
