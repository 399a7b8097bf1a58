"""Whether a job that reports no steps got on between two faults: what it printed, and how long it ran, have to tell."""

from __future__ import annotations

from typing import Final

LEAST: Final = 5.0
"""A shorter run brought nothing, however fast the script starts (seconds, ours)."""
STARTS: Final = 3.0
"""A run got on once it lasted this many times as long as its start, from the start of the last rank to the first output (ours)."""
SILENT: Final = 60.0
"""The same for a script that prints nothing, of which nobody knows when its start was over (seconds, ours)."""


def counts_as_progress(uptime: float, startup: float | None) -> bool:
    """Tell whether a run of *uptime* seconds without a fault counts as progress, when its first output came after *startup* seconds.

    ``None``: it has printed nothing. A script that always fails at the same place later than that is ended by the budgets of restarts and
    recoveries, and not by this.
    """
    return uptime >= (SILENT if startup is None else max(LEAST, STARTS * startup))
