"""What runs on a node: it takes one order a line, has a child carry it out, and tells what comes of it, line by line.

It runs at a low priority, so that it takes what a job leaves over. Each order has a child, and a group of processes, of its own: one
that hangs (a disk, a driver) leaves the others. When who asked goes away, all of them end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.burn_in_results import Check, CheckMark
from detectors.codec import packed
from holdfast.probe.burn_in.checks import clock, compute, disk, matrix, memory, traffic
from holdfast.probe.burn_in.checks.core_pool import CoreEnded

LINE: Final = 1 << 16

Tell = Callable[[Any], None]
Order = Mapping[str, Any]


def _serve(order: Order, tell: Tell) -> Check:
    told = lambda port: tell({"port": port})  # noqa: E731
    return traffic.serve(order["token"], order["blocks"], order["seconds"], order["port"], told)


ORDERS: Final[Mapping[str, Callable[[Order, Tell], Check | list[Check]]]] = {
    "compute": lambda order, _: compute.compute(order["seconds"]),
    "memory": lambda order, _: memory.memory(order["seconds"], order["share"], order["most"]),
    "disk": lambda order, _: disk.disk(order["folder"], order["size"], seconds=order["seconds"]),
    "ticking": lambda order, _: clock.ticking(order["seconds"]),
    "matrix": lambda order, _: matrix.matrix(order["seconds"]),
    "gpu": lambda order, _: matrix.gpu(order["seconds"], order["share"], order["expected"]),
    "serve": _serve,
    "send": lambda order, _: traffic.send(order["token"], order["blocks"], order["seconds"], order["host"], order["port"]),
}


@dataclass(slots=True)
class CheckProcess:
    """A child that carries out one order, and what it has written so far."""

    name: str
    mark: str
    pid: int
    pipe: int
    told: bytearray = field(default_factory=bytearray)
    last: str = ""


def main(arguments: list[str]) -> None:
    """Carry out orders until who gives them goes away, at a priority that is lower by the only one of *arguments*."""
    os.nice(int(arguments[0]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _say("ready", {"pid": os.getpid(), "cores": len(os.sched_getaffinity(0))})
    heard, children = bytearray(), dict[int, CheckProcess]()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        try:
            while True:
                for key, _events in selector.select():
                    if key.fd in children:
                        _hear(selector, children, key.fd)
                    elif not (data := os.read(0, LINE)):
                        return
                    else:
                        heard += data
                        _take(heard, selector, children)
        finally:
            for child in children.values():
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)


def _take(heard: bytearray, selector: selectors.BaseSelector, children: dict[int, CheckProcess]) -> None:
    """Begin what whole lines order."""
    while (end := heard.find(b"\n")) >= 0:
        order = json.loads(heard[:end])
        del heard[: end + 1]
        if order["do"] == "time":  # answered at once, as the way there and back is what limits it
            _say(order["mark"], {"time": time.time()})
            continue
        child = _begin(order)
        children[child.pipe] = child
        selector.register(child.pipe, selectors.EVENT_READ)


def _begin(order: Order) -> CheckProcess:
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            os.close(ours)
            _carry_out(order, its)
        finally:
            os._exit(0)
    os.close(its)
    with suppress(OSError):  # both do it, as neither knows who comes first
        os.setpgid(pid, pid)
    return CheckProcess(name=order["do"], mark=order["mark"], pid=pid, pipe=ours)


def _carry_out(order: Order, pipe: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    signal.alarm(int(order["limit"]) + 1)
    with os.fdopen(pipe, "w", encoding="utf-8") as out:

        def tell(what: Any) -> None:  # noqa: ANN401 (anything that JSON holds)
            out.write(json.dumps(what) + "\n")
            out.flush()

        try:
            done = ORDERS[order["do"]](order, tell)
        except Exception as error:  # noqa: BLE001 (what nobody foresaw says nothing of the node)
            done = Check(name=order["do"], mark=CheckMark.SKIPPED, words=f"{type(error).__name__}: {error}")
        tell([packed(one) for one in (done if isinstance(done, list) else [done])])


def _hear(selector: selectors.BaseSelector, children: dict[int, CheckProcess], pipe: int) -> None:
    """Hand on what a child says; say so when it ended without its last word."""
    child, data = children[pipe], os.read(pipe, LINE)
    child.told += data
    while (end := child.told.find(b"\n")) >= 0:
        child.last = child.told[:end].decode()
        del child.told[: end + 1]
        _say(child.mark, json.loads(child.last))
    if data:
        return
    selector.unregister(pipe)
    os.close(pipe)
    del children[pipe]
    _, status = os.waitpid(child.pid, 0)
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # what it had started
    if not child.last.startswith("["):
        ended = CoreEnded(os.waitstatus_to_exitcode(status))
        late = -ended.status == signal.SIGALRM
        mark = CheckMark.FAILED if ended.is_fault else CheckMark.SKIPPED
        words = "it did not end in time" if late else f"its process {ended}"
        _say(child.mark, [packed(Check(name=child.name, mark=mark, words=words))])


def _say(mark: str, what: Any) -> None:  # noqa: ANN401 (anything that JSON holds)
    sys.stdout.write(f"{mark} {json.dumps(what)}\n")
    sys.stdout.flush()
