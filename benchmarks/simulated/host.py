"""The process that plays all agents: one thread, one selector.

    python -m benchmarks.simulated.host FOLDER COUNT

Agents are reached by the one socket in FOLDER: the first line of a connection names the node (as for a jump host), everything
after it is the agent's own protocol. A line that names none is about the machine room: which nodes there are, which lose power.
"""

from __future__ import annotations

import heapq
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.simulated.agent import Agent, Line
from benchmarks.simulated.training import Training
from holdfast.host.process import die_with_parent
from holdfast.host.rlimits import raise_descriptor_limit
from holdfast.protocol import BadLine, LineBuffer, Message, encode, listen

SOCKET: Final = "nodes.sock"
STEP_SECONDS: Final = 1.0
TICK: Final = 0.02
"""Seconds between two looks at what workers would do by themselves."""


def names(count: int) -> list[str]:
    """Return the names of *count* nodes."""
    return [f"sim-{number:04d}" for number in range(1, count + 1)]


class Host:
    """The machine room."""

    def __init__(self, folder: Path, count: int, step_seconds: float = STEP_SECONDS) -> None:
        self._training = Training(step_seconds)
        self._nodes = names(count)
        self._agents: dict[str, Agent] = {}
        self._off: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._server = listen(folder / SOCKET)
        self._server.listen(socket.SOMAXCONN)
        self._server.setblocking(False)  # noqa: FBT003 (its only argument)
        self._selector.register(self._server, selectors.EVENT_READ, lambda _: self._accept())
        self._beats: list[tuple[float, str]] = []
        self._next, self._heartbeats = 0.0, 0
        self._verbs: dict[str, Callable[[Message], Message]] = {
            "start": self._start,
            "survey": lambda _: {"nodes": {node: self._standing(node) for node in self._nodes}},
            "answers": lambda order: {"answers": order["of"] not in self._off},
            "fence": self._fence,
            "lose": self._lose,
            "on": self._on,
            "kill": self._kill,
            "given": lambda _: {"nodes": {node: [one.generation, one.given] for node, one in self._agents.items()}},
            "cost": lambda _: {**_cost(), "heartbeats": self._heartbeats},
            "step": lambda _: {"step": self._training.step, "steps": self._training.steps, "generation": self._training.generation},
        }

    def serve(self) -> None:
        """Serve until the process is ended."""
        while True:
            until = min(self._next, self._beats[0][0] if self._beats else self._next)
            for key, mask in self._selector.select(max(0.0, until - time.monotonic())):
                key.data(mask)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        if now >= self._next:
            self._next = now + TICK
            self._training.tick(now)
        while self._beats and self._beats[0][0] <= now:
            due, node = heapq.heappop(self._beats)
            agent = self._agents.get(node)
            if agent is not None:
                self._heartbeats += agent.say_beats(now)
                heapq.heappush(self._beats, (max(due + agent.beat, now), node))

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                sock, _ = self._server.accept()
                sock.setblocking(False)  # noqa: FBT003 (its only argument)
                lines = LineBuffer()
                self._selector.register(sock, selectors.EVENT_READ, lambda _, sock=sock, lines=lines: self._first(sock, lines))

    def _first(self, sock: socket.socket, lines: LineBuffer) -> None:
        """Read what a connection is for; one for the machine room may ask any number of things."""
        data = _received(sock)
        if not data:
            self._hang_up(sock)
            return
        for message in lines.feed(data):
            if "node" in message:
                self._connect(sock, str(message["node"]))
                return
            sock.setblocking(True)  # noqa: FBT003 (its only argument)
            sock.sendall(encode(self._verbs[message["do"]](message)))
            sock.setblocking(False)  # noqa: FBT003 (its only argument)

    def _connect(self, sock: socket.socket, node: str) -> None:
        agent = self._agents.get(node)
        if agent is None:
            self._hang_up(sock)
            return
        line = Line(sock, agent, self._watch)
        agent.lines.append(line)
        self._selector.modify(sock, selectors.EVENT_READ, lambda mask: self._receive(line, mask))
        line.send(encode({"ok": True}))

    def _receive(self, line: Line, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            data = _received(line.socket)
            if not data:
                self._part(line)
                return
            try:
                for order in line.lines.feed(data):
                    line.agent.take(line, order)
                    if order["do"] == "end":
                        self._agents.pop(line.agent.node, None)
            except BadLine:
                self._part(line)
                return
        line.drain()
        self._watch(line)

    def _watch(self, line: Line) -> None:
        """Wait for what *line* needs."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        key = self._selector.get_key(line.socket)
        if key.events != events:
            self._selector.modify(line.socket, events, key.data)

    def _part(self, line: Line) -> None:
        if line in line.agent.lines:
            line.agent.lines.remove(line)
            self._hang_up(line.socket)

    def _hang_up(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    # -- the machine room ---------------------------------------------------------------------------------------------

    def _standing(self, node: str) -> list[str | None]:
        agent = self._agents.get(node)
        status = "off" if node in self._off else "idle" if agent is None else "up"
        return [status, agent.job if agent is not None else None]

    def _start(self, order: Message) -> Message:
        node = order["of"]
        if node in self._off:
            return {"ok": False}
        if node not in self._agents:
            agent = self._agents[node] = Agent(node, self._training)
            spread = (hash(node) % 1000) / 1000
            heapq.heappush(self._beats, (time.monotonic() + agent.beat * spread, node))
        return {"ok": True}

    def _fence(self, order: Message) -> Message:
        agent = self._agents.get(order["of"])
        if agent is not None and order.get("job") in {None, agent.job}:
            self._end(order["of"])
        return {"ok": True}

    def _end(self, node: str) -> None:
        agent = self._agents.pop(node, None)
        if agent is not None:
            agent.vanish()
            for line in list(agent.lines):
                self._part(line)

    def _lose(self, order: Message) -> Message:
        """Take power from *nodes*, all at once."""
        at = time.time()
        self._off |= set(order["nodes"])
        for node in order["nodes"]:
            self._end(node)
        return {"at": at}

    def _on(self, order: Message) -> Message:
        self._off -= set(order["nodes"])
        return {"ok": True}

    def _kill(self, order: Message) -> Message:
        at = time.time()
        for node in order["nodes"]:
            self._agents[node].kill(order["rank"])
        return {"at": at}


def _received(sock: socket.socket) -> bytes | None:
    """Return what has come; None when nothing will any more."""
    try:
        return sock.recv(1 << 18) or None
    except OSError:
        return None


def _cost() -> Message:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024}


def main(arguments: list[str]) -> int:
    """Play as many agents as the arguments say."""
    die_with_parent(os.getppid())
    raise_descriptor_limit("a simulation", int(arguments[1]))
    host = Host(Path(arguments[0]), int(arguments[1]))
    print("ready", flush=True)
    host.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
