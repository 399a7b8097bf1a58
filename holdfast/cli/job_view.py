"""Find jobs in the history, and read what is known of one: its state, its rate, its incidents."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from sqlmodel import col, select

from holdfast.cli.node_view import JobNodes, NodeRecords, cluster_name, nodes_of
from holdfast.cli.recovery_view import Recovery
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.training.progress import Pause, hang_limit
from holdfast.errors import NoJob, UnknownJob
from holdfast.history import queries
from holdfast.history.lease import leases_of
from holdfast.history.models import (
    Checkpoint,
    DecisionRecord,
    FaultRecord,
    Generation,
    Incident,
    Job,
    JobTransition,
    Lease,
    Snapshots,
    StepRecord,
)
from holdfast.history.saves import failed_save, lost_end, newest_complete
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report import memory
from holdfast.report.text.wording import NOTHING, count, duration, listing, on_target, per_second, ranks

MIN_ID: Final = 6
"""Characters of an id from which it is distinguished from a mistyped name."""
WARNINGS: Final = (
    "loss-not-finite", "loss-spike", "training-frozen", "straggler-gpu", "straggler-host", "straggler-network", "data-stall", "step-slow",
    "copies-differ", "rank-exited-early",
)  # fmt: skip
"""FaultRecord kinds that training continues through and that concern the training itself."""
FIRST_STEPS: Final = 5.0
"""Seconds within which the steps of a job that has just begun to run reach the history."""
SIZE_UNITS: Final[tuple[Literal["tokens"], Literal["samples"]]] = ("tokens", "samples")
WINDOW: Final = 20
"""Steps over which the rate is taken."""
FRESH: Final = HangLimits(hang_min=memory.STALE)
"""When the newest step is old: it is older than any pause between steps before, and than the way into the history explains."""
NO_PROGRESS: Final = "no-progress"
"""The kind of the warning that no rank makes progress, in records for programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAtRisk:
    """What a failure would cost now, at most: steps that have to be computed again, and how long that takes."""

    steps: int
    seconds: float | None

    @property
    def text(self) -> str:
        """Return both as text: ``4 steps (1.1 s)``."""
        return plural(self.steps, "step") + (f" ({duration(self.seconds)})" if self.seconds else "")

    def as_record(self) -> dict[str, Any]:
        """Return both for programs."""
        return {"steps": self.steps, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What is known of a job at the time *at*, in seconds since 1970."""

    job: Job
    at: float
    move: JobTransition | None = None
    generation: Generation | None = None
    until: int | None = None
    """The job's last step."""
    steps: Sequence[StepRecord] = ()
    """The newest steps, oldest first."""
    checkpoint: Checkpoint | None = None
    """The newest complete one."""
    failed_save: Checkpoint | None = None
    """The newest one that could not be written, if no later step was saved."""
    snapshots: Snapshots | None = None
    """In-memory snapshots of the newest generation."""
    memory_fault: FaultRecord | None = None
    """The newest fault that prevents in-memory snapshots."""
    warnings: Sequence[FaultRecord] = ()
    """Faults that the present generation trains through: bad losses, stragglers and the like, oldest first."""
    incidents: Sequence[Incident] = ()
    transitions: Sequence[JobTransition] = ()
    """All transitions, oldest first."""
    decision: DecisionRecord | None = None
    """The newest decision."""
    nodes: JobNodes = field(default_factory=JobNodes)
    holder: Lease | None = None
    flow_run_url: str = ""
    """Page of the job's newest flow run in the Prefect UI; empty where it has none."""

    @property
    def state(self) -> str:
        """Return the state, ``LAUNCHING`` before the first transition."""
        return self.move.after if self.move else "LAUNCHING"

    @property
    def reason(self) -> str:
        """Return why the job is in its state."""
        return self.move.reason if self.move else "submitted"

    @property
    def ended(self) -> bool:
        """Return whether the state is terminal."""
        return self.state in queries.TERMINAL

    @property
    def step(self) -> StepRecord | None:
        """Return the newest step."""
        return self.steps[-1] if self.steps else None

    @property
    def elapsed(self) -> float:
        """Return the seconds since the job was submitted, until its end."""
        return max(0.0, (self.move.at if self.move and self.ended else self.at) - self.job.at)

    @property
    def stale(self) -> float | None:
        """Return the age in seconds of the newest step of a job that should train, if that is older than its steps explain; else None."""
        if self.step is None or self.state != "RUNNING":
            return None
        same = self._window
        intervals = tuple(after.at - before.at for before, after in pairwise(same)) or (self.step.seconds,)
        age = self.at - self.step.at
        return age if age > hang_limit(intervals, FRESH) else None

    @property
    def pause(self) -> Pause | None:
        """Return the pause in which no rank makes progress, as the controller recorded it; None where a step has been made since."""
        found = ((self.generation.facts or {}) if self.generation else {}).get("pause")
        if not found or self.state != "RUNNING":
            return None
        try:
            pause = Pause(**found)
        except TypeError:  # of another version: this is not worth a status that cannot be shown
            return None
        return pause if self.step is None or self.step.at <= pause.at else None

    @property
    def rate(self) -> float | None:
        """Return steps per second, over the newest steps of the present generation; None where a controller sees no step any more."""
        return None if self.stale is not None and self.holder is not None else self._measured_rate

    @property
    def _measured_rate(self) -> float | None:
        """Return steps per second as of the newest step."""
        if not self.steps:
            return None
        last, same = self.steps[-1], self._window
        if len(same) > 1 and last.at > same[0].at:
            return (last.step - same[0].step) / (last.at - same[0].at)
        return 1 / last.seconds if last.seconds > 0 else None

    @property
    def _window(self) -> list[StepRecord]:
        """Return the newest steps of the present generation."""
        return [step for step in self.steps if step.generation == self.steps[-1].generation][-WINDOW:]

    def size_rate(self, unit: Literal["samples", "tokens"]) -> float | None:
        """Return samples or tokens per second, over the newest steps of the present generation; None where the script reports none."""
        same = self._window
        if self.rate is None:
            return None
        sizes = [size for step in same[1:] if (size := getattr(step, unit)) is not None]
        if not sizes or len(sizes) < len(same) - 1 or same[-1].at <= same[0].at:
            return None
        return float(sum(sizes)) / (same[-1].at - same[0].at)

    @property
    def eta(self) -> float | None:
        """Return the seconds until the last step, while the job runs and reports which step that is."""
        if self.state != "RUNNING" or not self.step or not self.until or not self.rate or self.rate <= 0:
            return None
        if self.stale is not None:
            return None
        return max(0.0, (self.until - self.step.step) / self.rate)

    @property
    def incident(self) -> Incident | None:
        """Return the open incident."""
        return next((one for one in reversed(self.incidents) if one.closed_at is None), None)

    @property
    def recovery(self) -> Recovery | None:
        """Return the recovery that runs, or that has ended just now."""
        if not self.incidents:
            return None
        newest = self.incident or self.incidents[-1]
        mine = self.decision if self.decision is not None and self.decision.incident_id == newest.id else None
        found = Recovery(incident=newest, at=self.at, transitions=self.transitions, decision=mine)
        return found if found.is_shown and not self.ended else None

    @property
    def at_risk(self) -> StepsAtRisk | None:
        """Return what the failure of a process would cost now, at most; None while no step is known."""
        if self.step is None:
            return None
        return self._at_risk(self._since_snapshot, self._since_checkpoint)

    @property
    def at_risk_with_node(self) -> StepsAtRisk | None:
        """Return what the loss of a node would cost now, at most: snapshots that only its own memory has are lost with it."""
        if self.step is None:
            return None
        row, replica = self.snapshots, None
        if row is not None and row.step is not None and row.replica_step is not None and self._since_snapshot is not None:
            replica = self._since_snapshot + max(0, row.step - row.replica_step)
        return self._at_risk(replica, self._since_checkpoint)

    def _at_risk(self, *ages: int | None) -> StepsAtRisk | None:
        assert self.step is not None
        steps = min((age for age in ages if age is not None), default=self.step.step)
        return StepsAtRisk(steps=steps, seconds=steps / self._measured_rate if self._measured_rate else None)

    @property
    def _since_checkpoint(self) -> int | None:
        if self.step is None or self.checkpoint is None or self.checkpoint.step is None:
            return None
        return max(0, self.step.step - self.checkpoint.step)

    @property
    def _since_snapshot(self) -> int | None:
        """Return the age in steps of the newest snapshot: as reported, or since then if the report is old."""
        row = self.snapshots
        if self.step is None or row is None or row.step is None or (self.generation and row.generation != self.generation.number):
            return None
        is_new = row.age_steps is not None and self.at - row.at <= memory.STALE
        return row.age_steps if is_new else max(0, self.step.step - row.step)

    @property
    def complete_before(self) -> int | None:
        """Return the step at which the job was complete when it started: it resumed there and ended; None for any other job."""
        if self.state != "COMPLETED" or self.step is not None or self.generation is None:
            return None
        return self.generation.resumed_step or None

    @property
    def no_steps(self) -> str:
        """Return why a running job shows no step; empty where it does, or will in a moment."""
        if self.step is not None or self.move is None or self.state != "RUNNING" or self.at - self.move.at < FIRST_STEPS:
            return ""
        logs = f"`holdfast logs {self.job.name} --follow` shows the script's output"
        return f"none reported: `holdfast.heartbeat(step, loss)` in the script adds progress, ETTR and hang detection; {logs}"

    @property
    def integration(self) -> str:
        """Return what a fault means at the level of integration that the script has reached; empty while that is unknown."""
        facts = self.generation.facts if self.generation else None
        return str((facts or {}).get("integration") or "")

    @property
    def no_snapshots(self) -> str:
        """Return why there is no in-memory snapshot; empty where there is one, or where the reason is unknown."""
        if self.step is None and self.snapshots is None and self.memory_fault is None:
            return ""  # whether the script has a session shows with its first step
        return memory.why_none(self.snapshots, self.memory_fault, self.job.spec, ended=self.ended)

    @property
    def members(self) -> dict[str, list[int]]:
        """Return the ranks of each node."""
        return {str(node): list(held) for node, held in (self.generation.ranks if self.generation else {}).items()}

    # -- as text ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> str:
        """Return the step as text: ``1,234 of 10,000``."""
        if self.step is None:
            return NOTHING
        return count(self.step.step) + (f" of {count(self.until)}" if self.until else "")

    @property
    def loss(self) -> str:
        """Return the newest loss as text."""
        loss = self.step.loss if self.step else None
        return NOTHING if loss is None else f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.3e}"  # noqa: PLR2004 (beyond it digits do not help)

    @property
    def newest_snapshot(self) -> str:
        """Return the newest in-memory snapshot as text, or why there is none; empty where that is unknown."""
        row = self.snapshots
        if row is None or row.step is None:
            return self.no_snapshots
        return memory.last(row) if self.ended else memory.newest(row, self.memory_fault, self.job.spec, self.at)

    @property
    def lost_end(self) -> bool:
        """Return whether the job has ended and the state after its last step is lost."""
        return self.ended and lost_end(self.checkpoint, self.failed_save, self.step)

    @property
    def not_saved(self) -> str:
        """Return as text which step could not be saved, why, and what there is instead; empty where a later step was saved."""
        failed = self.failed_save
        if failed is None or failed.step is None:
            return ""
        lost = f"the final state, step {count(self.step.step)}" if self.lost_end and self.step else f"step {count(failed.step)}"
        newest = f"the newest checkpoint is that of step {count(self.checkpoint.step)}" if self.checkpoint else "there is no checkpoint"
        return f"{lost}: {failed.problem}: {failed.reason}; {newest}"

    @property
    def risk(self) -> str:
        """Return as text what a failure would cost now; empty during a recovery, and where it is unknown."""
        process, node = self.at_risk, self.at_risk_with_node
        if self.ended or self.incident is not None or process is None or node is None:
            return ""
        both = "" if node.steps == process.steps else f"; if a node is lost {node.text}"
        return f"at most {process.text}{both}"

    @property
    def speed(self) -> str:
        """Return the rate as text, in the unit that gives a number above one; where the newest step is old, since when there is none."""
        if self.stale is not None and self.rate is None:
            return f"no step for {duration(self.stale)}"
        if self.rate is None or self.rate <= 0:
            return NOTHING
        as_of = f" {self.as_of}" if self.as_of else ""
        return (f"{self.rate:.2f} steps/s" if self.rate >= 1 else f"{duration(1 / self.rate)} a step") + as_of

    @property
    def as_of(self) -> str:
        """Return how old step and rate are, if that is more than the steps explain: ``as of 8.90 s ago``; else empty."""
        return "" if self.stale is None else f"as of {duration(self.stale)} ago"

    @property
    def warning_texts(self) -> list[str]:
        """Return all warnings for people, oldest first; the last one is that no rank makes progress, if that is so."""
        found = [f"{one.kind} on {on_target(one.target)}: {one.evidence.get('quote', '')}" for one in self.warnings]
        if (pause := self.pause) is None:
            return found
        since = max(0.0, self.at - pause.at)
        seconds, ago = max(pause.quiet + since, self.stale or 0.0), duration(since)  # a controller that has just taken over saw less of it
        quiet = f"no rank made progress for {duration(seconds)}"
        if self.holder is None:
            quiet = f"no rank made progress for {duration(pause.quiet)}, as of {ago} ago"
        cause = f": {pause.cause} (reported {ago} ago)" if pause.cause else ""
        return [*found, f"{quiet}; a step takes {duration(pause.usual)}{cause}. It counts as a hang after {duration(pause.hang_after)}"]

    def _warning_records(self) -> list[dict[str, Any]]:
        """Return all warnings for programs, oldest first."""
        found = [
            {"kind": one.kind, "at": one.at, "target": one.target, "step": one.step, "evidence": one.evidence.get("quote", "")}
            for one in self.warnings
        ]
        if (pause := self.pause) is None:
            return found
        target = "job" if pause.rank is None else f"rank {pause.rank}" + (f" on {pause.node}" if pause.node else "")
        step = self.step.step if self.step else None
        return [*found, {"kind": NO_PROGRESS, "at": pause.at - pause.quiet, "target": target, "step": step, "evidence": pause.text}]

    def _rank_records(self) -> list[dict[str, Any]]:
        """Return the ranks of the present generation for programs: node, and pid of the process there where that is known."""
        facts = (self.generation.facts or {}) if self.generation else {}
        pids = {} if self.ended else facts.get("pids") or {}
        placed = ((rank, node) for node, held in self.members.items() for rank in held)
        return [{"rank": rank, "node": node, "pid": pids.get(str(rank))} for rank, node in sorted(placed)]

    @property
    def throughput(self) -> str:
        """Return the tokens and samples per second as text; empty where the script reports neither."""
        rates = {unit: self.size_rate(unit) for unit in SIZE_UNITS}
        return ", ".join(f"{per_second(rate)} {unit}/s" for unit, rate in rates.items() if rate is not None)

    def as_record(self) -> dict[str, Any]:
        """Return the view for programs; times in seconds since 1970."""
        step, incident, checkpoint, generation, snapshots = self.step, self.incident, self.checkpoint, self.generation, self.snapshots
        memory_record: dict[str, Any] | None = None
        if snapshots is not None and snapshots.step is not None:
            names = {"generation", "at", "step", "age_steps", "age_s", "replica_step", "interval_steps", "size"}
            memory_record = snapshots.model_dump(include=names) | {"overlapped": snapshots.overlapped, "cost": snapshots.cost}
        return {
            "job": self.job.name,
            "id": self.job.id,
            "state": self.state,
            "reason": self.reason,
            "since": self.move.at if self.move else self.job.at,
            "submitted": self.job.at,
            "generation": generation.number if generation else None,
            "world_size": generation.world_size if generation else None,
            "full_size": ((generation.facts or {}).get("width") or generation.world_size) if generation else None,
            "nodes": self.members,
            **self.nodes.as_record(),
            "ranks": self._rank_records(),
            "step": step.step if step else None,
            "step_at": step.at if step else None,
            "stale_s": self.stale,
            "until": self.until,
            "complete_before": self.complete_before,
            "loss": step.loss if step else None,
            "rate": self.rate,
            "samples_per_s": self.size_rate("samples"),
            "tokens_per_s": self.size_rate("tokens"),
            "eta_s": self.eta,
            "checkpoint": {"step": checkpoint.step, "path": checkpoint.path, "at": checkpoint.at} if checkpoint else None,
            "failed_save": self.failed_save.model_dump(include={"step", "path", "at", "problem", "reason"}) if self.failed_save else None,
            "snapshots": memory_record,
            "no_snapshots": self.no_snapshots or None,
            "integration": self.integration or None,
            "at_risk": self.at_risk.as_record() if self.at_risk else None,
            "at_risk_with_node": self.at_risk_with_node.as_record() if self.at_risk_with_node else None,
            "warnings": self._warning_records(),
            "incidents": len(self.incidents),
            "incident": incident.model_dump() if incident else None,
            "recovery": self.recovery.as_record() if self.recovery else None,
            "flow": {"holder": self.holder.holder, "host": self.holder.host, "pid": self.holder.pid} if self.holder else None,
            "flow_run_url": self.flow_run_url or None,
            "directory": self.job.directory,
        }


