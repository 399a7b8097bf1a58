"""The agent's end of what looks for notices that the node will be taken away: a process of its own, as a file or an address may hang."""

from __future__ import annotations

import re
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.protocol import Message

USED: Final = frozenset({signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM})
"""Signals that have a meaning of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSettings:
    """Where notices are to be seen."""

    file: str | None
    url: str | None
    token_url: str | None
    headers: dict[str, str]
    pattern: str
    signals: tuple[int, ...]
    every: float
    """Seconds from one look to the next."""
    timeout: float
    """Seconds that a question may take."""
    lasts: float
    """Seconds from the notice to the end of the node."""

    @classmethod
    def of(cls, message: Message) -> PreemptionSettings:
        """Return the plan in a part of a ``prepare`` order; raise `BadField` when it is none."""
        numbers = schema.numbers(message, "signals")
        if any(number not in signal.valid_signals() or number in USED for number in numbers):
            raise schema.BadField("signals", "numbers of signals that are free for it", numbers)
        try:
            re.compile(schema.text(message, "pattern"))
        except re.error as error:
            raise schema.BadField("pattern", "a regular expression", message["pattern"]) from error
        return cls(
            file=schema.maybe(schema.path, message, "file"),
            url=schema.maybe(schema.text, message, "url"),
            token_url=schema.maybe(schema.text, message, "token_url"),
            headers=schema.environment(message, "headers"),
            pattern=schema.text(message, "pattern"),
            signals=tuple(numbers),
            every=schema.seconds(message, "every"),
            timeout=schema.seconds(message, "timeout"),
            lasts=schema.seconds(message, "lasts"),
        )


class PreemptionClient:
    """Has notices looked for while a job holds the node, and tells of them once."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], helpers: set[int]) -> None:
        self._me, self._emit = me, emit
        self._plan: PreemptionSettings | None = None
        self._told = False
        part = SidecarSpec(
            name="notices", command=self._command, begun=self._tell, heard=self._take, lost=lambda: None, given_up=self._given_up
        )
        self._helper = Sidecar(part, me, selector, helpers)

    def _command(self, line: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return (sys.executable, "-m", "holdfast.agent.monitor.preemption_watcher", str(line)), ()

    def prepare(self, plan: PreemptionSettings | None) -> None:
        """Look where *plan* says from now on; raise ``OSError`` when that cannot be."""
        before, self._plan = self._plan, plan
        for number in plan.signals if plan is not None else ():
            signal.signal(number, lambda *_: None)  # the loop hears of it
        if plan is None or (plan.file is None and plan.url is None):
            self._helper.end()
        elif not self._helper.is_alive:
            self._helper.begin()
        elif plan != before:
            self._tell()

    def _tell(self) -> None:
        plan = self._plan
        if plan is not None:
            file, url = (one and one.replace("{node}", self._me.node) for one in (plan.file, plan.url))
            wanted = {"file": file, "url": url, "token_url": plan.token_url, "headers": plan.headers, "pattern": plan.pattern}
            self._helper.say({**wanted, "every": plan.every, "timeout": plan.timeout})

    def signalled(self, numbers: bytes) -> None:
        """Take in signals that have come: some are notices."""
        for number in self._plan.signals if self._plan is not None else ():
            if number in numbers:
                self._leave(f"it was told to go by {signal.Signals(number).name}")

    def _take(self, message: Message) -> None:
        if "blind" in message:
            self._emit("notice.unknown", why=schema.text(message, "blind"))
        elif message.get("notice") is None:
            if self._told:
                self._told = False
                self._emit("agent.preemption-cancelled")
        else:
            self._leave(schema.text(message, "notice"))

    def _leave(self, why: str) -> None:
        if not self._told and self._plan is not None:
            self._told = True
            self._emit("agent.preemption-notice", seconds=self._plan.lasts, why=why)

    def _given_up(self, why: str) -> None:
        self._helper.end()
        self._emit("notice.unknown", why=why)

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._helper.due()

    def tick(self, now: float) -> None:
        """Begin again what has died."""
        self._helper.tick(now)

    def end(self) -> None:
        """Look no longer."""
        self._helper.end()
