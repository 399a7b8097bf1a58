"""The agent's end of the preemption watcher: a process of its own, as a file or an address may hang."""

from __future__ import annotations

import re
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.schema import FilePath, Seconds, Text
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.agent.workers.subreaper import PASSED_ON
from holdfast.protocol import Message

USED_SIGNALS: Final = frozenset({signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, PASSED_ON})
"""Signals that have a meaning of their own."""


def _free_signals(message: Message, name: str) -> list[int]:
    numbers = schema.numbers(message, name)
    if any(number not in signal.valid_signals() or number in USED_SIGNALS for number in numbers):
        raise schema.BadField(name, "numbers of signals that are free for it", numbers)
    return numbers


def _pattern(message: Message, name: str) -> str:
    pattern = schema.text(message, name)
    try:
        re.compile(pattern)
    except re.error as error:
        raise schema.BadField(name, "a regular expression", pattern) from error
    return pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSettings:
    """Where preemption notices are found."""

    file: FilePath | None
    url: Text | None
    token_url: Text | None
    headers: Annotated[dict[str, str], schema.environment]
    pattern: Annotated[str, _pattern]
    signals: Annotated[list[int], _free_signals]
    interval: Seconds
    """Seconds between two checks."""
    timeout: Seconds
    """Seconds that a request may take."""
    lead_time: Seconds
    """Seconds from the notice to the end of the node."""


class PreemptionClient:
    """Watches for preemption notices while a job runs on the node, and reports each once."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], helpers: set[int]) -> None:
        self._node, self._emit = me.node, emit
        self._plan: PreemptionSettings | None = None
        self._reported = False
        spec = SidecarSpec(
            name="notices",
            command=lambda descriptor: ((sys.executable, "-m", "holdfast.agent.monitor.preemption_watcher", str(descriptor)), ()),
            started=self._send_plan,
            received=self._take,
            given_up=self._given_up,
        )
        self._sidecar = Sidecar(spec, me, selector, helpers)
        self.due, self.tick, self.end = self._sidecar.due, self._sidecar.tick, self._sidecar.end

    def prepare(self, plan: PreemptionSettings | None) -> None:
        """Watch where *plan* says from now on; raise ``OSError`` when the watcher cannot start."""
        before, self._plan = self._plan, plan
        for number in plan.signals if plan is not None else ():
            signal.signal(number, lambda *_: None)  # the agent's loop passes it to `signalled`
        if plan is None or (plan.file is None and plan.url is None):
            self._sidecar.end()
        elif not self._sidecar.is_alive:
            self._sidecar.begin()
        elif plan != before:
            self._send_plan()

    def _send_plan(self) -> None:
        plan = self._plan
        if plan is not None:
            file, url = (one and one.replace("{node}", self._node) for one in (plan.file, plan.url))
            where = {"file": file, "url": url, "token_url": plan.token_url, "headers": plan.headers, "pattern": plan.pattern}
            self._sidecar.send({**where, "interval": plan.interval, "timeout": plan.timeout})

    def signalled(self, numbers: bytes) -> None:
        """Handle signals that have arrived: some are notices."""
        for number in self._plan.signals if self._plan is not None else ():
            if number in numbers:
                self._report(f"the cluster sent {signal.Signals(number).name}")

    def _take(self, message: Message) -> None:
        if "blind" in message:
            self._emit("notice.unknown", why=schema.text(message, "blind"))
        elif message.get("notice") is not None:
            self._report(schema.text(message, "notice"))
        elif self._reported:
            self._reported = False
            self._emit("agent.preemption-cancelled")

    def _report(self, why: str) -> None:
        if not self._reported and self._plan is not None:
            self._reported = True
            self._emit("agent.preemption-notice", seconds=self._plan.lead_time, why=why)

    def _given_up(self, why: str) -> None:
        self._sidecar.end()
        self._emit("notice.unknown", why=why)
