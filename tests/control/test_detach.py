"""When a controller detaches from its job."""

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
def test_a_machine_shuts_down_when_systemd_says_so(said: str, goes_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 (a table)
    """By the words of `systemctl is-system-running`; a real shutdown would end the tests."""
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = is-system-running ] || exit 9\n{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_shuts_down(tmp_path / "none") is goes_down


def test_a_machine_shuts_down_when_systemd_has_ended_all_its_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then systemctl no longer answers; the first process, which has another name by then, signals what is left."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, goes_down in (("systemd-shutdow\n", True), ("systemd\n", False)):
        (tmp_path / "comm").write_text(name)
        assert machine_shuts_down(tmp_path / "comm") is goes_down


def test_an_unknown_meaning_of_sigterm_is_refused_before_a_flow_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error would otherwise show when it has stopped a job."""
    for said, detaches in (("", False), ("stop", False), ("detach", True)):
        monkeypatch.setenv("HOLDFAST_SIGTERM", said)
        assert sigterm_detaches() is detaches
    monkeypatch.setenv("HOLDFAST_SIGTERM", "leave")
    with pytest.raises(BadSetting) as refused, sigusr1_handled():
        pass
    assert (refused.value.name, refused.value.given, refused.value.known) == ("HOLDFAST_SIGTERM", "leave", ("stop", "detach"))


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


def test_a_signal_during_exec_is_kept_and_its_handling_does_not_reach_children() -> None:
    """Exec resets handlers, so the signal would end the process; a training script that uses the signal finds its default."""
    done = subprocess.run([sys.executable, "-c", FIRST, SECOND], capture_output=True, text=True, check=True)
    why, _, status = done.stdout.partition("\n")
    assert why == "it received SIGUSR1"
    words = dict(line.split(":", 1) for line in status.splitlines())
    bit = 1 << (SIGNAL - 1)
    assert [int(words[name], 16) & bit for name in ("SigBlk", "SigIgn", "SigPnd")] == [0, 0, 0]
