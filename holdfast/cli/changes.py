"""Follow a job through the history: what is new since the last look, as lines for people and records for programs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlmodel import SQLModel

from holdfast.cli.job_view import JobView, newest_whole, placed, until_of
from holdfast.history import queries
from holdfast.history.lease import flow_run_url, holder_of
from holdfast.history.models import Checkpoint, DecisionRecord, Generation, Incident, Job, JobEvent, JobTransition, StepRecord
from holdfast.history.store import History
from holdfast.report.notes import cause_of
from holdfast.report.wording import count, duration, incident_closed, incident_opened, kept_ranks, plural, rank_count
from policies.states import Event

KEPT_STEPS: Final = 200
"""Newest steps kept in memory: for the rate and the curve of the loss."""
IDLE: Final = 2.0
"""Seconds between two full looks while the state stays the same and no incident is open."""

NOTE_AGAIN: Final = 600.0
"""Seconds for which a note of the same cause is not shown again."""
CLOSED_JUST_NOW: Final = 2.0
"""Seconds after an incident in which what happens is still its end: the line that closes it says all of that."""
IN_FULL: Final = frozenset({*queries.TERMINAL, "WAITING"})
"""States of which people are told also while an incident is in work."""
EVIDENCE_LINES: Final = 12
"""Newest lines of a traceback that stand under a failed job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """Something new in a job's life."""

    event: str
    at: float
    text: str
    """For people; empty where only programs want to know."""
    record: dict[str, Any]

    def as_record(self) -> dict[str, Any]:
        """Return the change as one JSON object."""
        return {"event": self.event, "at": self.at, **self.record}


class JobFollower:
    """Looks at one job again and again and tells what changed."""

    def __init__(self, history: History, job: Job, *, from_now: bool = False) -> None:
        self._history, self._job = history, job
        self._seen: set[str] = set()
        self._notes: dict[str, tuple[float, int]] = {}
        """By cause: when a note was shown, and how often it came since."""
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._outlook = JobView(job=job, at=time.time())
        self._next_full = 0.0
        if from_now:
            self.look()

    def look(self) -> tuple[list[JobChange], JobView]:
        """Return what is new, oldest first, and where the job stands."""
        now = time.time()
        move = queries.state_of(self._history, self._job.id)
        self._outlook = dataclasses.replace(self._outlook, at=now, move=move, steps=self._newest_steps())
        moved = move is not None and move.id not in self._seen
        if not moved and self._outlook.incident is None and now < self._next_full:
            return [], self._outlook
        self._next_full = now + IDLE
        return self._full_look()

    def _newest_steps(self) -> tuple[StepRecord, ...]:
        """Read on where the last look ended. A step that comes late (from a spill) is missing here, not in the history."""
        if self._steps:
            fresh = queries.steps(self._history, self._job.id, after=self._steps[-1].at)
        else:
            last = queries.last_step(self._history, self._job.id)
            fresh = queries.steps(self._history, self._job.id, after=last.at - KEPT_STEPS * max(last.seconds, 0.001)) if last else []
        self._steps.extend(sorted(fresh, key=lambda step: (step.at, step.generation, step.step)))
        return tuple(self._steps)

    def _full_look(self) -> tuple[list[JobChange], JobView]:
        generations = queries.generations(self._history, self._job.id)
        checkpoints = queries.checkpoints(self._history, self._job.id)
        incidents = queries.incidents(self._history, self._job.id)
        changes = [
            *self._fresh(queries.transitions(self._history, self._job.id), lambda row: of_move(row, brief=in_recovery(row.at, incidents))),
            *self._fresh(generations, lambda row: of_generation(row, brief=in_recovery(row.at, incidents))),
            *self._of_incidents(incidents),
            *self._fresh(checkpoints, of_checkpoint),
            *self._fresh(queries.job_events(self._history, self._job.id), self._of_remark),
        ]
        self._outlook = dataclasses.replace(
            self._outlook,
            generation=generations[-1] if generations else None,
            until=until_of(generations),
            checkpoint=newest_whole(checkpoints),
            snapshots=queries.newest_snapshots(self._history, self._job.id),
            incidents=incidents,
            holder=holder_of(self._history, self._job.id),
            flow_run_url=flow_run_url(self._history, self._job.id),
        )
        return sorted(changes, key=lambda change: change.at), self._outlook

    def _of_incidents(self, incidents: list[Incident]) -> Iterator[JobChange]:
        numbers = {one.id: one.number for one in incidents}
        yield from self._fresh(incidents, of_incident)
        yield from self._fresh(queries.decisions(self._history, self._job.id), lambda row: self._of_decision(row, numbers))
        for one in incidents:
            if one.closed_at is not None and self._is_new(f"{one.id} closed"):
                yield of_closed(one)

    def _of_decision(self, row: DecisionRecord, numbers: dict[str, int]) -> JobChange:
        """Tell a decision; people read the first one of an incident where that begins."""
        return of_decision(row, numbers, brief=self._is_new(f"{row.incident_id} decided"))

    def _of_remark(self, row: JobEvent) -> JobChange:
        """Tell a note; of one that comes again and again people are told once in a while, with how often it came."""
        cause = cause_of(row.text)
        shown, times = self._notes.get(cause, (row.at - NOTE_AGAIN, 0))
        if row.at - shown < NOTE_AGAIN:
            self._notes[cause] = (shown, times + 1)
            return of_remark(row, brief=True)
        self._notes[cause] = (row.at, 0)
        return of_remark(row, more=times)

    def _fresh(self, rows: list[Any], tell: Any) -> Iterator[JobChange]:  # noqa: ANN401 (a row and what tells it, of one kind)
        for row in rows:
            if self._is_new(row.id):
                yield tell(row)

    def _is_new(self, key: str) -> bool:
        new = key not in self._seen
        self._seen.add(key)
        return new


