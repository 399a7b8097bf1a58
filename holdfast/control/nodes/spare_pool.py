"""Spare nodes with an agent: replaced when they were used, lost or cordoned, so that the next fault is handled as fast as the last one.

They are looked for while training runs: a slow survey, or a node that does not start, delays nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from holdfast.control.agents.pool import AgentPool
from holdfast.control.nodes.preflight import Preflight
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.errors import HoldfastError, WorldError
from holdfast.log import note
from holdfast.plurals import plural
from holdfast.report.text.wording import listing
from holdfast.spec.job import TrainingJob

log = logging.getLogger("holdfast.control")

RETRY_DELAY: Final = 10.0
"""Seconds between the first two attempts to find a node; twice as long after each further one, as the same node may fail again."""
MAX_RETRY_DELAY: Final = 160.0
STABLE: Final = 60.0
"""Seconds with all spare nodes present after which the delay is reset."""


@dataclass(slots=True, kw_only=True)
class SparePool:
    """Keeps an agent on as many nodes as the job wants, spare nodes included."""

    log: JobLog
    spec: TrainingJob
    agents: AgentPool
    generations: Generations
    preflight: Preflight
    candidates: Callable[[], list[str]]
    """Returns the nodes that may be taken."""
    kept_out_now: Callable[[], frozenset[str]]
    """Returns the nodes that are out of service, or were dropped and are unreachable."""
    announce: bool
    """Whether to report that nodes are missing and none is free; where nodes are allocated to jobs, the allocator reports it."""
    _next: float = 0.0
    """When to look again (monotonic)."""
    _delay: float = RETRY_DELAY
    _full_since: float = 0.0
    """Since when none is missing (monotonic)."""
    _reported: bool = True
    """That some are missing and none is free was reported; by the launch at first."""
    _kept_out: frozenset[str] = frozenset()
    _added: set[str] = field(default_factory=set)
    """Nodes that were added before: one that comes and goes is tried less and less often."""
    _thread: threading.Thread | None = None
    _closed: bool = False
    """No further node is to be started."""

    def poll(self, now: float) -> None:
        """Look for missing nodes when it is time, without waiting. *now*: monotonic seconds."""
        if not self._missing():
            self._reported, self._full_since = False, self._full_since or now
            if now - self._full_since >= STABLE:
                self._delay = RETRY_DELAY
            return
        self._full_since = 0.0
        kept_out = self.kept_out_now()
        if self._kept_out - kept_out:  # a node was returned to service, or answers again
            self._next, self._delay = 0.0, RETRY_DELAY
        self._kept_out = kept_out
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next, self._delay = now + self._delay, min(MAX_RETRY_DELAY, 2 * self._delay)
            self._thread = threading.Thread(target=self._fill, name="spare pool", daemon=True)
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Start no further node, and wait up to *seconds* for one that is starting: the end of the job or the next controller finds it."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(seconds)

    def _missing(self) -> int:
        present = set(self.agents.alive()) | set(self.generations.members)
        return max(0, self.spec.max_nodes + self.spec.spare_nodes - len(present))

    def _fill(self) -> None:
        failed, added = dict[str, str](), list[str]()
        try:
            candidates = self.preflight.by_preference(self.candidates())
            with suppress(RuntimeError):  # the controller ends, and its thread pool with it
                while not self._closed and (batch := candidates[: self._missing()]):
                    candidates = candidates[len(batch) :]
                    self.preflight.begin(batch)
                    answers = self.agents.each(batch, self.agents.bring_up)
                    failed |= {node: str(answer) for node, answer in answers.items() if isinstance(answer, WorldError)}
                    added += [node for node in batch if node not in failed]
                    self.preflight.finish()
                self._record(added, failed)
            if added and not failed and self._added.isdisjoint(added):  # new nodes are found: nothing has to be tried less often
                self._delay = RETRY_DELAY
            self._added.update(added)
        except (HoldfastError, OSError) as error:
            note(log, "spare-pool.failed", why=error)

    def _record(self, added: Sequence[str], failed: Mapping[str, str]) -> None:
        """Record which nodes were added, and how many are still missing."""
        missing = self._missing()
        for node in added:
            healthy = self.preflight.is_healthy(node)
            self.log.record_node_status(
                node, "healthy" if healthy else "suspect", "its agent is up" if healthy else self.preflight.objection(node)
            )
        if added:
            self.log.record_event(f"{listing(added)} added as spare" + (f", {plural(missing, 'node')} still missing" if missing else ""))
        elif not self._reported and self.announce:
            self._reported = True
            why = f" ({'; '.join(f'{node}: {reason}' for node, reason in failed.items())})" if failed else ""
            self.log.record_event(f"{plural(missing, 'spare node')} missing and none free in {self.log.cluster}{why}; looked for again")
