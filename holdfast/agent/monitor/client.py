"""The agent's end of the node monitor: starts it with the first job, sends it generations, and reports its faults to the controller."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.agent import schema
from holdfast.agent.node.devices import is_idle, ranks_on
from holdfast.agent.node.identity import Identity
from holdfast.agent.node.link_use import LinkUse
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.agent.workers.group import WorkerGroup
from holdfast.agent.workers.worker import Worker
from holdfast.protocol import Message

START_DELAY: Final = 2.0
"""Seconds from the first command to the monitor's start: a job that begins needs the processors itself."""


class MonitorClient:
    """Has the node monitored while a job runs on it."""

    def __init__(  # noqa: PLR0913, PLR0917 (who the agent is, what it waits with, where to read)
        self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], workers: WorkerGroup, kernel_log: Path, root: Path
    ) -> None:
        self._emit, self._workers, self._root = emit, workers, root
        self._link_use = LinkUse(root)
        self._generation = 0
        self._start_at: float | None = None
        self._begun = False
        arguments = (me.node, str(kernel_log), str(root))
        spec = SidecarSpec(
            name="monitor",
            command=lambda descriptor: ((sys.executable, "-m", "holdfast.agent.monitor", str(descriptor), *arguments), ()),
            started=self._send_generation,
            received=self._take,
            given_up=self._given_up,
        )
        self._sidecar = Sidecar(spec, me, selector, workers.helpers)

    def prepare(self, *, watch: bool) -> None:
        """Start the monitor soon, if the job wants it."""
        if watch and not self._begun and self._start_at is None:
            self._start_at = time.monotonic() + START_DELAY

    def begin_generation(self, number: int) -> None:
        """Attribute counter increases from now on to generation *number*."""
        self._generation = number
        self._send_generation()

    def _send_generation(self) -> None:
        self._sidecar.send({"generation": self._generation})

    def worker_crashed(self) -> None:
        """Have the node sampled: a worker ended that should not have."""
        self._sidecar.send({"ended": self._generation})

    def _take(self, message: Message) -> None:
        if "fault" in message:
            facts = {name: schema.text(message, name) for name in ("part", "quote", "source")}
            workers = list(self._workers.workers.values())
            on = ranks_on(facts["part"], facts["quote"], workers, self._root)
            idle = not on and (is_idle(facts["part"], workers, self._root) or self._is_unused(message, workers))
            measured = {name: schema.text(message, name) for name in ("contradicted", "supported") if name in message}
            kind, seen_at = schema.text(message, "fault"), schema.number(message, "at")
            self._emit("node.fault", kind=kind, seen_at=seen_at, on=on, idle=idle, **facts, **measured)
        elif "sampled" in message:
            self._link_use.look(self._workers.workers.values())
        elif "counter_increases" in message:
            found = schema.mapping(message, "counter_increases")
            increases = {name: schema.integer(found, name) for name in found}
            over, seconds = schema.integer(message, "generation"), schema.seconds(message, "seconds")
            self._emit("node.counter-increases", over=over, seconds=seconds, counter_increases=increases)
        elif "gpu_events_lost" in message:
            self._emit("node.gpu-events-lost", why=schema.text(message, "gpu_events_lost"))
        elif "gpu_events_restored" in message:
            self._emit("node.gpu-events-restored")
        elif "conditions_unreadable" in message:
            self._emit("node.conditions-unreadable", why=schema.text(message, "conditions_unreadable"))

    def _is_unused(self, message: Message, workers: list[Worker]) -> bool:
        """Return whether a fault is of a network device that no rank uses, or of a disk: a rank that has exited may have used that."""
        if message.get("unused") is True:
            return bool(workers) and all(one.pid and not one.exited for one in workers)
        if "link" not in message:
            return False
        link = schema.mapping(message, "link")
        return self._link_use.is_unused(link["addresses"], link["adapters"], workers, stacked=link["stacked"])

    def _given_up(self, why: str) -> None:
        self._sidecar.end()
        self._emit("node.unmonitored", why=why)

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._start_at if self._start_at is not None else self._sidecar.due()

    def tick(self, now: float) -> None:
        """Start or restart the monitor when that is due."""
        if self._start_at is not None and now >= self._start_at:
            self._start_at, self._begun = None, True
            try:
                self._sidecar.begin()
            except OSError as error:
                self._given_up(f"the monitor cannot be started: {error}")
        self._sidecar.tick(now)

    def end(self) -> None:
        """End the monitor."""
        self._start_at, self._begun = None, True
        self._sidecar.end()
