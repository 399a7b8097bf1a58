"""Everything that the history has about one job, read once, for its report page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import sqlalchemy
from sqlmodel import col, select

from holdfast.accounting.bill import Bill, bill
from holdfast.accounting.losses import FailureCosts
from holdfast.accounting.timeline_reader import recovered_at
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
from holdfast.report.pages.charts.thinning import Floats, Places
from holdfast.report.pages.configuration import gpus_of

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class OfIncident(Protocol):
    """A row that may belong to an incident."""

    incident_id: Any


Row = TypeVar("Row", bound=OfIncident)
_COLUMNS: Final = np.dtype(
    [("generation", "i8"), ("step", "i8"), *((name, "f8") for name in ("at", "seconds", "loss", "samples", "tokens"))]
)
MOST_INCIDENTS: Final = 80
"""Incidents that have a card on the page, the newest ones."""
LARGEST_LOSS = 1e30
"""A greater loss counts as infinite: it would break the arithmetic of a plot."""


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Every reported step, ordered by generation and time: one array per column, all of the same length."""

    generation: Places
    step: Places
    at: Floats
    seconds: Floats
    loss: Floats
    """NaN without a finite loss."""
    samples: Floats
    """Of all ranks, since the report before; NaN where they are not reported."""
    tokens: Floats
    """As `samples`."""
    lost: Flags
    """True if a later generation rolled back this step."""

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def kept(self) -> Places:
        """Return the positions of the steps that were kept, in ascending step."""
        positions = np.flatnonzero(~self.lost)
        return positions[np.argsort(self.step[positions], kind="stable")].astype(np.int64)

    @property
    def with_loss(self) -> bool:
        """Return whether there is any finite loss."""
        return bool(np.isfinite(self.loss).any())

    @cached_property
    def weights(self) -> Floats:
        """Return how many steps each report stands for: a script may report every tenth step only."""
        found = np.ones(len(self))
        for number in np.unique(self.generation):
            positions = np.flatnonzero(self.generation == number)
            between = np.diff(self.step[positions]).clip(min=1)
            if len(between):
                found[positions] = np.concatenate(([between.min()], between))
        return found

    @cached_property
    def per_step(self) -> Floats:
        """Return the seconds of each step: what was reported, or where steps were left out, the time since the report before."""
        found = self.seconds.copy()
        for number in np.unique(self.generation):
            positions = np.flatnonzero(self.generation == number)
            counted = self.weights[positions][1:]
            left_out = counted > 1
            found[positions[1:][left_out]] = (np.diff(self.at[positions]) / counted)[left_out]
        return np.nan_to_num(found, nan=0.0, posinf=0.0)


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """The history of one job, in order of time."""

    job: Job
    now: float
    transitions: Sequence[JobTransition]
    generations: Sequence[Generation]
    cases: Sequence[IncidentCase]
    loose_faults: Sequence[FaultRecord]
    """Faults without an incident."""
    status_changes: Sequence[NodeStatusChange]
    checkpoints: Sequence[Checkpoint]
    snapshots: Sequence[Snapshots]
    """In-memory snapshots by generation."""
    job_events: Sequence[JobEvent]
    steps: StepColumns
    bill: Bill
    """What the job's time was used for."""
    gpus: str = ""
    """GPUs and driver of the job's nodes, as the last health check found them; empty if unknown."""
    flow_run_url: str = ""
    """Page of the job's newest flow run in the Prefect UI; empty without one."""

    @property
    def state(self) -> str:
        """Return the newest state, ``LAUNCHING`` before the first transition."""
        return self.transitions[-1].after if self.transitions else "LAUNCHING"

    @property
    def ended(self) -> bool:
        """Return whether the job is in a terminal state."""
        return self.state in TERMINAL

    @property
    def losses(self) -> FailureCosts:
        """Return what failures cost the job."""
        return self.bill.costs

    @property
    def has_controller(self) -> bool:
        """Return whether a controller runs the job."""
        return any(one.job.has_controller for one in self.bill.jobs)

    @cached_property
    def end(self) -> float:
        """Return when the job ended, or until when it is known: now, or without a controller its last sign of life."""
        return max([self.job.at, *(one.job.end for one in self.bill.jobs)])

    @property
    def wall_seconds(self) -> float:
        """Return the seconds that the job has taken so far."""
        return max(0.0, self.end - self.job.at)

    @property
    def shown_cases(self) -> Sequence[IncidentCase]:
        """Return the incidents that have a card on the page."""
        return self.cases[-MOST_INCIDENTS:]

    @cached_property
    def generation_ends(self) -> list[tuple[Generation, float]]:
        """Return each generation with its end (seconds since 1970): its own, the begin of the next one, or the end of the job."""
        after = [*(one.at for one in self.generations[1:]), self.end]
        return [(one, one.ended_at or end) for one, end in zip(self.generations, after, strict=True)]

    @cached_property
    def _with_card(self) -> frozenset[int]:
        return frozenset(case.incident.number for case in self.shown_cases)

    def anchor(self, incident: Incident) -> str:
        """Return the address of the card of *incident* within the page, or of the list if it has none."""
        return f"#incident-{incident.number}" if incident.number in self._with_card else "#incidents"

    def downtime(self, incident: Incident) -> float:
        """Return the downtime of an incident in seconds, until the end while it is open; one that passed by itself has none."""
        return 0.0 if incident.outcome == "passed" else max(0.0, recovered_at(incident, self.end) - incident.fault_at)


