"""What Linux offers for owning processes: death signals, subreapers, start times, markers. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send *number* to this process when its parent dies; end at once if *parent* is dead already."""
    _prctl(_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own (a "child subreaper")."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def state_of(pid: int) -> str:
    """Return the kernel's one-letter state of *pid* (R, S, D, T, Z), or ``?`` when it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else "?"


def wait_of(pid: int) -> str:
    """Return the kernel function *pid* sleeps in, or nothing when it cannot be read."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="utf-8", errors="replace") as file:
            found = file.read().strip()
    except OSError:
        return ""
    return "" if found == "0" else found


def started_at(pid: int) -> int | None:
    """Return when *pid* started, in clock ticks since boot, or None when it is gone: pid and start time name one process for ever."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, started: int | None) -> bool:
    """Tell whether the very process that was *pid* at *started* still lives (a zombie does not)."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and (started is None or int(fields[19]) == started)


def all_pids() -> list[int]:
    """Return the pids of this machine's processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid: int) -> list[int]:
    """Return the pids whose parent is *pid*."""
    found = []
    for other in all_pids():
        fields = _stat(other)
        if fields and int(fields[1]) == pid:
            found.append(other)
    return found


def marked(name: str, value: str) -> Iterator[int]:
    """Yield the pids whose environment holds ``name=value``: whatever a node started carries its mark."""
    wanted = f"{name}={value}".encode()
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found = wanted in file.read().split(b"\0")
        except OSError:
            continue
        if found and pid != os.getpid():
            yield pid


def kill(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(pid: int, number: int) -> None:
    """Send a signal to the process group that *pid* leads; one that is gone already is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def sweep(name: str, value: str, *, seconds: float = 5.0) -> list[int]:
    """Kill everything that carries the mark ``name=value`` and wait until it is gone; return what was killed."""
    killed: set[int] = set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        alive = [pid for pid in marked(name, value) if state_of(pid) not in ("Z", "?")]
        if not alive:
            break
        for pid in alive:
            kill(pid, signal.SIGKILL)
        killed.update(alive)
        time.sleep(0.01)
    return sorted(killed)
