"""Fault traces of real clusters: read, checked, and scaled to other sizes by drawing their nodes anew.

The trace that comes with Holdfast is of InfiniteHBD (SIGCOMM 2025, arXiv:2502.03885): 400 servers of 8 GPUs over 348 days, under the
Apache License 2.0 (`data/infinitehbd_LICENSE`). All its faults took the server out of service, so all of them interrupt
a simulated job on it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from holdfast.errors import BadFile, Problem
from holdfast.simulator.causes import Cause, cause_in_trace
from holdfast.spec.files.problems import shown

DAY: Final = 86_400.0
SERVERS: Final = {"infinitehbd": 400}
"""Servers of a trace, including those that never had a fault and are not in the file."""
MAX_BYTES: Final = 200 * 2**20
MAX_GAP: Final = 60 * DAY
"""A longer time without any event is a hole in the recording, at least if it is this many times the median:"""
GAP_RATIO: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One node out of service."""

    at: float
    """Seconds since the beginning of the trace."""
    seconds: float
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrace:
    """The outages of each server, in order; servers without any are empty."""

    servers: Sequence[Sequence[Outage]]
    seconds: float
    """Length of the trace."""

    @property
    def outages(self) -> list[Outage]:
        """Return all outages in the order of their time."""
        return sorted((one for some in self.servers for one in some), key=lambda one: one.at)

    @property
    def per_1000_node_days(self) -> float:
        """Return the rate of outages."""
        return len(self.outages) / (len(self.servers) * self.seconds / DAY) * 1000


@lru_cache(maxsize=4)
def load_trace(name: str) -> FaultTrace:
    """Return the trace that comes with Holdfast under this *name*, or the one in the file *name*; raise `BadFile` with all its problems."""
    if name in SERVERS:
        data = gzip.decompress((resources.files("holdfast.simulator") / f"data/{name}_fault_trace.json.gz").read_bytes())
        return _parsed(json.loads(data), name, SERVERS[name])
    return _parsed(_read(Path(name)), name, 0)


def _read(path: Path) -> Any:  # noqa: ANN401 (any JSON)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refused(path, "is larger than 200 MiB", "Cut it into shorter ones")
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}", "Check the path") from None
    except (ValueError, EOFError) as error:
        raise _refused(path, f"is not JSON: {error}", "Write a list of events; `holdfast/simulator/data` has an example") from None


def _refused(path: Path | str, reason: str, cure: str, field: str = "file") -> BadFile:
    return BadFile(shown(str(path)), (Problem(field=field, reason=reason, cure=cure),))


def _parsed(data: Any, name: str, servers: int) -> FaultTrace:  # noqa: ANN401 (any JSON)
    """Return the trace in *data*, of at least as many *servers*."""
    if not isinstance(data, list) or not data:
        raise _refused(name, "is not a list of events", "Write objects with node_id, event_time (days), event_type and fault_type")
    events = [_event(one, place, name) for place, one in enumerate(data)]
    times = [at for _, at, _, _ in events]
    if problems := tuple(_holes(times)):
        raise BadFile(shown(name), problems)
    open_faults, found = defaultdict[str, list[tuple[float, Cause]]](list), defaultdict[str, list[Outage]](list)
    for place, (node, at, starts, cause) in enumerate(events):
        if starts:
            open_faults[node].append((at, cause))
        elif not open_faults[node]:
            raise _refused(name, f"a fault of {shown(node)} ends that never started", "Add its `fault_start`", f"event {place}")
        else:
            began, why = open_faults[node].pop(0)
            found[node].append(Outage(at=began, seconds=at - began, cause=why))
    if left := next(((node, some[0][0]) for node, some in open_faults.items() if some), None):
        reason = f"a fault of {shown(left[0])} starts at {left[1] / DAY:g} d and never ends"
        raise _refused(name, reason, "Add its `fault_end`, or leave the fault out")
    known = [sorted(some, key=lambda one: one.at) for some in found.values()]
    known += [[] for _ in range(servers - len(known))]
    return FaultTrace(servers=known, seconds=max(times) - min(0.0, *times))


def _event(one: Any, place: int, name: str) -> tuple[str, float, bool, Cause]:  # noqa: ANN401 (any JSON)
    """Return node, time in seconds, whether a fault starts, and its cause."""
    try:
        kind, fault = one["event_type"], one["fault_type"]
        at = float(one["event_time"]) * DAY
        if kind not in {"fault_start", "fault_end"} or not 0 <= at < float("inf"):
            raise ValueError(kind)  # noqa: TRY301 (one place answers for all of them)
        return str(one["node_id"]), at, kind == "fault_start", cause_in_trace(str(fault["Class"]), str(fault["Desc"]))
    except (KeyError, TypeError, ValueError):
        cure = "Write node_id, event_time (days, at least 0), event_type (fault_start or fault_end) and fault_type {Level, Class, Desc}"
        raise _refused(name, f"{shown(json.dumps(one))} is not an event", cure, f"event {place}") from None


def _holes(times: Sequence[float]) -> Iterator[Problem]:
    """Yield what is wrong with the order of events, and with times without any."""
    usual = median([after - before for before, after in pairwise(times)]) if len(times) > 1 else 0.0
    for place, (before, after) in enumerate(pairwise(times), 1):
        if after < before:
            reason = f"its time, {after / DAY:g} d, is before that of the event above it"
            yield Problem(field=f"event {place}", reason=reason, cure="Sort the events by time")
            return
        if after - before > max(MAX_GAP, GAP_RATIO * usual):
            reason = f"nothing is recorded from {before / DAY:g} d to {after / DAY:g} d: as if no node had failed"
            yield Problem(field=f"event {place}", reason=reason, cure="Cut the trace there, and simulate the parts")
            return
