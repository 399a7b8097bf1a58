"""How a step spent its time: own work, waiting for other ranks, waiting for data. From the windows that `wait_windows` sees anyway.

On a GPU a wait for a collective returns at once, and the time that is waited shows only where the rank waits for its device, before the
vote: there own work and waiting cannot be told apart, and nothing is told.
"""

from __future__ import annotations

import time

from holdfast.runtime.telemetry import sections
from holdfast.runtime.telemetry.wait_windows import WaitWindows, process_waits


class StepTimer:
    """Measures each step from the end of the one before to its own."""

    def __init__(self, windows: WaitWindows | None = None) -> None:
        self._idle = windows or process_waits()
        self._since: float | None = None
        self._sums: dict[str, float] = {}
        self._sections = sections.begun()

    def begin(self) -> None:
        """Begin to count here: what was before belongs to no step (a save, a recovery, the start)."""
        self._since, self._sums, self._sections = time.perf_counter(), dict(self._idle.sums), sections.begun()

    def end(self) -> dict[str, float] | None:
        """Return how the step spent its time in seconds, as it ends now; nothing where a declared section was in it."""
        since, before = self._since, self._sums
        quiet = sections.begun() == self._sections
        if since is None or not quiet:
            return None
        took = time.perf_counter() - since
        waited = {kind: total - before.get(kind, 0.0) for kind, total in self._idle.sums.items()}
        data = waited.pop("data", 0.0)
        talk = sum(waited.values())
        return {"own": round(max(0.0, took - talk - data), 6), "talk": round(talk, 6), "data": round(data, 6)}
