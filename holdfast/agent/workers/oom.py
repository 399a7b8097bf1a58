"""Find out whether the kernel killed a worker for want of memory: from its log, or else from the cgroup's counter."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.agent.monitor.kernel_log import KernelLogFollower
    from holdfast.detectors.nodes.readings import KernelLine

INITIAL_PIDS: Final = "pid:[4026531836]"
"""The pid namespace whose numbers are in the kernel's log (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory|oom_reaper|OOM).*?[Kk]ill(?:ed)? process (\d+)")


class OomDetector:
    """Reads the kernel's log and the counter of the agent's cgroup for kills; *blind* says why neither can be read."""

    def __init__(self, kernel_log: KernelLogFollower) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=256)
        self._log = kernel_log
        kernel_log.subscribe(self._take)
        has_our_pids = kernel_log.blind is None and _log_has_our_pids()
        self._counter = None if has_our_pids else _cgroup_counter()  # it counts other processes' kills too; the log has the pid
        self._seen = self._count()
        why = kernel_log.blind or f"{kernel_log.path} has the pids of another namespace"
        self.blind = None if has_our_pids or self._counter else f"{why}, and no cgroup counter"

    def _count(self) -> int:
        if self._counter is None:
            return 0
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", self._counter.read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
        return 0

    def _take(self, line: KernelLine) -> None:
        found = _KILLED.search(line.text)
        if found:
            self._lines.append((int(found[1]), line.text))

    def _read(self) -> None:
        with suppress(OSError):  # the log's follower reports that it cannot be read
            self._log.read()

    def reset(self) -> None:
        """Forget earlier kills before workers start: a pid may be used again."""
        self._read()
        self._lines.clear()
        self._seen = self._count()

    def killed(self, pid: int) -> str | None:
        """Return the evidence that the kernel killed *pid* for want of memory, if there is any."""
        self._read()
        for found, line in self._lines:
            if found == pid:
                return line
        count = self._count()
        if count > self._seen:
            self._seen += 1
            return f"the cgroup's oom_kill counter rose to {count} ({self._counter})"
        return None


def _log_has_our_pids() -> bool:
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