def read_history(history: History, job: Job, *, now: float) -> JobHistory:
    """Read everything that the history has about *job*."""
    transitions, generations = queries.transitions(history, job.id), queries.generations(history, job.id)
    faults = _by_incident(queries.faults(history, job.id))
    return JobHistory(
        job=job,
        now=now,
        transitions=transitions,
        generations=generations,
        cases=_cases(history, job, faults),
        loose_faults=faults[None],
        status_changes=_status_changes(history, job, transitions[-1].at + 1 if transitions and transitions[-1].after in TERMINAL else now),
        checkpoints=queries.checkpoints(history, job.id),
        snapshots=queries.snapshots(history, job.id),
        job_events=queries.job_events(history, job.id),
        steps=_steps(history, job, generations),
        bill=bill(history, job, now=now),
        gpus=gpus_of(history, job),
        flow_run_url=flow_run_url(history, job.id),
    )


def _cases(history: History, job: Job, faults: Mapping[str | None, list[FaultRecord]]) -> list[IncidentCase]:
    decisions = _by_incident(queries.decisions(history, job.id))
    phases = _by_incident(queries.phases(history, job_id=job.id))
    diagnoses = _by_incident(queries.diagnoses(history, job.id))
    return [
        IncidentCase(
            incident=one, faults=faults.get(one.id, []), decisions=decisions[one.id], phases=phases[one.id], diagnoses=diagnoses[one.id]
        )
        for one in queries.incidents(history, job.id)
    ]


def _by_incident(rows: Iterable[Row]) -> defaultdict[str | None, list[Row]]:
    found: defaultdict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.incident_id].append(row)
    return found


def _status_changes(history: History, job: Job, until: float) -> list[NodeStatusChange]:
    """Return the status changes of the nodes of the job's cluster before the job ended."""
    cluster = str(job.cluster.get("name", ""))
    wanted = (
        select(NodeStatusChange)
        .where(NodeStatusChange.cluster == cluster, col(NodeStatusChange.at) <= until)
        .order_by(col(NodeStatusChange.id))
    )
    with history.session() as session:
        return list(session.exec(wanted))


def _steps(history: History, job: Job, generations: Sequence[Generation]) -> StepColumns:
    """Read the steps as columns of numbers: a million rows as objects would take longer than everything else."""
    columns = sqlalchemy.select(*(col(getattr(StepRecord, name)) for name in _COLUMNS.names or ()))
    with history.session() as session:
        wanted = columns.where(col(StepRecord.job_id) == job.id).order_by(col(StepRecord.generation), col(StepRecord.step))
        found = session.connection().execute(wanted, execution_options={"yield_per": 20_000})
        table = np.fromiter((tuple(row) for row in found), dtype=_COLUMNS)
    with np.errstate(invalid="ignore"):
        usable = np.abs(table["loss"]) < LARGEST_LOSS
    return StepColumns(
        generation=table["generation"],
        step=table["step"],
        at=table["at"],
        seconds=table["seconds"],
        loss=np.where(usable, table["loss"], np.nan),
        samples=table["samples"],
        tokens=table["tokens"],
        lost=_lost_steps(table["generation"], table["step"], generations),
    )


def _lost_steps(generation: Places, step: Places, generations: Sequence[Generation]) -> Flags:
    """Mark each step that a later generation rolled back, whether or not it has been computed again.

    A generation rolls back to the step that it resumed from; one that did not report it, to before its first step.
    """
    resumed: dict[int, int] = {one.number: one.resumed_step for one in generations if one.resumed_step is not None}
    numbers, firsts = np.unique(generation, return_index=True)
    for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
        resumed[number] = int(step[first]) - 1
    marked = np.zeros(len(step), dtype=np.bool_)
    for number, first, last in zip(numbers.tolist(), firsts.tolist(), np.append(firsts, len(step))[1:].tolist(), strict=True):
        later = [step_before for other, step_before in resumed.items() if other > number]
        if later:
            marked[first:last] = step[first:last] > min(later)
    return marked
