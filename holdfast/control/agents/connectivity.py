"""Attempts to reach silent nodes, and whether this controller itself is cut off from the job's nodes.

When no agent sends anything and no node answers, this host is the likely cause. Training may continue, and nothing could be done about it
from here; a controller that took all nodes for lost would stop a healthy job as soon as it reaches the nodes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.detectors.catalogue import Fault

if TYPE_CHECKING:
    from holdfast.control.agents.pool import AgentPool

PATIENCE: Final = 5.0
"""Seconds to wait for an attempt that has begun."""
PARTITIONED: Final = "controller-partitioned"
"""The fault's kind in the catalogue."""
SILENT: Final = 8
"""Heartbeats without any message after which a controller may be cut off."""
KNOWN: Final = 2
"""Heartbeats for which the reported state is taken to hold."""
CATCH_UP: Final = 5.0
"""Seconds that agents have to reconnect and to replay their events, once some node can be reached again."""


@dataclass(frozen=True, slots=True)
class ReconnectAttempt:
    """One attempt: when it began (monotonic), and whether the node answered."""

    start: float
    answered: bool


class ReconnectAttempts:
    """The newest attempt to reach each silent node by a new connection: in other threads, one at a time for each node."""

    def __init__(self, threads: Executor, answers: Callable[[str], bool]) -> None:
        """Start with none; *answers* tries a node by a new connection."""
        self._threads, self._answers = threads, answers
        self._newest: dict[str, ReconnectAttempt] = {}
        self._running: dict[str, Future[Any]] = {}

    def start(self, node: str, act: Callable[[str], object]) -> None:
        """Run *act* on *node* in another thread, unless something runs on it already."""
        running = self._running.get(node)
        if running is None or running.done():
            self._running[node] = self._threads.submit(act, node)

    def finish(self, node: str) -> None:
        """Wait for what runs on *node*."""
        running = self._running.get(node)
        if running is not None:
            wait([running], timeout=PATIENCE)

    def note_pending(self, node: str, running: Future[Any], start: float) -> None:
        """Count an attempt as failed that nobody waits for any longer; it continues."""
        self._running[node] = running
        self.note_result(node, start, answered=False)

    def note_result(self, node: str, start: float, *, answered: bool) -> None:
        """Remember an attempt."""
        self._newest[node] = ReconnectAttempt(start, answered)

    def forget(self, node: str) -> None:
        """Forget about *node*, which was reached."""
        self._newest.pop(node, None)

    def try_node(self, node: str) -> bool:
        """Return whether *node* answers by a new connection, which the agent's client takes over; remember it."""
        start, answered = time.monotonic(), False
        try:
            answered = self._answers(node)
        finally:
            self.note_result(node, start, answered=answered)
        return answered

    def failed(self, node: str, since: float = 0.0) -> bool:
        """Return whether the newest attempt at *node* failed, and began after *since* (monotonic)."""
        newest = self._newest.get(node)
        return newest is not None and not newest.answered and newest.start > since

    def answered_since(self, at: float) -> set[str]:
        """Return the nodes that have answered an attempt that began after *at* (monotonic)."""
        return {node for node, one in list(self._newest.items()) if one.answered and one.start > at}

    def forget_failed(self) -> None:
        """Forget all failed attempts."""
        for node in [node for node, one in list(self._newest.items()) if not one.answered]:
            self._newest.pop(node, None)

    def since(self, node: str, at: float) -> ReconnectAttempt:
        """Return the newest attempt at *node* if it began after *at* (monotonic), else the result of a new one."""
        self.finish(node)
        newest = self._newest.get(node)
        if newest is not None and newest.start > at:
            return newest
        return ReconnectAttempt(time.monotonic(), self.try_node(node))


class ConnectivityMonitor:
    """Whether this controller is cut off from all of the job's agents."""

    def __init__(
        self,
        pool: AgentPool,
        members: Callable[[], Collection[str]],
        lease: float,
        report: Callable[[Fault], None],
        record_event: Callable[[str], None],
    ) -> None:
        """Start connected; *members* returns the nodes that have ranks.

        Agents end their ranks after *lease* seconds without a message from a controller.
        """
        self._pool, self._members, self._lease, self._report, self._record_event = pool, members, lease, report, record_event
        self._partitioned = False
        self._until = -CATCH_UP
        """Until when no agent could be reached (monotonic)."""
        self._contact_before = 0.0
        """The last contact before that (monotonic)."""
        self.reported = False
        """The partition is on record, and its end is not yet."""

    def is_partitioned(self) -> bool:
        """Return whether no agent can be reached, or could until a moment ago: what is unknown must not count against a node."""
        return self._partitioned or time.monotonic() - self._until < CATCH_UP

    def known_until(self) -> float:
        """Return until when (wall clock) the state of the ranks is known."""
        last = self._contact_before if self.is_partitioned() else self._pool.known_until(self._members())
        return _wall_clock(last) + KNOWN * self._pool.beat

    def poll(self) -> None:
        """Check whether any agent can be reached, and report a change."""
        before, self._partitioned = self._partitioned, self._reaches_nobody()
        if not (before or self._partitioned or self.reported):  # saves a walk over thousands of agents
            return
        contact, now = self._pool.last_contact, time.monotonic()
        if self._partitioned:
            self._until, self._contact_before = now, contact
        elif before:
            self._pool.forget_failed_attempts()  # none could get through
        if self._partitioned and not self.reported and now - contact > CATCH_UP:
            self.reported = True
            quote = f"no message from any node for {now - contact:.1f} s, and none answers. Training may continue: no action until a node "
            quote += f"answers, or until agents end their ranks {self._lease:.0f} s after the last message of a controller"
            self._report(Fault(kind=PARTITIONED, at=_wall_clock(contact), quote=quote, signature=PARTITIONED))
        elif self.reported and self._pool.expected() and contact > self._contact_before:
            self.reported = False
            self._record_event(f"nodes can be reached again, after {contact - self._contact_before:.1f} s")

    def _reaches_nobody(self) -> bool:
        if not self._pool.all_silent(SILENT * self._pool.beat) or time.monotonic() - self._pool.last_contact > self._lease:
            return False
        answered = self._pool.answered()
        if answered and answered.isdisjoint(self._pool.expected()) and not self.reported:
            self._until = -CATCH_UP  # the network worked all the time: the job's nodes are lost
        return not answered


def _wall_clock(at: float) -> float:
    """Return the wall-clock time of a monotonic one."""
    return time.time() - (time.monotonic() - at)
