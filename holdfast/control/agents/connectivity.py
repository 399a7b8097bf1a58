"""Whether this flow hears anybody. When no agent speaks and no node answers, it is this machine that is cut off, as far as one can know.

Training may go on then, and nothing could be done about it if it did not. A flow that took all nodes for lost would stop a job that was
well all the time, as soon as it hears them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from detectors.catalogue import Fault
from holdfast.control.agents.pool import AgentPool

DEAF: Final = "control-plane-lost"
"""What the catalogue calls it."""
SILENT: Final = 8
"""Beats without a word from anybody that make a flow deaf."""
KNOWN: Final = 2
"""Beats for which what was told is taken to hold."""
CATCH_UP: Final = 5.0
"""Seconds that agents have, once some node can be heard again, to come back and to tell what was missed."""


class ConnectivityMonitor:
    """What a flow hears of all its agents together."""

    def __init__(self, fleet: AgentPool, lease: float, tell: Callable[[Fault], None], record_event: Callable[[str], None]) -> None:
        """Begin with all that is heard; agents end their ranks after *lease* seconds without a word from a flow."""
        self._fleet, self._lease, self._tell, self._remark = fleet, lease, tell, record_event
        self._deaf = False
        self._until = -CATCH_UP
        """Until when nobody could be heard (monotonic)."""
        self._before = 0.0
        """When anybody was heard last before that (monotonic)."""
        self.told = False
        """It is on record that nobody is heard, and not yet that anybody is again."""

    def is_partitioned(self) -> bool:
        """Tell whether nobody can be heard, or could until a moment ago: what is not known must not be held against anybody."""
        return self._deaf or time.monotonic() - self._until < CATCH_UP

    def known_until(self) -> float:
        """Return until when (wall clock) it is known what ranks do: as agents told, or until now where any news would be heard."""
        if not self.is_partitioned() and self._fleet.answered():
            return time.time()
        return _wall(self._before if self.is_partitioned() else self._fleet.newest_word) + KNOWN * self._fleet.beat

    def poll(self) -> None:
        """See whether anybody can be heard, and tell when that changes."""
        before, self._deaf = self._deaf, self._hears_nobody()
        if not (before or self._deaf or self.told):  # thousands of agents need not be gone through for that
            return
        word, now = self._fleet.newest_word, time.monotonic()
        if self._deaf:
            self._until, self._before = now, word
        elif before:
            self._fleet.forget_tries()  # of which none could come through
        if self._deaf and not self.told and now - word > CATCH_UP:
            self.told = True
            quote = f"nothing was heard from any node for {now - word:.1f} s, and none answers; ranks may train on, so nothing is done"
            quote += f" until one does, or until agents end their ranks, {self._lease:.0f} s after the last word of a flow"
            self._tell(Fault(kind=DEAF, at=_wall(word), quote=quote, signature=DEAF))
        elif self.told and self._fleet.expected() and word > self._before:
            self.told = False
            self._remark(f"nodes can be heard again, after {word - self._before:.1f} s")

    def _hears_nobody(self) -> bool:
        if not self._fleet.all_silent(SILENT * self._fleet.beat) or time.monotonic() - self._fleet.newest_word > self._lease:
            return False
        answered = self._fleet.answered()
        if answered.isdisjoint(self._fleet.expected()) and answered and not self.told:
            self._until = -CATCH_UP  # the way was there all the time: it is the job's nodes that are gone
        return not answered


def _wall(at: float) -> float:
    """Return the time of the wall clock that a monotonic one is."""
    return time.time() - (time.monotonic() - at)
