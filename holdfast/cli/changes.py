"""Follow a job through the history: what is new since the last poll, as lines for people and records for programs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlmodel import SQLModel

from holdfast.cli.job_view import WARNINGS, JobView, last_step_of, ranks_by_node, reference_to
from holdfast.cli.node_view import NodeRecords, cluster_name, nodes_of
from holdfast.cli.recovery_view import Recovery, phase_times
from holdfast.history import queries
from holdfast.history.lease import leases_of
from holdfast.history.models import DecisionRecord, Generation, Incident, Job, JobEvent, JobTransition, StepRecord
from holdfast.history.saves import failed_save, newest_complete
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event
from holdfast.report import memory
from holdfast.report.notes import cause_of
from holdfast.report.text.wording import (
    complete_already,
    count,
    decided,
    duration,
    incident_closed,
    incident_opened,
    kept_ranks,
    rank_count,
)
from holdfast.stored_job import checkpoint_directory

KEPT_STEPS: Final = 200
"""Newest steps kept in memory: for the rate and the loss curve."""
FULL_INTERVAL: Final = 2.0
"""Seconds between two full polls while the state stays the same and no incident is open."""
REPEAT_AFTER: Final = 600.0
"""Seconds for which a note of the same cause is not shown again."""
CLOSED_JUST_NOW: Final = 2.0
"""Seconds after an incident in which what happens still belongs to it: the line that closes it covers all of that."""
ALWAYS_SHOWN: Final = frozenset({*queries.TERMINAL, "WAITING"})
"""States that people see even during an incident."""
EVIDENCE_LINES: Final = 12
"""Last lines of a traceback that are shown for a failed job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """Something new about a job."""

    event: str
    at: float
    text: str
    """For people; empty where only programs need it."""
    record: dict[str, Any]

    def as_record(self) -> dict[str, Any]:
        """Return the change as one JSON object."""
        return {"event": self.event, "at": self.at, **self.record}


