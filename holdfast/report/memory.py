"""In-memory snapshots as text: the age of the newest, what they cost, and why there are none. The same in status and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from holdfast.history.models import FaultRecord, Snapshots
from holdfast.plurals import plural
from holdfast.report.text.wording import count, duration, on_target, share

NO_SNAPSHOTS: Final = frozenset({"memory-none", "snapshot-no-memory"})
"""Faults that leave a rank without snapshots."""
NO_REPLICAS: Final = frozenset({"memory-none", "memory-limit", "replica-lost"})
"""Faults that leave a rank's snapshots without replicas."""
FAULTS: Final = NO_SNAPSHOTS | NO_REPLICAS
IN_MEMORY: Final = frozenset({"replica-lag", "snapshot-no-memory", "snapshot-spoiled"})
"""Problems with snapshots that are recorded like those with checkpoints, but concern none on disk."""
STALE: Final = 5.0
"""Seconds after which the age of a report is shown."""


def last(row: Snapshots) -> str:
    """Describe the newest snapshot of a job that has ended, whose memory is released."""
    return f"released; at the end step {count(row.step)}, {plural(row.age_steps or 0, 'step')} old"


def newest(row: Snapshots, fault: FaultRecord | None, spec: Mapping[str, Any], now: float) -> str:
    """Describe the newest snapshot: its step, its age, and whether another node has it; *fault* is the newest of `FAULTS`."""
    reported = f", as reported {duration(now - row.at)} ago" if now - row.at > STALE else ""
    age = f"{plural(row.age_steps or 0, 'step')} ({duration(row.age_s)}) old"
    return f"step {count(row.step)}, {age}{reported}; {_replicas(row, fault, spec)}"


def _replicas(row: Snapshots, fault: FaultRecord | None, spec: Mapping[str, Any]) -> str:
    if row.replica_step is not None:
        return "replica of the same step" if row.replica_step == row.step else f"replica of step {count(row.replica_step)}"
    if _memory_spec(spec).get("replicas") == 0:
        return "no replica (`checkpoint.memory.replicas` is 0)"
    if fault is not None and fault.kind in NO_REPLICAS and fault.generation == row.generation:
        return f"no replica: {_quoted(fault)}"
    return "no replica yet"


def overhead(rows: Sequence[Snapshots]) -> str:
    """Return the interval of the newest of *rows*, and what snapshots cost in all of them."""
    interval = next((row.interval_steps for row in reversed(rows) if row.interval_steps), 1)
    parts = ["every step" if interval == 1 else f"every {interval:,} steps"]
    sums = total(rows)
    if sums.overlapped is not None:
        parts.append(f"{share(sums.overlapped)} of the copying overlapped with waits")
    if sums.cost is not None:
        parts.append(f"{share(sums.cost)} of the training time")
    return ", ".join(parts)


def total(rows: Sequence[Snapshots]) -> Snapshots:
    """Return the sums over generations; other values are those of the newest."""
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("copied_s", "overlapped_s", "cost_s", "trained_s")}
    ages: Counter[str] = Counter()
    for row in rows:
        ages.update({name: int(number) for name, number in row.ages.items()})
    return Snapshots(**rows[-1].model_dump() | sums | {"ages": dict(ages)})


def typical_age(row: Snapshots) -> str:
    """Return the median and the greatest age of the newest snapshot; empty without samples."""
    ages = sorted((int(age), int(number)) for age, number in row.ages.items())
    counts = list(accumulate(number for _, number in ages))
    if not counts or not counts[-1]:
        return ""
    median = next(age for (age, _), so_far in zip(ages, counts, strict=True) if 2 * so_far >= counts[-1])
    return f"in the median {plural(median, 'step')} old" + (f", at most {ages[-1][0]:,}" if ages[-1][0] > median else "")


def why_none(row: Snapshots | None, fault: FaultRecord | None, spec: Mapping[str, Any], *, ended: bool) -> str:
    """Return why there is no snapshot; empty if there is one, or for an ended job without a record."""
    if row is not None and row.step is not None:
        return ""
    if _memory_spec(spec).get("interval") == 0:
        return "none: `checkpoint.memory.interval` is 0"
    if row is not None and row.reason:
        return f"none: {row.reason}"
    if fault is not None and fault.kind in NO_SNAPSHOTS:
        return f"none: {_quoted(fault)}"
    return "" if ended else "none yet: they begin a few steps after `holdfast.session` does"


def _quoted(fault: FaultRecord) -> str:
    quote = str(fault.evidence.get("quote") or "")
    return f"{fault.kind} on {on_target(fault.target)}" + (f" ({quote})" if quote else "")


def _memory_spec(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``checkpoint.memory`` of a job file of any version."""
    checkpoint = spec.get("checkpoint")
    memory = checkpoint.get("memory") if isinstance(checkpoint, dict) else None
    return memory if isinstance(memory, dict) else {}
