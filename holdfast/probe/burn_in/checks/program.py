"""The program on a node: it takes one command a line, runs each in a child, and sends the results line by line.

It runs at a low priority, so that it uses what a job leaves over. Each command has its own child and process group: one that hangs (a disk,
a driver) does not affect the others. When the connection ends, all of them end.
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

from holdfast.detectors.codec import packed
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.probe.burn_in.checks import clock, compute, disk, matrix, memory, traffic
from holdfast.probe.burn_in.checks.core_pool import CoreEnded

CHUNK: Final = 1 << 16

Send = Callable[[Any], None]
Command = Mapping[str, Any]

COMMANDS: Final[Mapping[str, Callable[[Command, Send], Check | list[Check]]]] = {
    "compute": lambda asked, _: compute.compute(asked["seconds"]),
    "memory": lambda asked, _: memory.memory(asked["seconds"], asked["share"], asked["most"]),
    "disk": lambda asked, _: disk.disk(asked["folder"], asked["size"], seconds=asked["seconds"]),
    "ticking": lambda asked, _: clock.ticking(asked["seconds"]),
    "matrix": lambda asked, _: matrix.matrix(asked["seconds"]),
    "gpu": lambda asked, _: matrix.gpu(asked["seconds"], asked["share"], asked["expected"]),
    "serve": lambda asked, send: traffic.serve(
        asked["token"], asked["blocks"], asked["seconds"], asked["port"], lambda port: send({"port": port})
    ),
    "send": lambda asked, _: traffic.send(asked["token"], asked["blocks"], asked["seconds"], asked["host"], asked["port"]),
}


@dataclass(slots=True)
class CheckProcess:
    """A child that runs one command, and what it has written so far."""

    name: str
    mark: str
    pid: int
    pipe: int
    output: bytearray = field(default_factory=bytearray)
    last: str = ""


def main(arguments: list[str]) -> None:
    """Run commands until the input ends, at a priority that is lower by the only one of *arguments*."""
    os.nice(int(arguments[0]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _print("ready", {"pid": os.getpid(), "cores": len(os.sched_getaffinity(0))})
    received, children = bytearray(), dict[int, CheckProcess]()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        try:
            while True:
                for key, _events in selector.select():
                    if key.fd in children:
                        _forward(selector, children, key.fd)
                    elif not (data := os.read(0, CHUNK)):
                        return
                    else:
                        received += data
                        _start_commands(received, selector, children)
        finally:
            for child in children.values():
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)


def _start_commands(received: bytearray, selector: selectors.BaseSelector, children: dict[int, CheckProcess]) -> None:
    """Start the commands in complete lines."""
    while (end := received.find(b"\n")) >= 0:
        asked = json.loads(received[:end])
        del received[: end + 1]
        if asked["do"] == "time":  # answered at once: the round trip limits its precision
            _print(asked["mark"], {"time": time.time()})
            continue
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                os.close(ours)
                _run(asked, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        with suppress(OSError):  # parent and child both do it: whichever comes first
            os.setpgid(pid, pid)
        children[ours] = CheckProcess(name=asked["do"], mark=asked["mark"], pid=pid, pipe=ours)
        selector.register(ours, selectors.EVENT_READ)


def _run(asked: Command, pipe: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    signal.alarm(int(asked["limit"]) + 1)
    with os.fdopen(pipe, "w", encoding="utf-8") as out:

        def send(value: Any) -> None:  # noqa: ANN401 (any JSON)
            out.write(json.dumps(value) + "\n")
            out.flush()

        try:
            done = COMMANDS[asked["do"]](asked, send)
        except Exception as error:  # noqa: BLE001 (an unexpected error says nothing about the node)
            done = Check(name=asked["do"], mark=CheckMark.SKIPPED, words=f"{type(error).__name__}: {error}")
        send([packed(one) for one in (done if isinstance(done, list) else [done])])


def _forward(selector: selectors.BaseSelector, children: dict[int, CheckProcess], pipe: int) -> None:
    """Send on what a child writes; report when it ended without its list of checks."""
    child, data = children[pipe], os.read(pipe, CHUNK)
    child.output += data
    while (end := child.output.find(b"\n")) >= 0:
        child.last = child.output[:end].decode()
        del child.output[: end + 1]
        _print(child.mark, json.loads(child.last))
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
        mark = CheckMark.FAILED if ended.is_fault else CheckMark.SKIPPED
        words = "it did not end in time" if -ended.status == signal.SIGALRM else f"its process {ended}"
        _print(child.mark, [packed(Check(name=child.name, mark=mark, words=words))])


def _print(mark: str, value: Any) -> None:  # noqa: ANN401 (any JSON)
    sys.stdout.write(f"{mark} {json.dumps(value)}\n")
    sys.stdout.flush()
