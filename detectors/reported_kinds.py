"""Kinds of faults that come named: whoever meets one says which it is. Training goes on through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from detectors.catalogue import Blame, RecommendedAction, fault_kind
from detectors.evidence import Evidence, Sample, WorkerExit

Row = tuple[str, str, RecommendedAction, str]
"""Kind, title, level, action."""

_WELL: Final = Sample(WorkerExit(node="n0", rank=0, at=0.0, code=0, finished=True, step=9))


def enter(rows: Iterable[Row], *, component: str, source: str, reports: Callable[[str], Evidence]) -> frozenset[str]:
    """Enter *rows* into the catalogue, each with what *reports* it; return the kinds."""
    known = set()
    for name, title, recommended_action, action in rows:
        fault_kind(
            id=name,
            title=title,
            component=component,
            source=source,
            recommended_action=recommended_action,
            blame=Blame.STORAGE,
            action=action,
            unhealthy=Sample(reports(name)),
            healthy=_WELL,
            weight=30,
        )
        known.add(name)
    return frozenset(known)
