"""What Linux offers for owning processes: death signals, subreapers, start times, marks in the environment. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

NODE_MARK: Final = "HOLDFAST_NODE_MARK"
"""Variable that everything started on a node carries in its environment: the node's folder (`mark_of`)."""
AGENT_MARK: Final = "HOLDFAST_AGENT"
"""Variable that everything started by one agent carries: the agent's id."""

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_ARG_START: Final = 45
_ARG_END: Final = 46
"""Places in what `_stat` returns."""
_EXITING: Final = 0x4
"""``PF_EXITING`` among a process's flags."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send *number* to this process when its parent dies; send it at once if *parent* is dead already."""
    _prctl(_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Make this process the parent of every descendant that loses its own (a "child subreaper")."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def set_title(text: str) -> None:
    """Show *text* as the command line of this process, in `ps` and `top`; what does not fit into the present one is cut off.

    A fork has the command line of the process that it was forked from. The kernel reads it from the memory of the process, whose bounds it
    reports (proc_pid_stat(5), fields 48 and 49); the environment beside it stays as it is.
    """
    fields = _stat(os.getpid())
    begin, end = (int(fields[number]) for number in (_ARG_START, _ARG_END)) if fields else (0, 0)
    if begin and end > begin:
        ctypes.memmove(begin, text.encode(errors="replace")[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def reset_signals() -> None:
    """Undo what a caller blocked or ignored: both are inherited through exec.

    SIGPIPE and SIGXFSZ stay as Python sets them; `subprocess` restores those by itself.
    """
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - kept:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def survive_sigterm() -> None:
    """Go on after SIGTERM, in a process that works for another one and ends with it.

    A batch system, or a machine that shuts down, sends it to every process at once, and those that save the job's state need the others.
    It is handled, not ignored, as exec would pass that on.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)


def spawn(argv: tuple[str, ...], log: IO[bytes], **options: Any) -> int:  # noqa: ANN401 (what Popen takes)
    """Start a child that dies with this process; return its pid, which the caller reaps. Raise ``OSError`` when it cannot start."""
    parent = os.getpid()

    def prepare() -> None:
        reset_signals()
        die_with_parent(parent)

    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=prepare, **options)  # noqa: PLW1509 (one thread)
    except subprocess.SubprocessError as error:
        raise OSError(f"the process could not be set up: {error}") from error
    child.returncode = 0  # so that Popen never waits for it
    return child.pid


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def boot_time() -> float:
    """Return the seconds since this machine booted, including those of suspension: other machines' leases expired meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def state_of(pid: int) -> str:
    """Return the kernel's one-letter state of *pid* (R, S, D, T, Z), or ``?`` when it does not exist."""
    fields = _stat(pid)
    return fields[0] if fields else "?"


def is_ending(pid: int) -> bool:
    """Return whether *pid* has ended or is exiting: its sockets are closed some time before its parent is notified."""
    fields = _stat(pid)
    return fields is None or bool(int(fields[6]) & _EXITING)


def wait_of(pid: int) -> str:
    """Return the kernel function *pid* sleeps in, or an empty text when it cannot be read."""
    try:
        found = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return "" if found == "0" else found


def parent_of(pid: int) -> int | None:
    """Return the parent of *pid*, or None when it does not exist."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def started_at(pid: int) -> int | None:
    """Return when *pid* started, in clock ticks since boot, or None when it does not exist: both together identify a process for ever."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, started: int | None) -> bool:
    """Return whether the very process that was *pid* at *started* still lives (a zombie does not)."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and (started is None or int(fields[19]) == started)


def all_pids() -> list[int]:
    """Return the pids of this machine's processes."""
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def children_of(pid: int) -> list[int]:
    """Return the pids whose parent is *pid*, zombies included."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a kernel without that file, or a thread that ended meanwhile
        return [other for other in all_pids() if parent_of(other) == pid]
    return [int(child) for children in lists for child in children.split()]


def mark_of(folder: Path) -> str:
    """Return the mark of the node whose folder is *folder*, the same for every spelling of the path."""
    return str(folder.resolve())


def marked(name: str, value: str) -> Iterator[int]:
    """Yield the pids, except this one, whose environment has ``name=value``, the newest first; a zombie has no environment."""
    wanted = os.fsencode(f"{name}={value}")
    for pid in sorted(all_pids(), reverse=True):
        try:
            found = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if found and pid != os.getpid():
            yield pid


def kill(pid: int, number: int) -> None:
    """Send a signal; it is no error when the process has ended already, or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(pid: int, number: int) -> bool:
    """Send a signal to the process group that *pid* leads; return whether there is one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # there is one, and all of it belongs to another user
    return True


def sweep(name: str, value: str, *, seconds: float = 5.0, spare: Callable[[int], bool] = lambda _pid: False) -> list[int]:
    """Kill everything that has the mark ``name=value``, except what *spare* returns True for; return the pids once they have ended.

    Once there was something, two scans in a row must find nothing: a process that forks and exits in the middle of a scan hides its child.
    A process loses its environment before its files and sockets, so the end of the killed ones is waited for separately.
    """
    killed: dict[int, int | None] = {}
    until, quiet = time.monotonic() + seconds, 0
    while quiet < (2 if killed else 1) and time.monotonic() < until:
        quiet += 1
        for pid in marked(name, value):
            if not spare(pid):
                killed[pid] = started_at(pid)
                kill(pid, signal.SIGKILL)  # at once, before it can fork again
                quiet = 0
        if any(is_alive(pid, started) for pid, started in killed.items()):
            quiet = 0
        if killed and not quiet:
            time.sleep(0.002)
    return sorted(killed)


def end_children(*, spare: int | None = None, seconds: float | None = None) -> bool:
    """Kill the children of this process, except *spare*, until none is left: orphans may become its children. Return whether all ended."""
    until = None if seconds is None else time.monotonic() + seconds
    pause, quiet = 0.001, 0
    while until is None or time.monotonic() < until:
        remaining = [pid for pid in children_of(os.getpid()) if pid != spare]
        for pid in remaining:
            kill(pid, signal.SIGKILL)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        quiet = 0 if remaining or ended else quiet + 1
        if quiet > 1:
            return True
        if not ended:  # one may hang in the kernel for long
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)
    return False
