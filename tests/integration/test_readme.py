"""The README's quick start, run as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()

TRAIN = """
import os, signal
print("rank", os.environ["RANK"], "trains", flush=True)
if os.environ["RANK"] == "1" and os.environ["HOLDFAST_GENERATION"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A script that knows nothing of Holdfast, with one fault to have an incident to show."""

HOLDFAST = [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())"]


def block(language: str, holding: str) -> str:
    """Return the fenced block of the README in *language* that has *holding* in it."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if holding in text]
    return str(found)


def commands(holding: str) -> list[list[str]]:
    """Return the `holdfast` commands of the README's block that has *holding* in it, without their comments."""
    return [shlex.split(line, comments=True) for line in block("bash", holding).splitlines() if line.startswith("holdfast ")]


@pytest.fixture
def place(holdfast_home: Path, tmp_path: Path) -> Path:
    """Give the folder of the README's reader: the job file, a script, a home."""
    assert holdfast_home.exists()
    (tmp_path / "job.yaml").write_text(block("yaml", "gpt-small"))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(args: list[str], place: Path) -> str:
    """Run one command as the reader would; return what it said, or fail with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*HOLDFAST, *args[1:]], cwd=place, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, f"{shlex.join(args)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


NOT_HERE = {"stop"}
"""Commands of the README for a job that still runs: this one has ended."""


@pytest.mark.long
def test_the_quick_start_does_what_the_readme_says(place: Path) -> None:
    """Validate, run through a killed rank, then read what happened, with the words of the README."""
    said = {" ".join(args[1:3]): run(args, place) for args in commands("holdfast validate") if args[1] not in NOT_HERE}
    job = ["validate job.yaml", "run job.yaml", "status gpt-small"]
    assert list(said) == [*job, "incidents gpt-small", "incidents show", "logs gpt-small", "report gpt-small", "cost gpt-small"]
    assert "COMPLETED" in said["status gpt-small"].upper()
    assert "worker-sigkill" in said["incidents show"]
    assert "rank 1 trains" in said["logs gpt-small"]
    assert (place / "report.html").stat().st_size > 0


def test_the_command_that_writes_a_job_file_writes_the_one_that_the_readme_goes_on_with(place: Path) -> None:
    """Under its name, valid, and with every field of the README's, set or offered."""
    (place / "job.yaml").unlink()
    (line,) = re.findall(r"`(holdfast init [^`]*)`", README)
    run(shlex.split(line), place)
    assert "valid" in run(["holdfast", "validate", "job.yaml"], place)
    written = (place / "job.yaml").read_text()
    wanted = re.findall(r"^(\w+):", block("yaml", "gpt-small"), re.MULTILINE)
    assert [name for name in wanted if not re.search(rf"^(# )?{name}:", written, re.MULTILINE)] == ["args"], "no argument was given"
    (place / "job.yaml").write_text(re.sub(r"^# cluster:", "cluster:", written, flags=re.MULTILINE))
    assert "(this machine)" in run(["holdfast", "validate", "job.yaml"], place)


def test_the_readme_is_short_and_has_the_commands_of_a_clone() -> None:
    """At most 150 lines, with the set-up commands, the demo and the tests."""
    assert len(README.splitlines()) <= 150
    assert re.findall(r"^make (\w+)", block("bash", "make install"), re.MULTILINE) == ["install", "demo", "test"]


SETTING = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(8, 4), batch_size=2)
"""
"""What the README's lines for a training script take as given."""


@pytest.mark.long
def test_the_lines_for_a_training_script_run_without_an_agent(holdfast_home: Path, tmp_path: Path) -> None:
    """Under plain Python they train to the last step, save nothing and need nobody."""
    lines = block("python", "import holdfast").replace("10_000", "10")
    (tmp_path / "train.py").write_text(f"{SETTING}{lines}\nprint(session.steps_done, loss.item() < 1)\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "10 True\n"), done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]
    assert list(holdfast_home.iterdir()) == []
