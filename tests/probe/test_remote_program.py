"""The one way to run a program on a node, tried with an interpreter of this machine: what it answers, and what is said when it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.probe.remote.bundle import program
from holdfast.probe.remote.program import ChildInterpreter, ProbeFailed, RemoteProgram
from tests.waiting import wait_until

SOURCE = """
import os, signal, sys, time

def answer(asked):
    verb = asked["do"]
    if verb == "late":
        while not os.path.exists(asked["file"]):
            time.sleep(0.01)
    if verb == "exit":
        print("no room", file=sys.stderr)
        sys.exit(3)
    if verb == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "noise":
        print("You have mail.")
    return {"list": [5], "flood": "x" * (5 << 20), "time": {"time": "now"}}.get(verb, {"did": verb})
"""
LONG = 60.0


@pytest.fixture
def remote() -> Iterator[RemoteProgram]:
    """Give a program that answers, or does not."""
    made = RemoteProgram(ChildInterpreter(), program({"odd": SOURCE}, "odd"), time.monotonic() + LONG)
    yield made
    made.close()


def ask(remote: RemoteProgram, do: str, *, within: float = LONG, **question: object) -> dict[str, object]:
    """Ask one question."""
    return remote.ask(time.monotonic() + within, do=do, **question)


def test_each_question_has_its_own_answer(remote: RemoteProgram, tmp_path: Path) -> None:
    """Other output is skipped, and so is the late answer to an earlier question."""
    assert ask(remote, "noise") == {"did": "noise"}
    with pytest.raises(ProbeFailed, match="in time"):
        ask(remote, "late", within=0.2, file=str(tmp_path / "asked"))
    (tmp_path / "asked").touch()
    assert ask(remote, "anything") == {"did": "anything"}
    assert remote.is_alive


@pytest.mark.parametrize(
    ("do", "why"),
    [
        ("exit", r"exited with status 3 and gave no answer \(no room\)"),
        ("killed", "was killed and gave no answer"),
        ("flood", "more than 4 MiB without a valid answer"),
        ("list", r"its answer is malformed: '\[5\]'"),
    ],
)
def test_a_program_without_an_answer_is_reported(remote: RemoteProgram, do: str, why: str) -> None:
    """With how it ended, and its last output."""
    with pytest.raises(ProbeFailed, match=why):
        ask(remote, do)
    if do in {"exit", "killed"}:
        wait_until(lambda: not remote.is_alive, seconds=LONG)


def test_a_time_that_is_no_number_is_malformed(remote: RemoteProgram) -> None:
    """A node may answer anything."""
    with pytest.raises(ProbeFailed, match="malformed"):
        remote.clock_offset(3, LONG)


def test_a_missing_interpreter_is_an_error_of_this_machine() -> None:
    """And leaves nothing open: warnings are errors here."""
    with pytest.raises(OSError, match="No such file"):
        ChildInterpreter("/nowhere/python3")
