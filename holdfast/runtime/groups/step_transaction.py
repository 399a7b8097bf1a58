"""One attempt at a step: whether a peer was lost in it.

Nobody is interrupted: what is lost is noted, and the vote at the end of the step asks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

LONGEST: Final = 500
"""Characters of an error's own words that are kept."""


@dataclass(slots=True)
class StepTransaction:
    """What went wrong between two step boundaries. Written by the training thread, autograd's threads and the watch thread."""

    lost: bool = False
    """A peer was lost, or the flow has ended this generation: this step will not be committed."""
    why: str = ""
    damaged: int = 0
    """Operations that were given zeros in place of what a lost peer would have sent."""
    final: bool = False
    """What is done now is not done again, nor taken back: the script is before its first step, between two, or after its last."""
    broken: set[str] = field(default_factory=set)
    """Groups in which an operation failed: their connections are of no use any more."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, why: str, group: str | None = None) -> None:
        """Note the loss of a peer; the first words stay, for what follows are echoes."""
        with self._lock:
            if not self.lost:
                self.why = why[:LONGEST]
            self.lost = True
            if group is not None:
                self.broken.add(group)

    def renew(self) -> None:
        """Begin anew, with mended groups."""
        with self._lock:
            self.lost, self.why = False, ""
            self.broken.clear()
