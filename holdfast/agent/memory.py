"""Whether memory ran out when a worker was killed: the kernel's log says which process, the cgroup's counter that one was."""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

KERNEL_LOG: Final = Path("/dev/kmsg")
INITIAL_PIDS: Final = "pid:[4026531836]"
"""The pid namespace whose numbers the kernel's log speaks of (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory|oom_reaper|OOM).*?[Kk]ill(?:ed)? process (\d+)")


class OutOfMemory:
    """Follows the kernel log and the agent's cgroup; says what it could not read."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=256)
        self._half = ""
        self._log, why = -1, f"{kernel_log} speaks of another pid namespace"
        try:
            self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError as error:
            why = f"{kernel_log}: {error.strerror}"
        ours = self._log >= 0 and _pids_are_the_logs()
        self._counter = None if ours else _cgroup_counter()  # it counts our neighbours' losses too, and the log tells whose each was
        self._seen = self._count()
        self.blind = None if ours or self._counter else f"{why}, and no cgroup counter"

    def _count(self) -> int:
        if self._counter is None:
            return 0
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", self._counter.read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
        return 0

    def _drain(self) -> None:
        while self._log >= 0:
            try:
                text = os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # the ring overtook us: the next read goes on with the oldest record left
            except OSError:
                return
            if not text:
                return
            *lines, self._half = (self._half + text).split("\n")
            for line in lines:
                self._take(line)

    def _take(self, line: str) -> None:
        found = _KILLED.search(line)
        if found:
            head, _, words = line.partition(";")  # a record of /dev/kmsg begins with "6,1234,5678,-;"
            said = words if re.fullmatch(r"[\d,]+[-,\w=]*", head) else line
            self._lines.append((int(found[1]), said.strip()))

    def forget(self) -> None:
        """Start anew before workers start: a pid may be used again."""
        self._drain()
        self._lines.clear()
        self._seen = self._count()

    def killed(self, pid: int) -> str | None:
        """Return the evidence that the kernel killed *pid* for want of memory, if there is any."""
        self._drain()
        for found, line in self._lines:
            if found == pid:
                return line
        count = self._count()
        if count > self._seen:
            self._seen += 1
            return f"the cgroup's oom_kill counter rose to {count} ({self._counter})"
        return None


def _pids_are_the_logs() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == INITIAL_PIDS
    except OSError:
        return False


def _cgroup_counter() -> Path | None:
    """Return the file that counts OOM kills of this process's memory cgroup, version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            for base in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                for name in ("memory.events", "memory.oom_control"):
                    for folder in (Path(base + path), Path(base)):  # a container sees its own cgroup at the mount's root
                        with suppress(OSError):
                            if "oom_kill " in (folder / name).read_text():
                                return folder / name
    return None