def view_job(history: History, job: Job) -> JobView:
    """Read what the history knows of *job* now."""
    (found,) = view_jobs(history, [job])
    return found


def view_jobs(history: History, jobs: Sequence[Job]) -> list[JobView]:
    """Read what the history knows of *jobs* now, with the same number of queries however many there are."""
    ids = [job.id for job in jobs]
    generations = queries.by_job(history, Generation, ids, order=col(Generation.number))
    newest = {job: found[-1] for job, found in generations.items() if found}
    last = queries.last_steps(history, ids)
    steps = queries.steps_after(history, {job: step.at - max(WINDOW * step.seconds, 0.5) for job, step in last.items()})
    checkpoints, transitions = queries.by_job(history, Checkpoint, ids), queries.by_job(history, JobTransition, ids)
    snapshots = queries.by_job(history, Snapshots, ids, order=col(Snapshots.generation))
    incidents = queries.by_job(history, Incident, ids, order=col(Incident.number))
    faults = queries.by_job(history, FaultRecord, ids, col(FaultRecord.kind).in_({*WARNINGS, *memory.FAULTS}))
    decisions = queries.by_job(history, DecisionRecord, ids, col(DecisionRecord.incident_id).in_(_newest_ids(incidents)))
    in_work = queries.by_job(history, FaultRecord, ids, col(FaultRecord.incident_id).in_(_open_ids(incidents)))
    leases = leases_of(history, ids)
    now = time.time()
    records = {name: NodeRecords.of(history, name) for name in {cluster_name(job) for job in jobs}}
    found = list[JobView]()
    for job in jobs:
        generation = newest.get(job.id)
        holder, page = leases.get(job.id, (None, ""))
        found.append(
            JobView(
                job=job,
                at=now,
                move=transitions[job.id][-1] if transitions[job.id] else None,
                generation=generation,
                until=last_step_of(generations[job.id]),
                steps=steps.get(job.id, []),
                checkpoint=newest_complete(checkpoints[job.id]),
                failed_save=failed_save(checkpoints[job.id]),
                snapshots=snapshots[job.id][-1] if snapshots[job.id] else None,
                memory_fault=next((one for one in reversed(faults[job.id]) if one.kind in memory.FAULTS), None),
                warnings=warnings_of(generation, faults[job.id]),
                incidents=incidents[job.id],
                transitions=transitions[job.id],
                decision=decisions[job.id][-1] if decisions[job.id] else None,
                nodes=nodes_of(records[cluster_name(job)], job, generation, in_work[job.id], now),
                holder=holder,
                flow_run_url=page,
            )
        )
    return found


