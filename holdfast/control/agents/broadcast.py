"""One order to many agents: sent to all, then waited for together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

from holdfast.control.agents.client import AgentClient
from holdfast.errors import AgentDisconnected, WorldError
from holdfast.protocol import Message

LOOK: Final = 0.5
"""Seconds between two looks at whose connections have been lost for so long that nobody waits for them."""


class Broadcast:
    """The answers to one order. The thread that waits is woken once, by the last of them."""

    def __init__(self, verb: str, seconds: float, count: int) -> None:
        self._verb, self._seconds, self._until = verb, seconds, time.monotonic() + seconds
        self._answers: dict[str, Message | WorldError] = {}
        self._missing = count
        self._sent: dict[str, tuple[AgentClient, int]] = {}
        self._lock, self._all = threading.Lock(), threading.Event()
        if not count:
            self._all.set()

    def send(self, client: AgentClient, facts: Mapping[str, object]) -> None:
        """Give the order to one agent; what comes of it is an answer in any case."""
        try:
            number = client.send(self._verb, lambda answer: self._take(client, answer), **facts)
        except WorldError as error:
            self.fail(client.node, error)
        else:
            self._sent[client.node] = client, number

    def fail(self, node: str, error: WorldError) -> None:
        """Take an error for the answer of *node*."""
        self._note(node, error)

    def _take(self, client: AgentClient, answer: Message) -> None:
        try:
            self._note(client.node, client.judged(self._verb, answer))
        except WorldError as error:
            self._note(client.node, error)

    def _note(self, node: str, answer: Message | WorldError) -> None:
        with self._lock:
            if node not in self._answers:
                self._answers[node] = answer
                self._missing -= 1
                if not self._missing:
                    self._all.set()

    def wait(self, nodes: Iterable[str]) -> dict[str, Message | WorldError]:
        """Return what each of *nodes* answered, or why it did not, in their order."""
        while not self._all.wait(max(0.0, min(LOOK, self._until - time.monotonic()))) and time.monotonic() < self._until:
            for client, _ in [one for one in self._sent.values() if one[0].away]:
                self.fail(client.node, client.silence(self._verb, self._seconds))
        for client, number in list(self._sent.values()):
            client.forget(number)
        with self._lock:
            return {node: self._answers[node] if node in self._answers else self._silence(node) for node in nodes}

    def _silence(self, node: str) -> AgentDisconnected:
        """Return the error of one that did not answer, or that could not even be given the order in time."""
        if node in self._sent:
            return self._sent[node][0].silence(self._verb, self._seconds)
        return AgentDisconnected(node, f"the order '{self._verb}' could not be sent within {self._seconds:.0f} s")
