"""Nodes in place of spare ones that were used, lost or taken out: so that the next fault is answered as fast as the one before.

They are looked for beside training, so a look that takes long, or a node that does not come up, holds up nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from holdfast.control.agents.pool import AgentPool
from holdfast.control.nodes.preflight import Preflight
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.errors import HoldfastError, WorldError
from holdfast.log import note
from holdfast.report.wording import plural, some
from holdfast.spec.job import Nodes

log = logging.getLogger("holdfast.control")

PAUSE: Final = 10.0
"""Seconds between the first two tries to find a node; twice as long after each further one, as it may be the same node that fails."""
LONGEST_PAUSE: Final = 160.0
CALM: Final = 60.0
"""Seconds with all spare nodes there after which the tries are counted anew."""


@dataclass(slots=True, kw_only=True)
class SparePool:
    """Keeps as many nodes with an agent as the job wants, spare ones included."""

    log: JobLog
    wanted: Nodes
    agents: AgentPool
    generations: Generations
    preflight: Preflight
    candidates: Callable[[], list[str]]
    """Returns the nodes that may be taken."""
    kept_out_now: Callable[[], frozenset[str]]
    """Returns the nodes that are out of service, or were given up and are unreachable."""
    announce: bool
    """Whether to report that nodes are missing and none is free; where nodes are allocated to jobs, the allocator reports it."""
    _next: float = 0.0
    """When to look again (monotonic)."""
    _pause: float = PAUSE
    _full: float = 0.0
    """Since when none is missing (monotonic)."""
    _told: bool = True
    """That some are missing and none is free was reported; by the launch at first."""
    _kept_out: frozenset[str] = frozenset()
    _thread: threading.Thread | None = None
    _over: bool = False
    """No further node is to be started."""

    def poll(self, now: float) -> None:
        """Look for what is missing when it is time to, and wait for nothing. *now*: monotonic seconds."""
        if not self._missing():
            self._told, self._full = False, self._full or now
            if now - self._full >= CALM:
                self._pause = PAUSE
            return
        self._full = 0.0
        kept_out = self.kept_out_now()
        if self._kept_out - kept_out:  # somebody took a node back, or it answers again
            self._next, self._pause = 0.0, PAUSE
        self._kept_out = kept_out
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next, self._pause = now + self._pause, min(LONGEST_PAUSE, 2 * self._pause)
            self._thread = threading.Thread(target=self._fill, name="refill", daemon=True)
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Begin with no further node, and wait so long at most for one that is being brought up: the job's end or its heir finds it."""
        self._over = True
        if self._thread is not None:
            self._thread.join(seconds)

    def _missing(self) -> int:
        present = set(self.agents.alive()) | set(self.generations.members)
        return max(0, self.wanted.wanted + self.wanted.spare - len(present))

    def _fill(self) -> None:
        failed, came = dict[str, str](), list[str]()
        try:
            candidates = self.preflight.by_preference(self.candidates())
            with suppress(RuntimeError):  # the flow ends, and its hands with it
                while not self._over and (batch := candidates[: self._missing()]):
                    candidates = candidates[len(batch) :]
                    self.preflight.begin(batch)
                    answers = self.agents.each(batch, self.agents.bring_up)
                    failed |= {node: str(answer) for node, answer in answers.items() if isinstance(answer, WorldError)}
                    came += [node for node in batch if node not in failed]
                    self.preflight.finish()
                self._tell(came, failed)
        except (HoldfastError, OSError) as error:
            note(log, "refill.blind", why=error)

    def _tell(self, came: Sequence[str], failed: Mapping[str, str]) -> None:
        """Record which nodes came up, and say what is missing still."""
        short = self._missing()
        for node in came:
            sound = self.preflight.is_healthy(node)
            self.log.record_node_status(
                node, "healthy" if sound else "suspect", "its agent is up" if sound else self.preflight.objection(node)
            )
        if came:
            self.log.record_event(f"{some(came)} taken in to be spare" + (f", {plural(short, 'node')} still missing" if short else ""))
        elif not self._told and self.announce:
            self._told = True
            why = f" ({'; '.join(f'{node}: {words}' for node, words in failed.items())})" if failed else ""
            self.log.record_event(
                f"{plural(short, 'spare node')} missing and nothing free in {self.log.cluster} to fill up with{why}; looked for again"
            )