def _newest_ids(incidents: Mapping[str, Sequence[Incident]]) -> list[str]:
    return [found[-1].id for found in incidents.values() if found]


def _open_ids(incidents: Mapping[str, Sequence[Incident]]) -> list[str]:
    """Return the newest incidents of jobs, as far as they are open."""
    return [found[-1].id for found in incidents.values() if found and found[-1].closed_at is None]


def warnings_of(generation: Generation | None, faults: Sequence[FaultRecord]) -> list[FaultRecord]:
    """Return those of *faults* that *generation* trains through."""
    return [one for one in faults if generation is not None and one.generation == generation.number and one.kind in WARNINGS]


def last_step_of(generations: Sequence[Generation]) -> int | None:
    """Return the job's last step, as the newest generation that reported it has it."""
    return next((one.until for one in reversed(generations) if one.until is not None), None)


def live_jobs(history: History) -> list[Job]:
    """Return the jobs that have not ended, newest first."""
    ended = select(JobTransition.job_id).where(col(JobTransition.after).in_(queries.TERMINAL))
    with history.session() as session:
        return list(session.exec(select(Job).where(col(Job.id).not_in(ended)).order_by(col(Job.id).desc())))


def find_job(history: History, reference: str | None) -> Job:
    """Return the job that *reference* names: a name (its newest run), an id or its unique beginning; None: the newest job."""
    if reference is None:
        newest = queries.jobs(history, limit=1)
        if not newest:
            raise NoJob("The history is empty")
        return newest[0]
    try:
        return queries.newest_job(history, reference)
    except UnknownJob:
        if len(reference) < MIN_ID or not (reference.isascii() and reference.isalnum()):
            raise
        with history.session() as session:
            found = list(session.exec(select(Job).where(col(Job.id).startswith(reference.lower())).limit(2)))
        if len(found) != 1:
            raise
        return found[0]


def reference_to(history: History, job: Job) -> str:
    """Return what names *job* in a command: its name, or its id where the name stands for a newer run."""
    return job.name if queries.newest_job(history, job.name).id == job.id else job.id


def ranks_by_node(members: dict[str, list[int]], most: int = 16) -> str:
    """Return the ranks of each node as text: ``node-0 (0, 1), node-1 (2, 3)``; of many nodes only the first ones are named."""
    return listing((f"{node} ({ranks(held)})" for node, held in members.items()), most)
