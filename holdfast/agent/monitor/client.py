"""The agent's end of the node's lookout: begun with the first job, told of generations, its faults handed on to the flow."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.agent import schema
from holdfast.agent.node.devices import ranks_on
from holdfast.agent.node.identity import Identity
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.agent.workers.group import WorkerGroup
from holdfast.protocol import Message

BEGIN: Final = 2.0
"""Seconds from the first order to the lookout's start: a job that begins has other use for the processors."""


class MonitorClient:
    """Has the node watched while a job holds it."""

    def __init__(  # noqa: PLR0913, PLR0917 (who the agent is, what it waits with, where to look)
        self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], workers: WorkerGroup, kernel_log: Path, root: Path
    ) -> None:
        self._me, self._emit, self._workers, self._kernel_log, self._root = me, emit, workers, kernel_log, root
        self._generation = 0
        self._begin_at: float | None = None
        self._begun = False
        part = SidecarSpec(
            name="lookout", command=self._command, begun=self._tell, heard=self._take, lost=lambda: None, given_up=self._given_up
        )
        self._helper = Sidecar(part, me, selector, workers.helpers)

    def _command(self, line: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        command = (sys.executable, "-m", "holdfast.agent.monitor", str(line), self._me.node, str(self._kernel_log), str(self._root))
        return command, ()

    def prepare(self, *, watch: bool) -> None:
        """Have the node watched from soon on, if the job wants that."""
        if watch and not self._begun and self._begin_at is None:
            self._begin_at = time.monotonic() + BEGIN

    def begin_generation(self, number: int) -> None:
        """Let what grows from now on be of generation *number*."""
        self._generation = number
        self._tell()

    def _tell(self) -> None:
        self._helper.say({"generation": self._generation})

    def something_ended(self) -> None:
        """Have the node looked at: a worker ended that should not have."""
        self._helper.say({"ended": self._generation})

    def _take(self, message: Message) -> None:
        if "fault" in message:
            facts = {name: schema.text(message, name) for name in ("part", "quote", "source")}
            on = ranks_on(facts["part"], facts["quote"], self._workers.workers.values(), self._root)
            self._emit("node.fault", kind=schema.text(message, "fault"), seen_at=schema.number(message, "at"), on=on, **facts)
        elif "counter_increases" in message:
            counter_increases = schema.mapping(message, "counter_increases")
            counted = {name: schema.whole(counter_increases, name) for name in counter_increases}
            over, seconds = schema.whole(message, "generation"), schema.seconds(message, "seconds")
            self._emit("node.counter-increases", over=over, seconds=seconds, counter_increases=counted)
        elif "deaf" in message:
            self._emit("node.gpu-events-lost", why=schema.text(message, "deaf"))
        elif "hears" in message:
            self._emit("node.gpu-events-restored")

    def _given_up(self, why: str) -> None:
        self._helper.end()
        self._emit("node.unmonitored", why=why)

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._begin_at if self._begin_at is not None else self._helper.due()

    def tick(self, now: float) -> None:
        """Begin when it is time; begin again what has died."""
        if self._begin_at is not None and now >= self._begin_at:
            self._begin_at, self._begun = None, True
            try:
                self._helper.begin()
            except OSError as error:
                self._given_up(f"it cannot be started: {error}")
        self._helper.tick(now)

    def end(self) -> None:
        """Watch no longer."""
        self._begin_at, self._begun = None, True
        self._helper.end()
