"""Probe this node within a deadline. A child process reads each source: one that hangs does not affect the others.

A read from a dead server or a wedged driver cannot be ended, not even by SIGKILL. So nothing waits for such a child: it ends when the
kernel lets it, and what it was to read is `Unknown`. The caller must be a process without threads, as the program of `local` is.
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

from holdfast.detectors.codec import packed
from holdfast.detectors.evidence import Unknown
from holdfast.probe.readers import dcgm, files, gpus, host, kernel, kubernetes, network, services, storage

SOURCES: Final[Mapping[str, Callable[[Path], Any]]] = {
    "gpus": gpus.read_gpus,
    "kernel": kernel.read_kernel,
    "network": network.read_network,
    "host": host.read_host,
    "clock": lambda _root: host.read_clock(),
    "services": services.read_services,
    "processes": services.read_processes,
    "kubernetes": kubernetes.read_kubernetes,
    "dcgm": dcgm.read_dcgm,
}
"""The reader of each part of a `NodeReading`; storage is read mount by mount."""
OVERTIME: Final = 30
"""Seconds after the deadline of a probe at which this process ends, whatever hangs."""
END_SECONDS: Final = 0.1
"""How long a child that has answered may take to end; after that it is reaped with a later one."""
UNREAPED: Final[set[int]] = set()
"""Children that have not ended: a driver or a dead server may hold them."""


@dataclass(slots=True)
class ReaderProcess:
    """A child that reads one source, and what it has written so far."""

    name: str
    pid: int
    pipe: int
    output: bytearray = field(default_factory=bytearray)
    ended: bool = False


def look(node: str, root: Path, seconds: float) -> dict[str, Any]:
    """Return a `NodeReading` of this node as JSON values, within *seconds*."""
    until = time.monotonic() + seconds
    mounts = storage.mounted(root)
    jobs: dict[str, Callable[[], Any]] = {name: partial(reader, root) for name, reader in SOURCES.items()}
    jobs["disks"] = partial(storage.read_disks, root)
    known = () if isinstance(mounts, Unknown) else mounts
    jobs |= {f"mount {number}": partial(storage.with_space, mount, root) for number, mount in enumerate(known)}
    found = run_in_children(jobs, until, f"no answer within {seconds:g} s")
    filled = []
    for number, mount in enumerate(known):
        answer = found.pop(f"mount {number}")
        filled.append(packed(storage.without_space(mount, answer["blind"])) if set(answer) == {"blind"} else answer)
    part = {"mounts": packed(mounts) if isinstance(mounts, Unknown) else filled, "disks": found.pop("disks")}
    return {"node": node, "at": time.time(), **found, "storage": part}


def run_in_children(jobs: Mapping[str, Callable[[], Any]], until: float, late: str) -> dict[str, Any]:
    """Run each of *jobs* in a child; return their answers as JSON values; one later than *until* (monotonic) is `Unknown`: *late*.

    An answer that has arrived is not late, however late this process, as one that was stopped, looks for it.
    """
    children = [_start(name, job) for name, job in jobs.items()]
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while selector.get_map():
            left = until - time.monotonic()
            ready = selector.select(max(0.0, left))
            if left <= 0 and not ready:
                break
            for key, _events in ready:
                child = key.data
                data = os.read(child.pipe, 1 << 16)
                child.output += data
                if not data:
                    child.ended = True
                    selector.unregister(child.pipe)
    return {child.name: _answer(child, late) for child in children}


def _answer(child: ReaderProcess, late: str) -> Any:  # noqa: ANN401 (JSON)
    """Return what *child* sent, and end it."""
    os.close(child.pipe)
    if not child.ended:
        os.kill(child.pid, signal.SIGKILL)
    _reap(child.pid, wait=child.ended)
    try:
        return json.loads(child.output) if child.ended else packed(Unknown(late))
    except ValueError:
        return packed(Unknown("its reader exited without an answer"))


def _reap(pid: int, *, wait: bool) -> None:
    """Reap a child and those from before; *wait* a moment for one that has closed its pipe: it exits some time after that."""
    UNREAPED.add(pid)
    until = time.monotonic() + END_SECONDS * wait
    while True:
        UNREAPED.difference_update([one for one in UNREAPED if os.waitpid(one, os.WNOHANG) != (0, 0)])
        if pid not in UNREAPED or time.monotonic() >= until:
            return
        time.sleep(0.001)


def _start(name: str, job: Callable[[], Any]) -> ReaderProcess:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _run(theirs, job)
        finally:
            os._exit(0)
    os.close(theirs)
    return ReaderProcess(name=name, pid=pid, pipe=ours)


def _run(pipe: int, job: Callable[[], Any]) -> None:
    """Read in the child. It keeps none of the caller's outputs open: who waits for their end must not wait for a child that hangs."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    try:
        answer = packed(job())
    except OSError as error:
        answer = packed(files.unknown(Path(str(error.filename or "reading")), error))
    except Exception as error:  # noqa: BLE001 (a node may have what no reader expects; the other parts are still read)
        answer = packed(Unknown(f"{type(error).__name__}: {error}"))
    with open(pipe, "wb") as out:
        out.write(json.dumps(answer).encode())


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reading, as `look` does; whatever hangs, this process ends some time after the deadline."""
    signal.alarm(int(asked["seconds"]) + OVERTIME)
    return look(asked["node"], Path(asked.get("root", "/")), float(asked["seconds"]))
