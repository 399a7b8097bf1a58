"""What `pip install holdfast` installs: an sdist is built, a wheel from that, and the wheel is installed, as an index would give it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
USE = """
from flows.prepare import prepare
from holdfast.workflows import probe_cluster, training_job
from tasks.clean import clean
assert (prepare(), clean(), training_job.name) == ("prepared", "cleaned", "training-job")
import holdfast, holdfast.flows.training_job, holdfast.tasks.training_job
print(holdfast.__file__)
"""


def ran(*command: str, **given: object) -> str:
    """Run a command; return its output, or fail with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, unpack it, build the wheel from that, and install the wheel alone into a folder."""
    place = tmp_path_factory.mktemp("packaging")
    ran(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place), cwd=ROOT)
    (sdist,) = place.glob("holdfast-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    ran(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place), cwd=source)
    (wheel,) = place.glob("holdfast-*.whl")
    ran(*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(place / "site"), str(wheel))
    return place / "site"


def test_one_top_level_package_is_installed_with_all_modules(installed: Path) -> None:
    """Nothing named `flows` or `tasks`, which a user's project may have; every module of the repository is there."""
    tops = {path.name for path in installed.iterdir()} - {"bin"}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"holdfast"}
    for top in ("flows", "tasks", "detectors", "policies", "holdfast"):
        inside = installed / "holdfast" / ("" if top == "holdfast" else top)
        missing = [file for file in (ROOT / top).rglob("*") if file.suffix in {".py", ".toml", ".html", ".json"} and file.is_file()]
        missing = [file for file in missing if not (inside / file.relative_to(ROOT / top)).is_file()]
        assert not missing


def test_a_project_with_flows_and_tasks_of_its_own_uses_both(tmp_path: Path, installed: Path) -> None:
    """Its packages and ours do not get in each other's way; the command starts too."""
    for name, module, done in (("flows", "prepare", "prepared"), ("tasks", "clean", "cleaned")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / f"{module}.py").write_text(f"def {module}():\n    return '{done}'\n")
    (tmp_path / "use.py").write_text(USE)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1", "HOLDFAST_HOME": str(tmp_path / "home")}
    assert ran(sys.executable, "use.py", cwd=tmp_path, env=environment).strip() == str(installed / "holdfast" / "__init__.py")
    start = "import sys; from holdfast.cli import main; sys.exit(main())"  # what the console script does
    assert "Usage: holdfast" in ran(sys.executable, "-c", start, "--help", cwd=tmp_path, env=environment)


def test_extras_are_those_that_the_documentation_names() -> None:
    """Named for what a user has: a training environment, a server, a framework."""
    extras = {one for one in distribution("holdfast").metadata.get_all("Provides-Extra") or () if one != "dev"}
    assert extras == {"all", "torch", "server", "huggingface", "lightning"}
    text = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert not [one for one in extras if f"`{one}`" not in text]
