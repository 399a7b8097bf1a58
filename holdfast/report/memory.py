"""The snapshots in memory in words: how old the newest is, what they cost, and why there are none. The same in status and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from holdfast.history.models import FaultRecord, Snapshots
from holdfast.report.wording import count, duration, plural, share

NO_SNAPSHOTS: Final = frozenset({"memory-none", "snapshot-no-memory"})
"""Faults that leave a rank without snapshots."""
NO_REPLICAS: Final = frozenset({"memory-none", "memory-limit", "replica-lost"})
"""Faults that leave a rank's snapshots without replicas."""
FAULTS: Final = NO_SNAPSHOTS | NO_REPLICAS
IN_MEMORY: Final = frozenset({"replica-behind", "snapshot-no-memory", "snapshot-spoiled"})
"""Troubles of snapshots that are recorded as those of checkpoints are, and concern none on disk."""
STALE: Final = 5.0
"""Seconds after which it is said how long ago the ranks told."""


def last(row: Snapshots) -> str:
    """Say which snapshot was the newest of a job that has ended: nodes give the memory back."""
    return f"given back; at the end step {count(row.step)}, {plural(row.age_steps or 0, 'step')} old"


def newest(row: Snapshots, fault: FaultRecord | None, spec: Mapping[str, Any], now: float) -> str:
    """Say which snapshot is the newest, how old it is, and whether another node has it; *fault* is the newest of `FAULTS`."""
    told = f", as told {duration(now - row.at)} ago" if now - row.at > STALE else ""
    age = f"{plural(row.age_steps or 0, 'step')} ({duration(row.age_s)}) old"
    return f"step {count(row.step)}, {age}{told}; {_elsewhere(row, fault, spec)}"


def _elsewhere(row: Snapshots, fault: FaultRecord | None, spec: Mapping[str, Any]) -> str:
    if row.replica_step is not None:
        return "also on another node" if row.replica_step == row.step else f"on another node up to step {count(row.replica_step)}"
    if _plan(spec).get("replicas") == 0:
        return "on no other node (`checkpoint.memory.replicas` is 0)"
    if fault is not None and fault.kind in NO_REPLICAS and fault.generation == row.generation:
        return f"on no other node: {_quoted(fault)}"
    return "on no other node yet"


def upkeep(rows: Sequence[Snapshots]) -> str:
    """Say how often snapshots were taken in the newest of *rows*, and what they cost in all of them."""
    every = next((row.every for row in reversed(rows) if row.every), 1)
    said = ["every step" if every == 1 else f"every {every:,} steps"]
    whole = total(rows)
    if whole.hidden is not None:
        said.append(f"{share(whole.hidden)} of the copying hidden in waits")
    if whole.cost is not None:
        said.append(f"{share(whole.cost)} of the training time")
    return ", ".join(said)


def total(rows: Sequence[Snapshots]) -> Snapshots:
    """Return the sums over generations; what is not a sum is the newest's."""
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("copied_s", "overlapped_s", "cost_s", "trained_s")}
    ages: Counter[str] = Counter()
    for row in rows:
        ages.update({name: int(number) for name, number in row.ages.items()})
    return Snapshots(**rows[-1].model_dump() | sums | {"ages": dict(ages)})


def usual_age(row: Snapshots) -> str:
    """Say how old the newest snapshot was for the most part: ``in the median 1 step old, at most 3``; empty when nobody has looked."""
    ages = sorted((int(age), int(number)) for age, number in row.ages.items())
    seen = list(accumulate(number for _, number in ages))
    if not seen or not seen[-1]:
        return ""
    usual = next(age for (age, _), sofar in zip(ages, seen, strict=True) if 2 * sofar >= seen[-1])
    return f"in the median {plural(usual, 'step')} old" + (f", at most {ages[-1][0]:,}" if ages[-1][0] > usual else "")


def why_none(row: Snapshots | None, fault: FaultRecord | None, spec: Mapping[str, Any], *, ended: bool) -> str:
    """Say why there is no snapshot; empty where there is one, and of a job that ended before anybody kept a record of that."""
    if row is not None and row.step is not None:
        return ""
    if _plan(spec).get("every") == 0:
        return "none: `checkpoint.memory.every` is 0"
    if row is not None and row.reason:
        return f"none: {row.reason}"
    if fault is not None and fault.kind in NO_SNAPSHOTS:
        return f"none: {_quoted(fault)}"
    return "" if ended else "none yet: they begin a few steps after `holdfast.session` does"


def _quoted(fault: FaultRecord) -> str:
    quote = str(fault.evidence.get("quote") or "")
    return f"{fault.kind} on {fault.subject}" + (f" ({quote})" if quote else "")


def _plan(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a job of any version says of snapshots."""
    checkpoint = spec.get("checkpoint")
    memory = checkpoint.get("memory") if isinstance(checkpoint, dict) else None
    return memory if isinstance(memory, dict) else {}
