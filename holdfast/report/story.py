"""All that the history knows about one job, read once, in the form in which the page tells it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import sqlalchemy
from sqlmodel import col, select

from holdfast.accounting.losses import FailureCosts, losses
from holdfast.accounting.timeline_reader import back_at
from holdfast.history import queries
from holdfast.history.lease import flow_run_url
from holdfast.history.models import (
    Checkpoint,
    FaultRecord,
    Generation,
    Incident,
    Job,
    JobEvent,
    JobTransition,
    NodeStatusChange,
    Snapshots,
    StepRecord,
)
from holdfast.history.queries import TERMINAL
from holdfast.history.store import History
from holdfast.report.case import IncidentCase
from holdfast.report.thinning import Floats, Places

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class OfIncident(Protocol):
    """A row that may hang on an incident."""

    incident_id: Any


Row = TypeVar("Row", bound=OfIncident)
_COLUMNS: Final = np.dtype([("generation", "i8"), ("step", "i8"), ("at", "f8"), ("seconds", "f8"), ("loss", "f8")])
LARGEST_LOSS = 1e30
"""A loss beyond this is as lost as an infinite one, and would only break the arithmetic of a plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorySteps:
    """Every step that was reported, ordered by generation and time: one array a column, all of one length."""

    generation: Places
    step: Places
    at: Floats
    seconds: Floats
    loss: Floats
    """NaN where there is none or none that is finite."""
    given_up: Flags
    """True where a later generation went back before this step."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def kept(self) -> Places:
        """Return the places of the steps that count, in ascending step."""
        places = np.flatnonzero(~self.given_up)
        return places[np.argsort(self.step[places], kind="stable")].astype(np.int64)

    @property
    def with_loss(self) -> bool:
        """Say whether there is any finite loss."""
        return bool(np.isfinite(self.loss).any())


@dataclass(frozen=True, kw_only=True)
class Story:
    """One job's history, in order of time."""

    job: Job
    now: float
    moves: Sequence[JobTransition]
    generations: Sequence[Generation]
    cases: Sequence[IncidentCase]
    loose_faults: Sequence[FaultRecord]
    """Faults that no incident answers."""
    node_moves: Sequence[NodeStatusChange]
    checkpoints: Sequence[Checkpoint]
    snapshots: Sequence[Snapshots]
    """What each generation had in the memory of nodes."""
    job_events: Sequence[JobEvent]
    steps: StorySteps
    losses: FailureCosts
    flow_run_url: str = ""
    """Page of the job's newest flow run in the Prefect UI; empty where it has none."""

    @property
    def state(self) -> str:
        """Return the newest state, ``LAUNCHING`` before the first move."""
        return self.moves[-1].after if self.moves else "LAUNCHING"

    @property
    def ended(self) -> bool:
        """Say whether nothing can follow."""
        return self.state in TERMINAL

    @cached_property
    def end(self) -> float:
        """Return when the job ended, or *now* while it has not."""
        return self.moves[-1].at if self.ended else max(self.now, self.job.at)

    @property
    def wall_seconds(self) -> float:
        """Return how long the job has taken so far."""
        return max(0.0, self.end - self.job.at)

    def downtime(self, incident: Incident) -> float:
        """Return the seconds that an incident kept the job from training, until the end while it is open."""
        return max(0.0, back_at(incident, self.end) - incident.fault_at)


def gather(history: History, job: Job, *, now: float) -> Story:
    """Read all that the history knows about *job*."""
    moves, generations = queries.moves(history, job.id), queries.generations(history, job.id)
    faults = _by_incident(queries.faults(history, job.id))
    return Story(
        job=job,
        now=now,
        moves=moves,
        generations=generations,
        cases=_cases(history, job, faults),
        loose_faults=faults[None],
        node_moves=_node_moves(history, job, moves[-1].at + 1 if moves and moves[-1].after in TERMINAL else now),
        checkpoints=queries.checkpoints(history, job.id),
        snapshots=queries.snapshots(history, job.id),
        job_events=queries.job_events(history, job.id),
        steps=_steps(history, job, generations),
        losses=losses(history, job, now=now),
        flow_run_url=flow_run_url(history, job.id),
    )


def _cases(history: History, job: Job, faults: Mapping[str | None, list[FaultRecord]]) -> list[IncidentCase]:
    decisions = _by_incident(queries.decisions(history, job.id))
    phases = _by_incident(queries.phases(history, job_id=job.id))
    verdicts = _by_incident(queries.verdicts(history, job.id))
    return [
        IncidentCase(
            incident=one, faults=faults.get(one.id, []), decisions=decisions[one.id], phases=phases[one.id], verdicts=verdicts[one.id]
        )
        for one in queries.incidents(history, job.id)
    ]


def _by_incident(rows: Iterable[Row]) -> defaultdict[str | None, list[Row]]:
    found: defaultdict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.incident_id].append(row)
    return found


def _node_moves(history: History, job: Job, until: float) -> list[NodeStatusChange]:
    """Return what befell the nodes of the job's cluster before the job ended."""
    cluster = str(job.cluster.get("name", ""))
    wanted = (
        select(NodeStatusChange)
        .where(NodeStatusChange.cluster == cluster, col(NodeStatusChange.at) <= until)
        .order_by(col(NodeStatusChange.id))
    )
    with history.session() as session:
        return list(session.exec(wanted))


def _steps(history: History, job: Job, generations: Sequence[Generation]) -> StorySteps:
    """Read the steps as bare numbers: a million rows as objects would take longer than all the rest."""
    columns = sqlalchemy.select(*(col(getattr(StepRecord, name)) for name in _COLUMNS.names or ()))
    with history.session() as session:
        wanted = columns.where(col(StepRecord.job_id) == job.id).order_by(col(StepRecord.generation), col(StepRecord.step))
        found = session.connection().execute(wanted, execution_options={"yield_per": 20_000})
        table = np.fromiter((tuple(row) for row in found), dtype=_COLUMNS)
    with np.errstate(invalid="ignore"):
        usable = np.abs(table["loss"]) < LARGEST_LOSS
    return StorySteps(
        generation=table["generation"],
        step=table["step"],
        at=table["at"],
        seconds=table["seconds"],
        loss=np.where(usable, table["loss"], np.nan),
        given_up=_given_up(table["generation"], table["step"], generations),
    )


def _given_up(generation: Places, step: Places, generations: Sequence[Generation]) -> Flags:
    """Mark each step that a later generation went back before, whether or not it has come that far again.

    A generation goes back to the step it resumed from; one that reported steps without saying where it resumed, to before its first.
    """
    back_to: dict[int, int] = {one.number: one.resumed_step for one in generations if one.resumed_step is not None}
    numbers, firsts = np.unique(generation, return_index=True)
    for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
        back_to[number] = int(step[first]) - 1
    marked = np.zeros(len(step), dtype=np.bool_)
    for number, first, last in zip(numbers.tolist(), firsts.tolist(), np.append(firsts, len(step))[1:].tolist(), strict=True):
        later = [goal for other, goal in back_to.items() if other > number]
        if later:
            marked[first:last] = step[first:last] > min(later)
    return marked
