"""What a recovery did inside the workers, as they told of it: for the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.control.agents.events import WorkerCoverage, WorkerRegrouped
from holdfast.control.state.generation import RankState


def restart_facts(ranks: Iterable[RankState]) -> dict[str, Any] | None:
    """Return where the state of processes came from that were all started anew, and how many of them took it from replicas."""
    told = list(ranks)
    if not told or not all(view.resumed for view in told):
        return None
    source = "checkpoint" if any(view.resumed_from for view in told) else "memory"
    return {"source": source, "replicas": sum(view.resumed_replica for view in told)}


def facts_of(regrouped: Mapping[int, WorkerRegrouped], covered: Mapping[int, WorkerCoverage]) -> dict[str, Any] | None:
    """Return what came of it, or None when no rank has told.

    ``seconds``: by phase, of the slowest rank. ``rebuilt``, ``kept``: groups, of the rank with most. ``bytes``: state that was taken;
    ``replicas``: ranks that took it from replicas in the memory of nodes; ``bandwidth``: bytes a second, of the slowest transfer;
    ``interfaces``: addresses the ranks are reached at. ``coverage``: by promoted rank the calls of its first step, how many of them its
    warm-up had foreseen, and the kinds that were new.
    """
    if not regrouped:
        return None
    told = list(regrouped.values())
    source = told[0].source
    names = dict.fromkeys(name for one in told for name in one.seconds)
    return {
        "source": source,
        "seconds": {name: max(one.seconds.get(name, 0.0) for one in told if one.seconds) for name in names},
        "rebuilt": max(one.rebuilt for one in told),
        "kept": max(one.kept for one in told),
        "bytes": sum(one.bytes for one in told) // (1 if source == "memory" else 2),  # between ranks both ends count it
        "replicas": sum(one.replica for one in told),
        "bandwidth": min((one.bandwidth for one in told if one.bandwidth), default=None),
        "interfaces": sorted({one.interface for one in told if one.interface}),
        "coverage": {str(rank): one.model_dump(include={"calls", "foreseen", "first_met"}) for rank, one in covered.items()},
    }