class JobFollower:
    """Polls one job and returns what changed."""

    def __init__(self, history: History, job: Job, *, from_now: bool = False) -> None:
        self._history, self._job = history, job
        self._seen: set[str] = set()
        self._notes: dict[str, tuple[float, int]] = {}
        """By cause: when a note was shown, and how often it was repeated since."""
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._view = JobView(job=job, at=time.time())
        self._next_full = 0.0
        if from_now:
            self.poll()

    def poll(self, *, full: bool = False) -> tuple[list[JobChange], JobView]:
        """Return what is new, oldest first, and the present view of the job; a *full* one reads everything, however recent the last one."""
        now = time.time()
        move = queries.state_of(self._history, self._job.id)
        self._view = dataclasses.replace(self._view, at=now, move=move, steps=self._newest_steps())
        moved = move is not None and move.id not in self._seen
        if not full and not moved and self._view.incident is None and now < self._next_full:
            return [], self._view
        self._next_full = now + FULL_INTERVAL
        return self._poll_all()

    def _newest_steps(self) -> tuple[StepRecord, ...]:
        """Read on from the last poll. A step that the history receives late is missing here, not in the history."""
        if self._steps:
            new = queries.steps(self._history, self._job.id, after=self._steps[-1].at)
        else:
            last = queries.last_step(self._history, self._job.id)
            new = queries.steps(self._history, self._job.id, after=last.at - KEPT_STEPS * max(last.seconds, 0.001)) if last else []
        self._steps.extend(sorted(new, key=lambda step: (step.at, step.generation, step.step)))
        return tuple(self._steps)

    def _poll_all(self) -> tuple[list[JobChange], JobView]:
        history, job = self._history, self._job.id
        generations, checkpoints = queries.generations(history, job), queries.checkpoints(history, job)
        transitions, incidents = queries.transitions(history, job), queries.incidents(history, job)  # so each one's incident is known
        decisions, newest = queries.decisions(history, job), generations[-1] if generations else None
        in_work = queries.faults(history, incident_id=incidents[-1].id) if incidents and incidents[-1].closed_at is None else []
        holder, page = leases_of(history, [job]).get(job, (None, ""))
        changes = [
            *self._new(transitions, lambda row: transition_change(row, brief=in_recovery(row.at, incidents), followed=True)),
            *self._new(generations, lambda row: generation_change(row, brief=in_recovery(row.at, incidents))),
            *self._incident_changes(incidents, decisions, transitions),
            *self._new(checkpoints, lambda row: JobChange(event="checkpoint", at=row.at, text="", record=_record(row))),
            *self._new(queries.job_events(history, job), self._note_change),
        ]
        self._view = dataclasses.replace(
            self._view,
            generation=newest,
            until=last_step_of(generations),
            checkpoint=newest_complete(checkpoints),
            failed_save=failed_save(checkpoints),
            snapshots=queries.newest_snapshots(history, job),
            memory_fault=queries.newest_fault(history, job, memory.FAULTS),
            warnings=queries.faults_within(history, job, newest.number, WARNINGS) if newest else (),
            incidents=incidents,
            transitions=transitions,
            decision=decisions[-1] if decisions else None,
            nodes=nodes_of(NodeRecords.of(history, cluster_name(self._job)), self._job, newest, in_work, self._view.at),
            holder=holder,
            flow_run_url=page,
        )
        return sorted(changes, key=lambda change: change.at), self._view

    def _incident_changes(
        self, incidents: Sequence[Incident], decisions: Sequence[DecisionRecord], transitions: Sequence[JobTransition]
    ) -> Iterator[JobChange]:
        numbers = {one.id: one.number for one in incidents}
        yield from self._new(incidents, opened_change)
        yield from self._new(decisions, lambda row: self._decision_change(row, numbers))
        for one in incidents:
            if one.closed_at is not None and self._is_new(f"{one.id} closed"):
                yield closed_change(Recovery(incident=one, at=one.closed_at, transitions=transitions))

    def _decision_change(self, row: DecisionRecord, numbers: dict[str, int]) -> JobChange:
        """Return a decision; people see the first one of an incident where the incident begins, and why a job fails where it ends."""
        first = self._is_new(f"{row.incident_id} decided")
        silent = first or row.action == RecoveryAction.FAIL
        text = "" if silent else decided(numbers.get(row.incident_id, "?"), row.action, row.reason)
        return JobChange(event="decision", at=row.at, text=text, record=_record(row))

    def _note_change(self, row: JobEvent) -> JobChange:
        """Return a note; of one that repeats, people see one in a while, with the number of repetitions."""
        cause = cause_of(row.text)
        shown, times = self._notes.get(cause, (row.at - REPEAT_AFTER, 0))
        silent = row.at - shown < REPEAT_AFTER
        self._notes[cause] = (shown, times + 1) if silent else (row.at, 0)
        repeated = f" (repeated {plural(times, 'time')} since it was last shown)" if times else ""
        return JobChange(event="note", at=row.at, text="" if silent else f"{row.text}{repeated}", record=_record(row))

    def _new(self, rows: Sequence[Any], change_of: Callable[[Any], JobChange]) -> Iterator[JobChange]:
        return (change_of(row) for row in rows if self._is_new(row.id))

    def _is_new(self, key: str) -> bool:
        new = key not in self._seen
        self._seen.add(key)
        return new


def in_recovery(at: float, incidents: Sequence[Incident]) -> bool:
    """Return whether *at* lies within an incident: people see one line where that begins, and one when it is closed."""
    return any(one.detected_at <= at <= (math.inf if one.closed_at is None else one.closed_at + CLOSED_JUST_NOW) for one in incidents)


def transition_change(row: JobTransition, *, brief: bool = False, followed: bool = False) -> JobChange:
    """Return a transition of the job's state; a *brief* one has text only where the job waits or has ended.

    The end of a job that is *followed* has no text either: `end_change` is shown a moment later.
    """
    record = _record(row)
    record["trigger"] = record.pop("event")  # `event` is the kind of change here
    silent = (brief and row.after not in ALWAYS_SHOWN) or row.event == Event.FAULTED  # the incident has its own line
    silent = silent or (followed and row.after in queries.TERMINAL)
    return JobChange(event="transition", at=row.at, text="" if silent else f"{row.after}: {row.reason}", record=record)


def generation_change(row: Generation, *, brief: bool = False) -> JobChange:
    """Return a new generation; a *brief* one has no text."""
    where = ranks_by_node({str(node): list(held) for node, held in row.ranks.items()})
    text = f"generation {row.number}: {rank_count(row.world_size, row.facts)} on {where}{kept_ranks(row.facts)}"
    return JobChange(event="generation", at=row.at, text="" if brief else text, record=_record(row))


def opened_change(row: Incident) -> JobChange:
    """Return the beginning of an incident."""
    recovery = f"; recovery: {row.action}" if row.action else ""
    return JobChange(event="incident", at=row.detected_at, text=incident_opened(row) + recovery, record=_record(row))


