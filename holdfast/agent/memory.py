"""Whether memory ran out when a worker was killed: the kernel's log says which process, the cgroup's counter that one was."""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path

_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory|oom_reaper|OOM).*?[Kk]ill(?:ed)? process (\d+)")


class OutOfMemory:
    """Follows the kernel log and the agent's cgroup; says what it could not read."""

    def __init__(self, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self.blind: str | None = None
        self._lines: deque[tuple[int, str]] = deque(maxlen=256)
        self._counter = _cgroup_counter()
        self._seen = self._count()
        try:
            self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with suppress(OSError):  # a plain file stands in where the kernel log cannot be had
                os.lseek(self._log, 0, os.SEEK_END)
        except OSError as error:
            self._log = -1
            if self._counter is None:
                self.blind = f"{kernel_log}: {error.strerror}, and no cgroup counter"

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
                record = os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # the ring overtook us: the next read goes on with the oldest record left
            except OSError:
                return
            if not record:
                return
            found = _KILLED.search(record)
            if found:
                self._lines.append((int(found[1]), record.partition(";")[2].splitlines()[0].strip()))

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
            self._seen = count
            return f"the cgroup's oom_kill counter rose to {count} ({self._counter})"
        return None


def _cgroup_counter() -> Path | None:
    """Return the file that counts OOM kills of this process's memory cgroup, version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            for base in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                for name in ("memory.events", "memory.oom_control"):
                    candidate = Path(base + path) / name
                    with suppress(OSError):
                        if "oom_kill " in candidate.read_text():
                            return candidate
    return None
