"""What a job was submitted with is that of its script, wherever it was submitted from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.control.supervisor.provenance import provenance
from holdfast.spec import TrainingJob


def test_the_commit_is_that_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is named from the working directory of the job, and not from that of the controller."""
    work, other = tmp_path / "work", tmp_path / "other"
    for folder in (work, other):
        (folder / "src").mkdir(parents=True)
        (folder / "src/train.py").write_text(f"print('{folder.name}')")
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(work)]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "add", "."], check=True)
    subprocess.run([*run, "commit", "-qm", "a"], check=True)
    head = subprocess.run([*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(other)
    found = provenance(TrainingJob(name="a", script="src/train.py", workdir=str(work)))
    assert head.startswith(found["git_commit"])
    assert "git_commit" not in provenance(TrainingJob(name="a", script="src/train.py", workdir=str(other)))
    (work / "src/train.py").write_text("print()")
    assert provenance(TrainingJob(name="a", command=["true"], workdir=str(work)))["git_commit"] == f"{found['git_commit']}-dirty"