def in_recovery(at: float, incidents: Sequence[Incident]) -> bool:
    """Tell whether something at that time is part of an incident: people read one line where that begins, and one when it is over."""
    return any(one.detected_at <= at <= (math.inf if one.closed_at is None else one.closed_at + CLOSED_JUST_NOW) for one in incidents)


def of_move(row: JobTransition, *, brief: bool = False) -> JobChange:
    """Tell a move of the state; a *brief* one only where the job waits or has ended."""
    record = _record(row)
    record["trigger"] = record.pop("event")  # the change is the event here
    silent = (brief and row.after not in IN_FULL) or row.event == Event.FAULTED  # the incident is told, or that it passed by itself
    return JobChange(event="move", at=row.at, text="" if silent else f"{row.after}: {row.reason}", record=record)


def of_generation(row: Generation, *, brief: bool = False) -> JobChange:
    """Tell a new membership; nothing for people where *brief*."""
    where = placed({str(node): list(held) for node, held in row.ranks.items()})
    text = f"generation {row.number}: {rank_count(row.world_size, row.facts)} on {where}{kept_ranks(row.facts)}"
    return JobChange(event="generation", at=row.at, text="" if brief else text, record=_record(row))


def of_incident(row: Incident) -> JobChange:
    """Tell the beginning of an incident."""
    recovery = f"; recovery: {row.action}" if row.action else ""
    return JobChange(event="incident", at=row.detected_at, text=incident_opened(row) + recovery, record=_record(row))


def of_closed(row: Incident) -> JobChange:
    """Tell the end of an incident."""
    return JobChange(event="incident-closed", at=row.closed_at or row.detected_at, text=incident_closed(row), record=_record(row))


def of_decision(row: DecisionRecord, numbers: dict[str, int], *, brief: bool = False) -> JobChange:
    """Tell a decision; nothing for people where *brief*."""
    text = f"incident {numbers.get(row.incident_id, '?')}: {row.action}, because {row.reason}"
    return JobChange(event="decision", at=row.at, text="" if brief else text, record=_record(row))


def of_checkpoint(row: Checkpoint) -> JobChange:
    """Tell a checkpoint to programs; people read a note of one that is in trouble."""
    return JobChange(event="checkpoint", at=row.at, text="", record=_record(row))


def of_remark(row: JobEvent, *, more: int = 0, brief: bool = False) -> JobChange:
    """Tell a note, that came *more* times since it was shown last; nothing for people where *brief*."""
    again = f" ({plural(more, 'time')} more since it was shown last)" if more else ""
    return JobChange(event="note", at=row.at, text="" if brief else f"{row.text}{again}", record=_record(row))


def of_progress(outlook: JobView) -> JobChange:
    """Tell how far the job is."""
    from holdfast.cli.commands.status import loss_of, progress_of, rate_of  # noqa: PLC0415 (that module reads more than a watcher needs)

    step = outlook.step
    eta = f"  ETA {duration(outlook.eta)}" if outlook.eta is not None else ""
    text = f"step {progress_of(outlook)}  loss {loss_of(outlook)}  {rate_of(outlook)}{eta}"
    record = {
        "step": step.step if step else None,
        "until": outlook.until,
        "loss": step.loss if step else None,
        "rate": outlook.rate,
        "eta_s": outlook.eta,
        "generation": step.generation if step else None,
    }
    return JobChange(event="progress", at=outlook.at, text=text, record=record)


def of_end(history: History, outlook: JobView) -> JobChange:
    """Tell how the job ended and what its faults cost."""
    from holdfast.accounting.losses import losses  # noqa: PLC0415 (it reads all steps with numpy, which a watcher need not wait for)
    from holdfast.report import cost_table  # noqa: PLC0415

    lost = losses(history, outlook.job, now=outlook.at)
    last = f" at step {count(outlook.step.step)}" if outlook.step else ""
    lines = [f"job '{outlook.job.name}' {outlook.state} after {duration(outlook.elapsed)}{last}: {outlook.reason}"]
    if outlook.incidents:
        lines.append(f"{plural(len(outlook.incidents), 'incident')}: {cost_table.sentence(lost)}")
    if outlook.state == "FAILED":
        lines += _last_evidence(history, outlook)
    if outlook.incidents:
        lines.append(f"`holdfast report {outlook.job.name} -o report.html` draws all of it")
    record = {**outlook.as_record(), "losses": lost.as_record()}
    return JobChange(event="end", at=outlook.at, text="\n".join(lines), record=record)


def _last_evidence(history: History, outlook: JobView) -> list[str]:
    """Return the end of what the last root fault left behind, a traceback for the most part, and where all of it stands."""
    roots = [fault for fault in queries.faults(history, outlook.job.id) if fault.root]
    detail = str(roots[-1].evidence.get("detail") or "").strip() if roots else ""
    lines = [f"│ {line}" for line in detail.splitlines()[-EVIDENCE_LINES:]]
    if outlook.incidents:
        lines.append(f"`holdfast show {outlook.incidents[-1].number} --job {outlook.job.name}` tells the last incident in full")
    return lines


def _record(row: SQLModel) -> dict[str, Any]:
    return row.model_dump(exclude={"job_id"})
