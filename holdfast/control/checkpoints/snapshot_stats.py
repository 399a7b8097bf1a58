"""How old the newest snapshot in memory is, and what snapshots cost: from what the ranks tell to the job's history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from holdfast.control.agents.events import SnapshotFacts
from holdfast.control.state.generation import GenerationState, RankState
from holdfast.history import models
from holdfast.history.recorder import Recorder

NOTHING: Final = SnapshotFacts()
"""What a rank has said of which nothing was heard."""


def snapshot_age(board: GenerationState) -> int | None:
    """Return how many steps older than the job the newest snapshot is that all ranks have whole; None as long as one of them has none.

    Each rank's age is from one message of its own: so ranks that were lost, of which the last word may be older, add nothing.
    """
    age: int | None = _all(board.ranks.values(), _age, max)
    return age


def row_of(board: GenerationState, job_id: str, now: float, ages: Mapping[int, int]) -> models.Snapshots | None:
    """Return what *board* knows of its generation's snapshots, or None as long as no rank has told; *ages* were counted before."""
    views = list(board.ranks.values())
    told = [_told(view) for view in views]
    if not any(one.model_fields_set for one in told):
        return None
    return models.Snapshots(
        job_id=job_id,
        generation=board.generation,
        at=max([view.beat_at for view in views if _told(view).model_fields_set], default=now),
        step=_all(views, lambda view: _told(view).step, min),
        age_steps=snapshot_age(board),
        age_s=_all(views, lambda view: _told(view).age, max),
        replica_step=_all(views, lambda view: None if view.beat is None else view.beat.replica, min),
        every=max((one.every for one in told if one.every), default=None),
        size=sum(one.size for one in told) or None,
        copied_s=sum(one.copied for one in told),
        overlapped_s=sum(one.overlapped for one in told),
        cost_s=sum(one.slowed for one in told),
        trained_s=sum(one.trained for one in told),
        ages={str(age): number for age, number in sorted(ages.items())},
        reason=next((one.why for one in told if one.why), ""),
    )


class SnapshotStats:
    """Keeps the history's row of the present generation up to date."""

    def __init__(self, recorder: Recorder, job_id: str) -> None:
        self._recorder, self._job_id = recorder, job_id
        self._generation = 0
        self._ages: Counter[int] = Counter()
        self._written: models.Snapshots | None = None

    def reattach(self, row: models.Snapshots | None) -> None:
        """Go on counting where the flow before left it."""
        if row is not None:
            self._generation, self._ages = row.generation, Counter({int(age): int(number) for age, number in row.ages.items()})

    def poll(self, board: GenerationState, now: float, *, training: bool) -> None:
        """Record what is new on *board*; the age is counted while the job is *training*."""
        if board.generation != self._generation:
            self._generation, self._ages = board.generation, Counter()
        age = snapshot_age(board)
        if training and age is not None:
            self._ages[age] += 1
        self.record(board, now)

    def record(self, board: GenerationState, now: float) -> None:
        """Record what is new on *board*."""
        row = row_of(board, self._job_id, now, self._ages)
        if row is None or row == self._written:
            return
        if self._written is None or self._written.generation != row.generation:
            self._recorder.add(row)
        self._recorder.amend(models.Snapshots, (row.job_id, row.generation), **row.model_dump(exclude={"job_id", "generation"}))
        self._written = row


def _told(view: RankState) -> SnapshotFacts:
    return NOTHING if view.beat is None else view.beat.snapshot


def _age(view: RankState) -> int | None:
    step, newest = view.beat.step if view.beat is not None else None, _told(view).step
    return None if step is None or newest is None else max(0, step - newest)


def _all(views: Iterable[RankState], value: Callable[[RankState], Any], pick: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401 (of value's kind)
    """Return one rank's value for all of them, or None where any has none."""
    values = [value(view) for view in views]
    return None if not values or None in values else pick(values)
