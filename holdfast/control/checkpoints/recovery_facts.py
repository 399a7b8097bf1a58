"""What a recovery did inside the workers, as they told of it: for the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.control.state.generation import RankState
from holdfast.protocol import Message


def came_back(ranks: Iterable[RankState]) -> dict[str, Any] | None:
    """Return where the state of processes came from that were all started anew, and how many of them took it from replicas."""
    told = list(ranks)
    if not told or not all(view.resumed for view in told):
        return None
    source = "checkpoint" if any(view.resumed_from for view in told) else "memory"
    return {"source": source, "replicas": sum(view.resumed_replica for view in told)}


def facts_of(regrouped: Mapping[int, Message], covered: Mapping[int, Message]) -> dict[str, Any] | None:
    """Return what came of it, or None when no rank has told.

    ``seconds``: by phase, of the slowest rank. ``rebuilt``, ``kept``: groups, of the rank with most. ``bytes``: state that was taken;
    ``replicas``: ranks that took it from replicas in the memory of nodes; ``bandwidth``: bytes a second, of the slowest transfer;
    ``interfaces``: addresses the ranks are reached at. ``coverage``: by promoted rank the calls of its first step, how many of them its
    warm-up had foreseen, and the kinds that were new.
    """
    if not regrouped:
        return None
    told = list(regrouped.values())
    source = str(told[0].get("source", ""))
    names = dict.fromkeys(name for one in told for name in one.get("seconds") or {})
    speeds = [one["bandwidth"] for one in told if one.get("bandwidth")]
    return {
        "source": source,
        "seconds": {name: max(float(one["seconds"].get(name, 0.0)) for one in told if one.get("seconds")) for name in names},
        "rebuilt": max(int(one.get("rebuilt", 0)) for one in told),
        "kept": max(int(one.get("kept", 0)) for one in told),
        "bytes": sum(int(one.get("bytes", 0)) for one in told) // (1 if source == "memory" else 2),  # between ranks both ends count it
        "replicas": sum(bool(one.get("replica")) for one in told),
        "bandwidth": min(speeds, default=None),
        "interfaces": sorted({str(one["interface"]) for one in told if one.get("interface")}),
        "coverage": {str(rank): {name: one.get(name) for name in ("calls", "foreseen", "first_met")} for rank, one in covered.items()},
    }
