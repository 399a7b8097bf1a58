"""Progress of a job that reports no steps: estimated from its uptime and its first output."""

from __future__ import annotations

from typing import Final

LEAST: Final = 5.0
"""A shorter run is no progress, however fast the script starts (seconds, ours)."""
STARTS: Final = 3.0
"""A run is progress once it lasts this many times its startup, from the start of the last rank to the first output (ours)."""
SILENT: Final = 60.0
"""The same for a script that prints nothing, in seconds (ours)."""


def counts_as_progress(uptime: float, startup: float | None) -> bool:
    """Return whether a run of *uptime* seconds without a fault is progress, if its first output came after *startup* seconds (None: never).

    A script that always fails later than that is stopped by the budgets of restarts and recoveries.
    """
    return uptime >= (SILENT if startup is None else max(LEAST, STARTS * startup))
