"""The flow's end of a connection to one agent: orders out, answers and events in."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.errors import AgentGone, OrderRefused
from holdfast.log import note
from holdfast.wire import PROTOCOL, BadLine, LineBuffer, Message, encode

log = logging.getLogger("holdfast.control")

LATEST: Final = 2**62
"""A sequence number that no event has yet."""

Inbox = queue.SimpleQueue[tuple[str, Message]]


class AgentChannel:
    """One agent. Its events go to *inbox* with the node's name; the end of the connection is an event too."""

    def __init__(self, node: str, connect: Callable[[], socket.socket], inbox: Inbox, *, epoch: int, job: str | None = None) -> None:
        self.node, self.epoch, self.job = node, epoch, job
        self.heard = time.monotonic()
        self.gone: str | None = None
        self.gone_at: float | None = None
        self._inbox = inbox
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._quiet = False
        try:
            self._socket = connect()
        except OSError as error:
            raise AgentGone(node, str(error)) from error
        self._socket.settimeout(None)
        threading.Thread(target=self._listen, name=f"agent-{node}", daemon=True).start()

    def about(self) -> Message:
        """Return what the agent says of itself: its job, generation, membership and workers."""
        return self.order("about", protocol=PROTOCOL)

    def attach(self, *, since: int = LATEST) -> None:
        """Have the agent tell its events from now on, those after *since* first; return when the first ones are in the inbox."""
        self.order("attach", since=since, protocol=PROTOCOL)
        self.order("ping")  # answered after the events of the past: one stream keeps its order

    def order(self, verb: str, *, seconds: float = 10.0, **facts: object) -> Message:
        """Give an order and wait for its answer; raise `OrderRefused` when it is no, `AgentGone` when none comes."""
        number = self.send(verb, **facts)
        try:
            answer = self._answers[number].get(timeout=seconds)
        except queue.Empty:
            raise AgentGone(self.node, f"no answer to '{verb}' within {seconds:.0f} s") from None
        finally:
            self._answers.pop(number, None)
        if answer.get("event") == "agent.gone":
            raise AgentGone(self.node, answer["why"])
        if not answer["ok"]:
            raise OrderRefused(self.node, verb, answer["why"])
        return answer

    def send(self, verb: str, **facts: object) -> int:
        """Give an order without waiting; return its number, under which `settle` finds the answer."""
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = queue.SimpleQueue()
            if self.gone:
                raise AgentGone(self.node, self.gone)
            try:
                self._socket.sendall(encode({"id": number, "do": verb, "epoch": self.epoch, "job": self.job, **facts}))
            except OSError as error:
                raise AgentGone(self.node, str(error)) from error
        return number

    def ping(self) -> None:
        """Show the agent that somebody is here; its answer shows the same of the agent."""
        with suppress(AgentGone):
            number = self.send("ping")
            self._answers.pop(number, None)

    def close(self) -> None:
        """End the connection without calling that a fault."""
        self._quiet = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        lines = LineBuffer()
        why = "its connection ended"
        try:
            while data := self._socket.recv(262144):
                self.heard = time.monotonic()
                for message in lines.feed(data):
                    self._take(message)
        except (OSError, BadLine) as error:
            why = f"its connection ended ({error})"
        self.gone_at, self.gone = time.time(), why
        message = {"event": "agent.gone", "why": why, "at": self.gone_at}
        for waiting in list(self._answers.values()):
            waiting.put(message)
        if not self._quiet:
            note(log, "agent.gone", node=self.node, why=why)
            self._inbox.put((self.node, message))

    def _take(self, message: Message) -> None:
        if "event" in message:
            self._inbox.put((self.node, message))
            return
        waiting = self._answers.get(message.get("re", -1))
        if waiting is not None:
            waiting.put(message)
