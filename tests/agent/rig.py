"""A real agent in a folder of its own, a controller's end of its socket, and scripts for its workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from holdfast.host.process import NODE_MARK, children_of, mark_of, marked, sweep
from holdfast.memstore import store_folders
from holdfast.protocol import PROTOCOL, LineBuffer, Message, connect, encode
from tests.waiting import wait_until

KEPT: Final = ("HOLDFAST_MEMSTORE_ROOT", "HOLDFAST_KERNEL_LOG")

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 60.0

CLIENT: Final = """
import json, os, signal, socket, subprocess, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.connect(os.environ["HOLDFAST_SOCKET"])
incoming = sock.makefile()
def say(**message):
    sock.sendall(json.dumps(message).encode() + b"\\n")
def hello():
    say(t="hello", protocol=1, rank=int(os.environ["RANK"]), generation=int(os.environ["HOLDFAST_GENERATION"]))
def ask(**message):
    say(t="commit-request", id=1, **message)
    return json.loads(incoming.readline())
"""
"""The start of a test's script that exchanges messages with its agent as the runtime does, without importing it."""


class Flow:
    """A controller's connection to an agent: commands out, answers and events in."""

    def __init__(self, path: Path, *, epoch: int = 1, job: str | None = "job") -> None:
        self.epoch, self.job = epoch, job
        self.socket = connect(path, seconds=SECONDS)
        self.events: list[Message] = []
        self.heartbeats: list[Message] = []
        self.answers: dict[Any, Message] = {}
        self.gone = False
        self._lines, self._number = LineBuffer(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def order(self, verb: str, **facts: Any) -> Message:
        """Send a command and return the answer."""
        self._number += 1
        number = self._number
        self.raw(encode({"id": number, "do": verb, "epoch": self.epoch, "job": self.job, **facts}))
        self.until(lambda: number in self.answers or self.gone, f"the answer to {verb}")
        return self.answers[number]

    def ok(self, verb: str, **facts: Any) -> Message:
        """Send a command that has to be carried out."""
        answer = self.order(verb, **facts)
        assert answer["ok"], answer
        return answer

    def attach(self, since: int = 2**62) -> Self:
        """Attach, so that events are sent."""
        self.ok("attach", since=since, protocol=PROTOCOL)
        return self

    def until(self, predicate: Callable[[], Any], what: str = "") -> Any:
        """Take in what comes until *predicate* is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := predicate()):
            left = deadline - time.monotonic()
            assert left > 0, self._story(what)
            assert not self.gone, self._story(what)
            self.receive(left)
        return found

    def _story(self, what: str) -> str:
        return f"waited for {what}; events: {json.dumps(self.events[-30:], indent=1)[-6000:]}, answers: {self.answers}"

    def receive(self, seconds: float) -> None:
        """Take in what comes within *seconds*."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(1 << 18)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.gone = not data
        for message in self._lines.feed(data):
            if "event" not in message:
                self.answers[message["re"]] = message
            else:
                (self.heartbeats if message["event"] == "heartbeats" else self.events).append(message)

    def wait(self, event: str, **facts: Any) -> Message:
        """Wait for an event with these facts."""

        def found() -> Message | None:
            matching = (one for one in self.events if one["event"] == event and all(one.get(name) == fact for name, fact in facts.items()))
            return next(matching, None)

        return dict(self.until(found, f"{event} {facts}"))

    def prepare(self, node: Node, argv: Iterable[str], **how: Any) -> Message:
        """Prepare a job whose workers run *argv*."""
        plan = {
            "lease": 300.0,
            "warm": False,
            "watch": False,
            "python": sys.executable,
            "preload": [],
            "argv": [str(word) for word in argv],
            "directory": str(node.work),
            "environment": {"PYTHONUNBUFFERED": "1"},
            "log_directory": str(node.logs),
        }
        return self.ok("prepare", **{**plan, **how})

    def start(self, generation: int, ranks: Iterable[int] = (0,), **environment: str) -> Message:
        """Start workers."""
        places = {"HOLDFAST_GENERATION": str(generation), **environment}
        workers = [{"rank": rank, "environment": {"RANK": str(rank), **places}} for rank in ranks]
        return self.ok("start", generation=generation, membership={"node": list(ranks)}, workers=workers)

    def stop(self, generation: int, number: int = signal.SIGKILL, grace: float = 0.0) -> None:
        """Stop workers and wait until all have exited."""
        self.ok("stop", generation=generation, signal=int(number), grace=grace)
        self.wait("workers.exited", generation=generation)

    def pid(self, rank: int = 0, *, generation: int = 1) -> int:
        """Return the pid of a worker once it is started."""
        return int(self.wait("worker.started", rank=rank, generation=generation)["pid"])

    def exited(self, rank: int = 0, *, generation: int = 1) -> Message:
        """Wait for the end of a worker."""
        return self.wait("worker.exited", rank=rank, generation=generation)


class Node:
    """A folder with a real agent."""

    def __init__(self, base: Path, name: str = "node") -> None:
        self.folder, self.work = base / name, base / "work"
        self.logs = base / "logs"
        self.work.mkdir(parents=True, exist_ok=True)
        self.log = base / f"{name}.log"
        self.subreaper: subprocess.Popen[bytes] | None = None
        self.said: Message = {}

    def begin(self, *arguments: str, through: tuple[str, ...] = (), **environment: str) -> Self:
        """Start the agent; its subreaper is our child. Its first message is kept."""
        ours, theirs = socket.socketpair()
        command = [*through, sys.executable, "-m", "holdfast.agent", "--directory", str(self.folder), "--node", "node", *arguments]
        bare = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_") or name in KEPT}
        with ours, self.log.open("ab") as log:
            with theirs:
                self.subreaper = subprocess.Popen(
                    [*command, "--ready-fd", str(theirs.fileno())],
                    env={**bare, "PYTHONPATH": str(ROOT), NODE_MARK: mark_of(self.folder), **environment},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                )
            ours.settimeout(SECONDS)
            line = ours.makefile().readline()
        self.said = json.loads(line) if line else {}
        return self

    @property
    def agent(self) -> int:
        """Return the agent's pid."""
        return int(self.said["pid"])

    @property
    def sentinel(self) -> int:
        """Return the pid of the subreaper's other child."""
        assert self.subreaper is not None
        return wait_until(lambda: [pid for pid in children_of(self.subreaper_pid) if pid != self.agent], seconds=SECONDS)[0]

    @property
    def subreaper_pid(self) -> int:
        """Return the subreaper's pid."""
        assert self.subreaper is not None
        return self.subreaper.pid

    def flow(self, *, epoch: int = 1, job: str | None = "job") -> Flow:
        """Connect as a controller does."""
        return Flow(self.folder / "agent.sock", epoch=epoch, job=job)

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script for a worker."""
        path = self.work / name
        path.write_text(text)
        return str(path)

    def output(self, rank: int = 0) -> str:
        """Return a rank's log."""
        return (self.logs / f"rank-{rank}.log").read_text(errors="replace")

    def remains(self) -> list[int]:
        """Return everything of this node that still runs."""
        return list(marked(NODE_MARK, mark_of(self.folder)))

    def wait_until_empty(self) -> None:
        """Wait until nothing of this node runs any more, without killing anything."""
        wait_until(lambda: not self.remains(), seconds=SECONDS, explain=lambda: f"left: {self.remains()}\n{self.log.read_text()}")

    def memstores(self) -> list[Path]:
        """Return the memory stores that this node has."""
        return store_folders.memstores_of(mark_of(self.folder))

    def ended(self) -> int:
        """Return the subreaper's exit status once it has ended."""
        assert self.subreaper is not None
        return self.subreaper.wait(SECONDS)

    def end(self) -> None:
        """Leave nothing behind."""
        sweep(NODE_MARK, mark_of(self.folder))
        if self.subreaper is not None:
            self.subreaper.kill()
            self.subreaper.wait()
        for place in self.memstores():
            store_folders.wipe(place)
