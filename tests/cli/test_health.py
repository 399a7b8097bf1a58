"""`holdfast node check --local`: this machine, and GPUs of a stand-in library that fail between two checks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.detectors.codec import unpacked
from holdfast.detectors.nodes.readings import NodeReading
from tests.cli.conftest import Command
from tests.mentions import mentions, one_line_mentions
from tests.readers.conftest import built


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate two healthy GPUs on this machine; return the file that changes them."""
    folder, state = tmp_path / "library", tmp_path / "state"
    folder.mkdir()
    state.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(built(folder)))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(state))
    return state


def test_this_machine_is_checked_and_unknown_signals_are_listed(holdfast: Command) -> None:
    """The exit status shows whether there are faults; a machine without GPUs lists them as unknown, not as healthy."""
    done = holdfast("node", "check", "--local", "--json")
    output = json.loads(done.stdout)
    acting = [fault for fault in output["faults"] if fault["recommended_action"] != "record"]
    assert done.returncode == bool(acting), done.stdout
    assert unpacked(NodeReading, output["reading"]).node == output["node"] == os.uname().nodename
    assert ("gpus.gpus" in output["unknown"]) == ("blind" in output["reading"]["gpus"]["gpus"])


def test_a_fault_is_shown_with_evidence_and_cure(holdfast: Command, stand_in: Path) -> None:
    """And the status is 1."""
    stand_in.write_text("gpu1.rows_failed 1\n")
    done = holdfast("node", "check", "--local")
    assert done.returncode == 1
    assert one_line_mentions(done.stdout, "gpu-row-remap-failed", "GPU 0000:28:00.0")
    assert mentions(done.stdout, "memory row", "out of service")


def test_changes_since_an_earlier_reading_are_shown(holdfast: Command, stand_in: Path, tmp_path: Path) -> None:
    """The earlier output is all that it takes."""
    stand_in.write_text("gpu0.link0.recoveries 4\n")
    before = holdfast("node", "check", "--local", "--json")
    assert "nvlink-errors" not in before.stdout
    (tmp_path / "before.json").write_text(before.stdout)
    stand_in.write_text("gpu0.link0.recoveries 5\n")
    done = holdfast("node", "check", "--local", "--baseline", "before.json")
    assert "nvlink-errors" in done.stdout


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"reading": 5}', '{"reading": {"node": "n0"}}'])
def test_a_file_without_a_reading_is_refused(here: Command, tmp_path: Path, text: str) -> None:
    """With the cure."""
    (tmp_path / "before.json").write_text(text)
    done = here("node", "check", "--local", "--baseline", "before.json")
    assert done.returncode == 2
    assert "holdfast node check --local --json" in done.stderr


@pytest.mark.parametrize("words", [["n0"], ["--cluster", "c.yaml"]])
def test_a_check_has_one_target(words: list[str], here: Command) -> None:
    """This machine, or nodes of a cluster."""
    done = here("node", "check", "--local", *words)
    assert (done.returncode, done.stdout) == (2, "")


def test_the_target_of_a_check_is_required(here: Command) -> None:
    """Either a cluster or this machine."""
    done = here("node", "check")
    assert done.returncode == 2
    assert "--local" in done.stderr
