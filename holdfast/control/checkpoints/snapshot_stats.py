"""Staleness and cost of in-memory snapshots, and what a recovery did inside the workers: from the ranks' reports to the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from holdfast.control.agents.events import SnapshotFacts, WorkerCoverage, WorkerRegrouped
from holdfast.control.state.generation import GenerationState, RankState
from holdfast.history import models
from holdfast.history.recorder import Recorder

NOTHING: Final = SnapshotFacts()
"""The report of a rank that has sent none."""


def snapshot_age(state: GenerationState) -> int | None:
    """Return the staleness in steps of the newest snapshot that all ranks have completed; None as long as one of them has none.

    Each rank's staleness comes from one of its own messages: lost ranks, whose last message may be older, add nothing.
    """
    age: int | None = _over_all(state.ranks.values(), _age, max)
    return age


def row_of(state: GenerationState, job_id: str, now: float, ages: Mapping[int, int]) -> models.Snapshots | None:
    """Return the history's row of this generation's snapshots, or None as long as no rank has reported; *ages* is their histogram."""
    views = list(state.ranks.values())
    reports = [_report(view) for view in views]
    if not any(one.model_fields_set for one in reports):
        return None
    return models.Snapshots(
        job_id=job_id,
        generation=state.generation,
        at=max([view.beat_at for view in views if _report(view).model_fields_set], default=now),
        step=_over_all(views, lambda view: _report(view).step, min),
        age_steps=snapshot_age(state),
        age_s=_over_all(views, lambda view: _report(view).age, max),
        replica_step=_over_all(views, lambda view: None if view.beat is None else view.beat.replica, min),
        interval_steps=max((one.every for one in reports if one.every), default=None),
        size=sum(one.size for one in reports) or None,
        copied_s=sum(one.copied for one in reports),
        overlapped_s=sum(one.overlapped for one in reports),
        cost_s=sum(one.slowed for one in reports),
        trained_s=sum(one.trained for one in reports),
        ages={str(age): number for age, number in sorted(ages.items())},
        reason=next((one.why for one in reports if one.why), ""),
    )


class SnapshotStats:
    """Keeps the history's row of the current generation up to date."""

    def __init__(self, recorder: Recorder, job_id: str) -> None:
        self._recorder, self._job_id = recorder, job_id
        self._generation = 0
        self._ages: Counter[int] = Counter()
        self._written: models.Snapshots | None = None

    def reattach(self, row: models.Snapshots | None) -> None:
        """Continue the counts of the last controller."""
        if row is not None:
            self._generation, self._ages = row.generation, Counter({int(age): int(number) for age, number in row.ages.items()})

    def poll(self, state: GenerationState, now: float, *, training: bool) -> None:
        """Record what is new on *state*; the staleness is counted while the job is *training*."""
        if state.generation != self._generation:
            self._generation, self._ages = state.generation, Counter()
        age = snapshot_age(state)
        if training and age is not None:
            self._ages[age] += 1
        self.record(state, now)

    def record(self, state: GenerationState, now: float) -> None:
        """Record what is new on *state*."""
        row = row_of(state, self._job_id, now, self._ages)
        if row is None or row == self._written:
            return
        if self._written is None or self._written.generation != row.generation:
            self._recorder.add(row)
        self._recorder.amend(models.Snapshots, (row.job_id, row.generation), **row.model_dump(exclude={"job_id", "generation"}))
        self._written = row


def _report(view: RankState) -> SnapshotFacts:
    return NOTHING if view.beat is None else view.beat.snapshot


def _age(view: RankState) -> int | None:
    step, newest = view.beat.step if view.beat is not None else None, _report(view).step
    return None if step is None or newest is None else max(0, step - newest)


def _over_all(views: Iterable[RankState], value: Callable[[RankState], Any], pick: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401 (of value's kind)
    """Return one rank's value for all of them, or None where any has none."""
    values = [value(view) for view in views]
    return None if not values or None in values else pick(values)


def restart_facts(ranks: Iterable[RankState]) -> dict[str, Any] | None:
    """Return where restarted processes got their state, and how many of them from replicas; None before all have reported."""
    views = list(ranks)
    if not views or not all(view.resumed for view in views):
        return None
    source = "checkpoint" if any(view.resumed_from for view in views) else "memory"
    return {"source": source, "replicas": sum(view.resumed_replica for view in views)}


def regroup_facts(regrouped: Mapping[int, WorkerRegrouped], covered: Mapping[int, WorkerCoverage]) -> dict[str, Any] | None:
    """Return what an in-process recovery did, or None when no rank has reported.

    ``seconds``: by phase, of the slowest rank. ``rebuilt``, ``kept``: groups, of the rank with most. ``bytes``: state that was transferred;
    ``replicas``: ranks that got it from replicas in the memory of nodes; ``bandwidth``: bytes a second, of the slowest transfer;
    ``interfaces``: addresses of the ranks. ``coverage``: by activated rank the calls of its first step, how many of them its warm-up had
    covered, and the kinds that were new.
    """
    if not regrouped:
        return None
    reports = list(regrouped.values())
    source = reports[0].source
    phases = dict.fromkeys(name for one in reports for name in one.seconds)
    return {
        "source": source,
        "seconds": {name: max(one.seconds.get(name, 0.0) for one in reports if one.seconds) for name in phases},
        "rebuilt": max(one.rebuilt for one in reports),
        "kept": max(one.kept for one in reports),
        "bytes": sum(one.bytes for one in reports) // (1 if source == "memory" else 2),  # between ranks both ends count it
        "replicas": sum(one.replica for one in reports),
        "bandwidth": min((one.bandwidth for one in reports if one.bandwidth), default=None),
        "interfaces": sorted({one.interface for one in reports if one.interface}),
        "coverage": {str(rank): one.model_dump(include={"calls", "foreseen", "first_met"}) for rank, one in covered.items()},
    }
