"""The helpers of the tests themselves: they must fail when they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.leftovers import leftovers
from tests.waiting import wait_until


def test_waiting_in_vain_fails_with_the_explanation() -> None:
    """The reader of a failed test learns what was waited for."""
    with pytest.raises(AssertionError, match="the child's log"):
        wait_until(lambda: None, seconds=0, explain=lambda: "the child's log")


def test_waiting_gives_the_first_true_answer() -> None:
    """The answer itself is handed on."""
    answers = iter(["", "", "found"])
    assert wait_until(lambda: next(answers), seconds=60) == "found"


def test_a_process_left_behind_is_seen(tmp_path: Path) -> None:
    """A child that names the folder in a variable of ours is listed while it lives, one that names another is not."""
    nap = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    for environment, seen in (
        ({"HOLDFAST_HOME": str(tmp_path / "home")}, True),
        ({"A": "b", "HOLDFAST_NODE_MARK": str(tmp_path)}, True),
        ({"HOLDFAST_HOME": f"{tmp_path}-other"}, False),
    ):
        with subprocess.Popen(nap, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()  # it runs
            assert bool([line for line in leftovers(tmp_path) if line.startswith(f"{child.pid} ")]) is seen
            child.kill()
        assert not leftovers(tmp_path)