def closed_change(recovery: Recovery) -> JobChange:
    """Return the end of an incident, with the time of each phase of its recovery."""
    one = recovery.incident
    times = f" ({phase_times(recovery.phases)})" if one.outcome == "recovered" else ""
    record = {**_record(one), "phases": {phase.name: phase.seconds for phase in recovery.phases}}
    text = "" if one.outcome == "failed" else incident_closed(one) + times  # the end of the job has its own line
    return JobChange(event="incident-closed", at=one.closed_at or recovery.at, text=text, record=record)


def recovery_change(view: JobView, recovery: Recovery) -> JobChange:
    """Return how far a recovery that takes long has got."""
    phase = recovery.phase
    doing = f"{phase.name} for {duration(phase.seconds)}" if phase else "ends"
    text = f"incident {recovery.incident.number}: {doing}, {duration(recovery.seconds)} in all; {view.state}: {view.reason}"
    return JobChange(event="recovery", at=view.at, text=text, record={"state": view.state, **recovery.as_record()})


def progress_change(view: JobView) -> JobChange:
    """Return the present step, loss and rate."""
    step = view.step
    eta = f"  ETA {duration(view.eta)}" if view.eta is not None else ""
    record = {
        "step": step.step if step else None,
        "until": view.until,
        "loss": step.loss if step else None,
        "rate": view.rate,
        "samples_per_s": view.size_rate("samples"),
        "tokens_per_s": view.size_rate("tokens"),
        "eta_s": view.eta,
        "generation": step.generation if step else None,
    }
    throughput = f"  {view.throughput}" if view.throughput else ""
    text = f"step {view.progress}  loss {view.loss}  {view.speed}{throughput}{eta}"
    return JobChange(event="progress", at=view.at, text=text, record=record)


def end_change(history: History, view: JobView, shown: Callable[[int], bool] = lambda _rank: False) -> JobChange:
    """Return the end of the job, with what its failures cost; *shown*: whether the output of a rank was shown already."""
    from holdfast.accounting.losses import losses  # noqa: PLC0415 (it imports numpy, which is not needed before the end)
    from holdfast.report import cost_table  # noqa: PLC0415

    lost = losses(history, view.job, now=view.at)
    lines = [f"job '{view.job.name}' {view.state} after {duration(view.elapsed)}: {view.reason}"]
    trained = bool(view.step or (view.incidents and view.state != "FAILED"))  # else it cost nothing, and a report has nothing to show
    lines += [f"{label:<11}{text}" for label, text in _end_facts(view, cost_table.sentence(lost) if trained else "")]
    if view.state == "FAILED":
        lines += _evidence_lines(history, view.job, shown)
        if view.incidents:
            lines.append(f"`holdfast incidents show {view.incidents[-1].id}` shows the last incident in full")
    if view.state == "CANCELLED" and view.checkpoint:
        lines.append("`holdfast run` with the same job file continues from that checkpoint")
    if (step := view.complete_before) is not None:
        lines.append(complete_already(view.job.name, step, str(checkpoint_directory(view.job))))
    if trained:
        lines.append(f"`holdfast report {reference_to(history, view.job)} -o report.html` writes a report")
    record = {**view.as_record(), "losses": lost.as_record()}
    return JobChange(event="end", at=view.at, text="\n".join(lines), record=record)


def _evidence_lines(history: History, job: Job, shown: Callable[[int], bool]) -> Iterator[str]:
    """Yield the last lines that the rank at fault wrote, unless they are on the screen; without any, how to read what it wrote."""
    root = next((fault for fault in reversed(queries.faults(history, job.id)) if fault.root), None)
    if root is None or root.rank is None:
        return
    detail = str(root.evidence.get("detail") or "").strip()
    if not shown(root.rank):
        yield from (f"│ {line}" for line in detail.splitlines()[-EVIDENCE_LINES:])
    if not detail:
        yield f"`holdfast logs {reference_to(history, job)} --rank {root.rank}` shows all that the rank wrote"


def _end_facts(view: JobView, costs: str) -> Iterator[tuple[str, str]]:
    """Yield what remains to say of a job that has ended, each with its label."""
    if view.step:
        yield "steps", view.progress + (f", loss {view.loss}" if view.step.loss is not None else "")
    if costs:
        yield "incidents", f"{count(len(view.incidents)) if view.incidents else 'none'}: {costs}"
    if saved := view.checkpoint:
        of = f" of {count(view.until)}" if view.until else ""
        yield "checkpoint", f"step {count(saved.step)}{of}, {saved.path}"
    if view.not_saved:
        yield "NOT SAVED", view.not_saved
    if view.flow_run_url:
        yield "Prefect", view.flow_run_url


def _record(row: SQLModel) -> dict[str, Any]:
    return row.model_dump(exclude={"job_id"})
