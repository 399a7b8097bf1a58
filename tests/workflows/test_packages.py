"""`holdfast.workflows` beside a user's own `flows` and `tasks`: each process imports as a user's would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("holdfast", "flows", "tasks", "policies", "detectors")
USE = """
from holdfast.flows.prepare import prepare
from holdfast.workflows import probe_cluster, training_job
from holdfast.tasks.clean import clean
assert (prepare(), clean()) == ("prepared", "cleaned")
assert training_job.name == "training-job"
import holdfast.flows.training_job, holdfast.tasks.training_job
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay the packages out as in site-packages: without pyproject.toml beside them."""
    place = tmp_path_factory.mktemp("site-packages")
    for name in OURS:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def project(folder: Path, *, packages: bool) -> None:
    """Write a user's project with `flows` and `tasks`, as packages or as plain folders."""
    for name, module, done in (("flows", "prepare", "prepared"), ("tasks", "clean", "cleaned")):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{module}.py").write_text(f"def {module}():\n    return '{done}'\n")
        if packages:
            (folder / name / "__init__.py").write_text("")


def python(code: str, folder: Path, installed: Path) -> subprocess.CompletedProcess[str]:
    """Run *code* as a script in *folder*, with Holdfast behind it on the path as site-packages is."""
    (folder / "use.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "use.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("order", ["theirs-first", "ours-first"])
@pytest.mark.parametrize("packages", [True, False], ids=["packages", "folders"])
def test_a_project_with_flows_and_tasks_of_its_own_uses_both(tmp_path: Path, installed: Path, packages: bool, order: str) -> None:  # noqa: FBT001 (a case)
    """Whichever is imported first, and whether or not its folders have an `__init__.py`."""
    project(tmp_path, packages=packages)
    lines = USE.strip().splitlines()
    if order == "ours-first":
        lines.sort(key=lambda line: not line.startswith("from holdfast"))
    done = python("\n".join(lines), tmp_path, installed)
    assert done.returncode == 0, done.stderr


def test_a_module_with_the_full_name_of_one_of_ours_is_refused_in_words(tmp_path: Path, installed: Path) -> None:
    """The error names the file to rename."""
    project(tmp_path, packages=True)
    (tmp_path / "tasks" / "training_job.py").write_text("")
    done = python("import holdfast.tasks.training_job\nimport holdfast.workflows\n", tmp_path, installed)
    assert done.returncode == 1
    assert f"ImportError: {tmp_path}/tasks/training_job.py was imported as `holdfast.tasks.training_job`" in done.stderr
