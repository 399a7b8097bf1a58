"""Places for the ranks that a job goes on without: looked for beside training, so that it grows again when there is room.

Ranks that are missing beside processes that live come between two steps. Where all ranks were started again on fewer nodes, they are
started again on more: that costs a start, and has to bring in more than that.
"""

from __future__ import annotations

import logging
import statistics
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
from holdfast.report.wording import ranks as in_ranges
from holdfast.spec.job import Nodes
from policies.shrink_live import placements_to_grow, restart_pays_off

log = logging.getLogger("holdfast.control")

AGAIN: Final = 1.0
"""Seconds between two looks for free nodes."""
PAUSE: Final = 15.0
"""Seconds until growing is tried again after it failed once; twice as long after each further time."""
LONGEST_PAUSE: Final = 600.0
SURE: Final = 15.0
"""Seconds for which a node has to be free before all ranks are started again for it: one that has just come back may go again."""
STEPS: Final = 64
"""The newest steps, which tell what one takes."""


class ScaleUp:
    """Tells when ranks that are missing could come back."""

    def __init__(self, wanted: Nodes, generations: Generations, nodes: JobNodes, newest_checkpoint: Callable[[], int]) -> None:
        """Grow to *wanted* nodes; *newest_checkpoint* returns the step of the newest complete checkpoint."""
        self._wanted, self._generations, self._nodes, self._newest_checkpoint = wanted, generations, nodes, newest_checkpoint
        self.due = False
        """There is room for a whole copy of the model, as far as is known."""
        self.found: tuple[str, ...] = ()
        """Nodes that were free when they were looked for last."""
        self._next = 0.0
        self._since = 0.0
        """When nodes were found for which all ranks could be started again (monotonic); 0: there are none."""
        self._failures = 0
        self._thread: threading.Thread | None = None

    def poll(self, now: float) -> None:
        """Look, at most once a second, and wait for nothing: a survey of the cluster may take seconds. *now*: monotonic seconds."""
        if not self.by_restart and (not self._generations.vacant() or self._generations.why_not_kept()):
            self.due, self.found = False, ()
            return
        if now < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = now + AGAIN
        self.due = self._is_worth_a_start(now) if self.by_restart else bool(self.places())
        if not self.due:
            self._thread = threading.Thread(target=self._survey, name="growth", daemon=True)
            self._thread.start()

    def _survey(self) -> None:
        try:
            self.found = tuple(self._nodes.free())
        except (HoldfastError, OSError) as error:
            note(log, "growth.blind", why=error)

    @property
    def by_restart(self) -> bool:
        """Tell whether the job was started on fewer nodes than it wants: to grow, all its ranks have to start again."""
        ranks, full = self._generations.state.ranks, self._wanted.wanted * self._wanted.ranks
        return bool(ranks) and not self._generations.vacant() and len(ranks) < full

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that could be taken in by a restart: as many as are missing at most, those with an agent first."""
        members = self._generations.members
        free = [node for node in self.found if not self._nodes.eligibility.why_ineligible(node) and node not in members]
        known = dict.fromkeys([*self._nodes.spares(), *free])
        return tuple(islice(known, max(0, self._wanted.wanted - len(members))))

    def _is_worth_a_start(self, now: float) -> bool:
        """Tell whether there have been nodes for a while, and more is to be won by them than a start of all ranks takes."""
        if not self._generations.begun() or not self.nodes():
            self._since = 0.0
            return False
        self._since = self._since or now
        if now - self._since < SURE:
            return False
        held, coming = len(self._generations.members), len(self.nodes())
        cost = self._seconds_of_a_start() + self._seconds_lost()
        return restart_pays_off(left=self._seconds_left(), cost=cost, held=held, coming=coming)

    def _seconds_left(self) -> float | None:
        """Return how long the steps that are left take as the job is; nothing where nobody knows."""
        until, step = self._generations.state.until(), self._seconds_of_a_step()
        return None if until is None or step is None else max(0, until - self._generations.best) * step

    def _seconds_of_a_step(self) -> float | None:
        newest = [seconds for _, seconds in islice(reversed(self._generations.state.durations), STEPS)]
        return statistics.median(newest) if newest else None

    def _seconds_lost(self) -> float:
        """Return what the steps took that a start would throw away: those after the newest snapshot, or else checkpoint."""
        age = snapshot_age(self._generations.state)
        steps = max(0, self._generations.best - self._newest_checkpoint()) if age is None else age
        return steps * (self._seconds_of_a_step() or 0.0)

    def _seconds_of_a_start(self) -> float:
        """Return what the start of the present generation took."""
        board = self._generations.state
        begun = min((view.started for view in board.ranks.values() if view.started is not None), default=None)
        first = board.first_step_at()
        return 0.0 if begun is None or first is None else max(0.0, first - begun)

    def places(self) -> dict[int, str]:
        """Return where the missing ranks can go on, on nodes that are at hand or can be brought up."""
        generations, nodes = self._generations, self._nodes
        room = {node: self._wanted.ranks for node in self.found if not nodes.eligibility.why_ineligible(node)} | nodes.room()
        if not generations.state.all_stepped():
            return {}
        return placements_to_grow(generations.copies, generations.state.ranks.keys(), room)

    def failed(self) -> None:
        """Try again only after a while."""
        pause = min(LONGEST_PAUSE, PAUSE * 2**self._failures)
        self._failures += 1
        self.due, self.found, self._since, self._next = False, (), 0.0, time.monotonic() + pause

    def succeeded(self) -> None:
        """Look anew if more ranks are missing."""
        self._failures, self.due, self.found, self._since = 0, False, (), 0.0

    def describe(self) -> str:
        """Say what could be done."""
        if self.by_restart:
            return f"there is room on {', '.join(self.nodes())} again: all ranks start anew, to be more"
        places = self.places()
        return f"there is room for rank(s) {in_ranges(places)} again, on {', '.join(sorted(set(places.values())))}"
