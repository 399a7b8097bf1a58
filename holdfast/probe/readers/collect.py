"""One look at this node within a deadline. Each source is read by a child of its own: one that hangs leaves the others seen.

A read of a dead server or a wedged driver cannot be ended, not even by SIGKILL. So nobody waits for such a child: it ends when the kernel
lets go of it, and what it was to read is `Unknown`. The caller must be a process without threads, as the program of `bundle` is.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from detectors.codec import packed
from detectors.evidence import Unknown
from detectors.readings import Mount
from holdfast.probe.readers import clock, files, gpus, host, kernel, network, processes, services, storage

Reader = Callable[[Path], Any]

SOURCES: Final[Mapping[str, Reader]] = {
    "gpus": gpus.read_gpus,
    "kernel": kernel.read_kernel,
    "network": network.read_network,
    "host": host.read_host,
    "clock": lambda _root: clock.read_clock(),
    "services": services.read_services,
    "processes": processes.read_processes,
}
"""Which reader fills which part of a `NodeReading`; storage is read mount by mount."""

OVERTIME: Final = 30
"""Seconds beyond a look's own deadline after which this process ends."""
END_SECONDS: Final = 0.1
"""How long a child that has answered may take to end; after that it is reaped with a later one."""
LEFT: Final[set[int]] = set()
"""Children that have not ended: a driver or a dead server may hold them."""


@dataclass(slots=True)
class ReaderProcess:
    """A child that reads one source, and what it has written so far."""

    name: str
    pid: int
    pipe: int
    told: bytearray = field(default_factory=bytearray)
    ended: bool = False


def look(node: str, root: Path, seconds: float) -> dict[str, Any]:
    """Return a `NodeReading` of this node as JSON can hold it, within *seconds*."""
    until = time.monotonic() + seconds
    mounts = storage.mounted(root)
    jobs: dict[str, Callable[[], Any]] = {name: partial(reader, root) for name, reader in SOURCES.items()}
    jobs["disks"] = partial(storage.read_disks, root)
    targets = () if isinstance(mounts, Unknown) else mounts
    jobs |= {f"mount {number}": partial(storage.filled, mount, root) for number, mount in enumerate(targets)}
    found = gathered(jobs, until, f"no answer within {seconds:g} s")
    filled = [_mount(found.pop(f"mount {number}"), mount) for number, mount in enumerate(targets)]
    disks = found.pop("disks")
    told = {"mounts": packed(mounts) if isinstance(mounts, Unknown) else filled, "disks": disks}
    return {"node": node, "at": time.time(), **found, "storage": told}


def _mount(answer: Any, mount: Mount) -> Any:  # noqa: ANN401 (JSON)
    """Return what was found of a mount; what it is stays known when nothing was."""
    return packed(storage.emptied(mount, answer["blind"])) if set(answer) == {"blind"} else answer


def gathered(jobs: Mapping[str, Callable[[], Any]], until: float, late: str) -> dict[str, Any]:
    """Run each of *jobs* in a child and return their answers packed for JSON; those not there at *until* (monotonic) are blind: *late*."""
    children = [_started(name, job) for name, job in jobs.items()]
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _events in selector.select(left):
                _read(selector, key.data)
    return {child.name: _answer(child, late) for child in children}


def _read(selector: selectors.BaseSelector, child: ReaderProcess) -> None:
    data = os.read(child.pipe, 1 << 16)
    child.told += data
    if not data:
        child.ended = True
        selector.unregister(child.pipe)


def _answer(child: ReaderProcess, late: str) -> Any:  # noqa: ANN401 (JSON)
    """Let go of *child* and return what it told."""
    os.close(child.pipe)
    if not child.ended:
        os.kill(child.pid, signal.SIGKILL)
    _reap(child.pid, wait=child.ended)
    try:
        return json.loads(child.told) if child.ended else packed(Unknown(late))
    except ValueError:
        return packed(Unknown("its reader ended without an answer"))


def _reap(pid: int, *, wait: bool) -> None:
    """Reap a child and those left before; *wait* a moment for one that has closed its pipe: its end comes some time after that."""
    LEFT.add(pid)
    until = time.monotonic() + END_SECONDS * wait
    while True:
        LEFT.difference_update([one for one in LEFT if os.waitpid(one, os.WNOHANG) != (0, 0)])
        if pid not in LEFT or time.monotonic() >= until:
            return
        time.sleep(0.001)


def _started(name: str, job: Callable[[], Any]) -> ReaderProcess:
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _tell(its, job)
        finally:
            os._exit(0)
    os.close(its)
    return ReaderProcess(name=name, pid=pid, pipe=ours)


def _tell(pipe: int, job: Callable[[], Any]) -> None:
    """Read in the child. It holds none of the caller's outputs open: who waits for their end must not wait for a child that hangs."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    try:
        answer = packed(job())
    except OSError as error:
        answer = packed(files.blind(Path(str(error.filename or "reading")), error))
    except Exception as error:  # noqa: BLE001 (what a node has that no reader foresaw is not seen; it must not end the look)
        answer = packed(Unknown(f"{type(error).__name__}: {error}"))
    with open(pipe, "wb") as out:
        out.write(json.dumps(answer).encode())


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a look, as `look` does, to who asks for one; whatever hangs, this process ends some time after the look's own deadline."""
    signal.alarm(int(asked["seconds"]) + OVERTIME)
    return look(asked["node"], Path(asked.get("root", "/")), float(asked["seconds"]))
