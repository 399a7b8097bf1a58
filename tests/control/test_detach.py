"""When a flow is to let go of its job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.control.supervisor.detach import SIGNAL, machine_shuts_down, sigterm_detaches, sigusr1_handled
from holdfast.errors import BadSetting


@pytest.mark.parametrize(
    ("said", "goes_down"), [("echo stopping; exit 1", True), ("echo running", False), ("echo offline; exit 1", False), ("exit 1", False)]
)
def test_a_machine_goes_down_when_systemd_says_so(said: str, goes_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 (a table)
    """As `systemctl is-system-running` words it; a machine that really goes down would take the tests along."""
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = is-system-running ] || exit 9\n{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_shuts_down(tmp_path / "none") is goes_down


def test_a_machine_goes_down_when_systemd_has_ended_all_its_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody answers any more; what is left is told to end by the first process, which has another name by then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, goes_down in (("systemd-shutdow\n", True), ("systemd\n", False)):
        (tmp_path / "comm").write_text(name)
        assert machine_shuts_down(tmp_path / "comm") is goes_down


def test_what_a_termination_means_is_refused_where_nobody_knows_before_a_flow_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the hand would else be noticed by a job that was stopped."""
    for said, lets_go in (("", False), ("stop", False), ("detach", True)):
        monkeypatch.setenv("HOLDFAST_SIGTERM", said)
        assert sigterm_detaches() is lets_go
    monkeypatch.setenv("HOLDFAST_SIGTERM", "leave")
    with pytest.raises(BadSetting, match="HOLDFAST_SIGTERM is 'leave'; it must be stop or detach"), sigusr1_handled():
        pass


FIRST = """
import os, signal, sys
from holdfast.control.supervisor.detach import handle_sigusr1, sigusr1_blocked
handle_sigusr1()
with sigusr1_blocked():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
SECOND = """
import subprocess
from holdfast.control.supervisor.detach import handle_sigusr1, sigusr1_handled
handle_sigusr1()
with sigusr1_handled() as detach:
    print(detach.why, flush=True)
subprocess.run(["cat", "/proc/self/status"], check=True)
"""


def test_a_signal_that_comes_while_a_program_becomes_another_is_heard_and_nothing_of_that_reaches_its_children() -> None:
    """Exec resets handlers, and would have it end the process; a training script that uses the signal finds it as it always is."""
    done = subprocess.run([sys.executable, "-c", FIRST, SECOND], capture_output=True, text=True, check=True)
    why, _, status = done.stdout.partition("\n")
    assert why == "it received SIGUSR1"
    words = dict(line.split(":", 1) for line in status.splitlines())
    bit = 1 << (SIGNAL - 1)
    assert [int(words[name], 16) & bit for name in ("SigBlk", "SigIgn", "SigPnd")] == [0, 0, 0]
