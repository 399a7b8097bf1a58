"""What is read from /proc about processes, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.host import process
from holdfast.host.process import (
    children_of,
    end_children,
    is_alive,
    is_ending,
    kill,
    kill_group,
    marked,
    parent_of,
    started_at,
    state_of,
    sweep,
    wait_of,
)
from tests.waiting import wait_until

NAP = "import time; time.sleep(600)"
HERE = f"here-{os.getpid()}"
"""The value of a mark that no other run of these tests has."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Give a child that sleeps, in a session of its own."""
    with subprocess.Popen([sys.executable, "-c", NAP], start_new_session=True, env={"A_MARK": HERE}) as child:
        yield child
        child.kill()


def test_a_process_is_known_by_pid_and_start(child: subprocess.Popen[bytes]) -> None:
    """A pid is used again, the two together never."""
    started = started_at(child.pid)
    assert started is not None
    assert is_alive(child.pid, started)
    assert is_alive(child.pid, None)
    assert not is_alive(child.pid, started - 1)
    assert parent_of(child.pid) == os.getpid()
    wait_until(lambda: state_of(child.pid) == "S", seconds=60)
    assert not is_ending(child.pid)
    assert isinstance(wait_of(child.pid), str)
    child.kill()
    wait_until(lambda: state_of(child.pid) == "Z", seconds=60)
    assert is_ending(child.pid)
    assert not is_alive(child.pid, started), "a zombie does not live"
    child.wait()
    assert (state_of(child.pid), started_at(child.pid), parent_of(child.pid), wait_of(child.pid)) == ("?", None, None, "")


def test_a_name_with_brackets_and_blanks_is_parsed() -> None:
    """A process may call itself anything."""
    code = "import sys; open('/proc/self/comm', 'w').write(') R 1 (\\xff '); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        assert parent_of(child.pid) == os.getpid()


@pytest.mark.parametrize("missing", [False, True])
def test_children_are_found_with_and_without_the_kernels_list(
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    missing: bool,  # noqa: FBT001 (a case)
) -> None:
    """Not every kernel has it."""
    if missing:
        monkeypatch.setattr(Path, "iterdir", lambda _path: (_ for _ in ()).throw(FileNotFoundError()))
    assert child.pid in children_of(os.getpid())
    assert children_of(child.pid) == []


def test_signals_to_exited_processes_are_no_error(child: subprocess.Popen[bytes]) -> None:
    """Between a look and an act anything may end."""
    assert kill_group(child.pid, signal.SIGKILL)
    child.wait()
    kill(child.pid, signal.SIGTERM)
    assert not kill_group(child.pid, signal.SIGTERM)


def test_a_sweep_takes_what_carries_the_very_mark(child: subprocess.Popen[bytes]) -> None:
    """Not one whose value only begins like it."""
    wait_until(lambda: child.pid in marked("A_MARK", HERE), seconds=60)
    assert sweep("A_MARK", HERE[:-1]) == sweep("A_MARK", "") == sweep("MARK", HERE) == []
    assert sweep("A_MARK", HERE, spare=lambda pid: pid == child.pid, seconds=0.1) == []
    assert sweep("A_MARK", HERE) == [child.pid]
    assert child.wait() == -signal.SIGKILL


def test_what_cannot_be_ended_in_time_is_reported() -> None:
    """In a child of our own, so that its children are all there are."""
    code = f"""
import os, signal, subprocess, sys
from holdfast.host.process import end_children
process = subprocess.Popen([sys.executable, "-c", {NAP!r}])
import holdfast.host.process
real, holdfast.host.process.kill = holdfast.host.process.kill, lambda *_: None
assert end_children(seconds=0.1) is False
holdfast.host.process.kill = real
assert end_children(spare=process.pid, seconds=5) is True
os.kill(process.pid, 0)
assert end_children() is True
assert end_children(seconds=0.1) is True
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(process.__file__).parents[1])
    assert callable(end_children)
