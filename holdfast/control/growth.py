"""Places for the ranks that a job goes on without: looked for beside training, so that it grows again when there is room."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError
from holdfast.log import note
from holdfast.report.wording import ranks as in_ranges
from policies.narrow import places_to_widen

if TYPE_CHECKING:
    from holdfast.control.run import Run

log = logging.getLogger("holdfast.control")

AGAIN: Final = 1.0
"""Seconds between two looks for free nodes."""
PAUSE: Final = 15.0
"""Seconds until growing is tried again after it failed once; twice as long after each further time."""
LONGEST_PAUSE: Final = 600.0


class Growth:
    """Tells when ranks that are missing could come back."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.due = False
        """There is room for a whole copy of the model, as far as is known."""
        self.found: tuple[str, ...] = ()
        """Nodes that were free when they were looked for last."""
        self._next = 0.0
        self._failures = 0
        self._thread: threading.Thread | None = None

    def look(self, now: float) -> None:
        """Look, at most once a second, and wait for nothing: a survey of the cluster may take seconds. *now*: monotonic seconds."""
        if not self._run.vacant() or self._run.why_not_kept():
            self.due, self.found = False, ()
            return
        if now < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = now + AGAIN
        self.due = bool(self.places())
        if not self.due:
            self._thread = threading.Thread(target=self._survey, name="growth", daemon=True)
            self._thread.start()

    def _survey(self) -> None:
        try:
            self.found = tuple(self._run.free())
        except (HoldfastError, OSError) as error:
            note(log, "growth.blind", why=error)

    def places(self) -> dict[int, str]:
        """Return where the missing ranks can go on, on nodes that are at hand or can be brought up."""
        run = self._run
        room = {node: run.spec.nodes.ranks for node in self.found if not run.wards.bars(node)} | run.room()
        if not run.board.all_stepped():
            return {}
        return places_to_widen(run.copies, run.board.ranks.keys(), room)

    def failed(self) -> None:
        """Try again only after a while."""
        pause = min(LONGEST_PAUSE, PAUSE * 2**self._failures)
        self._failures += 1
        self.due, self.found, self._next = False, (), time.monotonic() + pause

    def succeeded(self) -> None:
        """Look anew if more ranks are missing."""
        self._failures, self.due, self.found = 0, False, ()

    def in_words(self) -> str:
        """Say what could be done."""
        places = self.places()
        return f"there is room for rank(s) {in_ranges(places)} again, on {', '.join(sorted(set(places.values())))}"
