"""Shared by the benchmarks: waiting, one Prefect server for all rounds, and the format of results."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from holdfast.prefect.server import TemporaryServer

ROOT: Final = Path(__file__).resolve().parents[1]
PATIENCE: Final = 180.0


def wait_for(condition: Callable[[], Any], what: str, *, every: float = 0.002, seconds: float = PATIENCE) -> Any:  # noqa: ANN401 (whatever the condition returns)
    """Return the first true result of *condition*; raise TimeoutError after *seconds*."""
    until = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(every)
    return answer


@contextmanager
def prefect(place: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a Prefect server that serves all rounds."""
    server = TemporaryServer(place / "prefect", "server.log", {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        server.wait()
        yield server.environment
    finally:
        server.close()


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, P99 (the maximum for fewer than a hundred values), number and range of *values*."""
    ordered = sorted(values)
    if not ordered:
        return {"median": None, "p99": None, "n": 0}
    return {
        "median": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        "n": len(ordered),
        "range": [round(ordered[0], 4), round(ordered[-1], 4)],
    }


def figure(values: Sequence[float], goal: Any, goals_met: dict[str, bool], **details: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """Return one entry of the results: the spread of *values*, the goals, and whether each was met."""
    met = bool(values) and all(goals_met.values())
    return {**spread(values), "goal": goal, "met": met, "goals_met": goals_met, **details}
