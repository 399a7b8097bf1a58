"""Room for the ranks that a job runs without: looked for while training runs, so that the job grows again when there is some.

Ranks that are missing next to kept processes join between two steps. A job that was restarted on fewer nodes is restarted on more: that
costs a start, and must gain more than that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from holdfast.control.checkpoints.snapshot_stats import snapshot_age
from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.state.generations import Generations
from holdfast.errors import HoldfastError
from holdfast.log import note
from holdfast.plurals import named_ranks
from holdfast.policies.recovery.in_process import placements_to_grow, restart_pays_off
from holdfast.spec.job import TrainingJob

log = logging.getLogger("holdfast.control")

INTERVAL: Final = 1.0
"""Seconds between two surveys for free nodes."""
RETRY_DELAY: Final = 15.0
"""Seconds until the job tries to grow again after a failure; twice as long after each further one."""
MAX_RETRY_DELAY: Final = 600.0
STABLE: Final = 15.0
"""Seconds for which a node has to be free before all ranks are restarted for it: one that has just returned may leave again."""


class ScaleUp:
    """Finds out when the job can grow."""

    def __init__(self, spec: TrainingJob, generations: Generations, nodes: JobNodes, newest_checkpoint: Callable[[], int]) -> None:
        """Grow to the nodes that *spec* asks for; *newest_checkpoint* returns the step of the newest complete checkpoint."""
        self._spec, self._generations, self._nodes, self._newest_checkpoint = spec, generations, nodes, newest_checkpoint
        self.due = False
        """There is room for a complete copy of the model, as far as is known."""
        self.found: tuple[str, ...] = ()
        """Nodes that were free at the last survey."""
        self._next = 0.0
        self._free_since = 0.0
        """Since when there are nodes for which all ranks could be restarted (monotonic); 0: there are none."""
        self._failures = 0
        self._thread: threading.Thread | None = None

    def poll(self, now: float) -> None:
        """Survey, at most once a second, without waiting, as it may take seconds. *now*: monotonic seconds."""
        if not self.by_restart and (not self._generations.vacant() or self._generations.why_not_kept()):
            self.due, self.found = False, ()
            return
        if now < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = now + INTERVAL
        self.due = self._restart_is_worth_it(now) if self.by_restart else bool(self.places())
        if not self.due:
            self._thread = threading.Thread(target=self._survey, name="scale-up", daemon=True)
            self._thread.start()

    def _survey(self) -> None:
        try:
            self.found = tuple(self._nodes.free())
        except (HoldfastError, OSError) as error:
            note(log, "scale-up.survey-failed", why=error)

    @property
    def by_restart(self) -> bool:
        """Return whether the job was started on fewer nodes than it wants: to grow, it has to restart all ranks."""
        ranks, full = self._generations.state.ranks, self._spec.max_nodes * self._generations.ranks_per_node
        return bool(ranks) and not self._generations.vacant() and len(ranks) < full

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that a restart could add: at most as many as are missing, those with an agent first."""
        members = self._generations.members
        free = [node for node in self.found if not self._nodes.eligibility.why_ineligible(node) and node not in members]
        known = dict.fromkeys([*self._nodes.spares(), *free])
        return tuple(islice(known, max(0, self._spec.max_nodes - len(members))))

    def _restart_is_worth_it(self, now: float) -> bool:
        """Return whether nodes have been free for a while, and gain more than a restart of all ranks costs."""
        generations = self._generations
        if not generations.begun() or not self.nodes():
            self._free_since = 0.0
            return False
        self._free_since = self._free_since or now
        if now - self._free_since < STABLE:
            return False
        state = generations.state
        step_seconds, start_seconds = state.step_seconds(), state.start_seconds() or 0.0
        age, until = snapshot_age(state), state.until()
        lost_steps = max(0, generations.best - self._newest_checkpoint()) if age is None else age
        remaining = None if until is None or step_seconds is None else max(0, until - generations.best) * step_seconds
        cost = start_seconds + lost_steps * (step_seconds or 0.0)
        return restart_pays_off(left=remaining, cost=cost, held=len(generations.members), coming=len(self.nodes()))

    def places(self) -> dict[int, str]:
        """Return a node for each missing rank that can join, on nodes with an agent or that can be brought up."""
        generations, nodes = self._generations, self._nodes
        room = {node: self._generations.ranks_per_node for node in self.found if not nodes.eligibility.why_ineligible(node)} | nodes.room()
        if not generations.state.all_stepped():
            return {}
        return placements_to_grow(generations.copies, generations.state.ranks.keys(), room)

    def failed(self) -> None:
        """Try again after a delay."""
        delay = min(MAX_RETRY_DELAY, RETRY_DELAY * 2**self._failures)
        self._failures += 1
        self.due, self.found, self._free_since, self._next = False, (), 0.0, time.monotonic() + delay

    def succeeded(self) -> None:
        """Survey anew if more ranks are missing."""
        self._failures, self.due, self.found, self._free_since = 0, False, (), 0.0

    def describe(self) -> str:
        """Return a line about how the job can grow."""
        if self.by_restart:
            return f"there is room on {', '.join(self.nodes())} again: all ranks are restarted on more nodes"
        places = self.places()
        return f"there is room for {named_ranks(places)} again, on {', '.join(sorted(set(places.values())))}"
