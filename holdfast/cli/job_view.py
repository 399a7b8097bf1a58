"""One look at a job: where it stands, how fast it goes, what befell it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlmodel import col, select

from holdfast.errors import NoJob, UnknownJob
from holdfast.history import queries
from holdfast.history.lease import flow_run_url, holder_of
from holdfast.history.models import Checkpoint, FaultRecord, Generation, Incident, Job, JobTransition, Lease, Snapshots, StepRecord
from holdfast.history.store import History
from holdfast.report import memory
from holdfast.report.wording import listing, ranks

SHORTEST_ID: Final = 6
"""Fewer letters of an id are taken for a mistyped name."""
WARNINGS: Final = (
    "loss-not-finite", "loss-spike", "job-zombie", "straggler-gpu", "straggler-host", "straggler-network", "data-stall", "step-slow",
    "copies-differ",
)  # fmt: skip
"""Kinds of faults that training goes on through and that say something about the training itself."""
SILENT: Final = 5.0
"""Seconds in which the steps of a job that has just begun to run reach the history."""
EMPTY: Final = "The history is empty"
WINDOW: Final = 20
"""Steps over which the rate is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Where a job stands at the time *at*."""

    job: Job
    at: float
    move: JobTransition | None = None
    generation: Generation | None = None
    until: int | None = None
    steps: Sequence[StepRecord] = ()
    """The newest steps, oldest first."""
    checkpoint: Checkpoint | None = None
    """The newest whole one."""
    snapshots: Snapshots | None = None
    """What the newest generation has in the memory of nodes."""
    memory_fault: FaultRecord | None = None
    """The newest fault that keeps state out of the memory of nodes."""
    warnings: Sequence[FaultRecord] = ()
    """What the present generation trains on through: bad losses, stragglers and the like, oldest first."""
    incidents: Sequence[Incident] = ()
    holder: Lease | None = None
    flow_run_url: str = ""
    """Page of the job's newest flow run in the Prefect UI; empty where it has none."""

    @property
    def state(self) -> str:
        """Return the state, ``LAUNCHING`` before the first move."""
        return self.move.after if self.move else "LAUNCHING"

    @property
    def reason(self) -> str:
        """Return why the job is in its state."""
        return self.move.reason if self.move else "submitted"

    @property
    def ended(self) -> bool:
        """Tell whether nothing can follow."""
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
    def rate(self) -> float | None:
        """Return steps per second, over the newest steps of the present generation."""
        if not self.steps:
            return None
        last = self.steps[-1]
        same = [step for step in self.steps if step.generation == last.generation][-WINDOW:]
        if len(same) > 1 and last.at > same[0].at:
            return (last.step - same[0].step) / (last.at - same[0].at)
        return 1 / last.seconds if last.seconds > 0 else None

    @property
    def eta(self) -> float | None:
        """Return the seconds until the last step, while the job runs and says how far it goes."""
        if self.state != "RUNNING" or not self.step or not self.until or not self.rate or self.rate <= 0:
            return None
        return max(0.0, (self.until - self.step.step) / self.rate)

    @property
    def incident(self) -> Incident | None:
        """Return the open incident."""
        return next((one for one in reversed(self.incidents) if one.closed_at is None), None)

    @property
    def no_steps(self) -> str:
        """Return why no step can be shown of a job that runs; empty where one is, or will be in a moment."""
        if self.step is not None or self.move is None or self.state != "RUNNING" or self.at - self.move.at < SILENT:
            return ""
        logs = f"`holdfast logs {self.job.name} --follow` shows what the script writes"
        return f"no steps are told: `holdfast.session` does, or `holdfast.heartbeat`; {logs}"

    @property
    def no_snapshots(self) -> str:
        """Return why there is no snapshot in memory; empty where there is one, or where nobody knows."""
        return memory.why_none(self.snapshots, self.memory_fault, self.job.spec, ended=self.ended)

    @property
    def members(self) -> dict[str, list[int]]:
        """Return the ranks of each node."""
        return {str(node): list(held) for node, held in (self.generation.ranks if self.generation else {}).items()}

    def as_record(self) -> dict[str, Any]:
        """Return the look as a program reads it; times in seconds since 1970."""
        step, incident, checkpoint = self.step, self.incident, self.checkpoint
        return {
            "job": self.job.name,
            "id": self.job.id,
            "state": self.state,
            "reason": self.reason,
            "since": self.move.at if self.move else self.job.at,
            "submitted": self.job.at,
            "generation": self.generation.number if self.generation else None,
            "world_size": self.generation.world_size if self.generation else None,
            "full_size": ((self.generation.facts or {}).get("width") or self.generation.world_size) if self.generation else None,
            "nodes": self.members,
            "step": step.step if step else None,
            "until": self.until,
            "loss": step.loss if step else None,
            "rate": self.rate,
            "eta_s": self.eta,
            "checkpoint": {"step": checkpoint.step, "path": checkpoint.path, "at": checkpoint.at} if checkpoint else None,
            "snapshots": _as_record(self.snapshots),
            "no_snapshots": self.no_snapshots or None,
            "warnings": [
                {"kind": one.kind, "at": one.at, "subject": one.subject, "step": one.step, "evidence": one.evidence["quote"]}
                for one in self.warnings
            ],
            "incidents": len(self.incidents),
            "incident": incident.model_dump() if incident else None,
            "flow": {"holder": self.holder.holder, "host": self.holder.host, "pid": self.holder.pid} if self.holder else None,
            "flow_run_url": self.flow_run_url or None,
            "directory": self.job.directory,
        }


def _as_record(row: Snapshots | None) -> dict[str, Any] | None:
    """Return the snapshots in memory as a program reads them: the newest one, and what they cost as shares."""
    if row is None or row.step is None:
        return None
    names = {"generation", "at", "step", "age_steps", "age_s", "replica_step", "interval_steps", "size"}
    return row.model_dump(include=names) | {"overlapped": row.overlapped, "cost": row.cost}


def look(history: History, job: Job) -> JobView:
    """Look at *job* now."""
    last = queries.last_step(history, job.id)
    generation = queries.newest_generation(history, job.id)
    recent = queries.steps(history, job.id, after=last.at - max(WINDOW * last.seconds, 0.5)) if last else []
    return JobView(
        job=job,
        at=time.time(),
        move=queries.state_of(history, job.id),
        generation=generation,
        until=until_of(queries.generations(history, job.id)),
        steps=recent,
        checkpoint=newest_whole(queries.checkpoints(history, job.id)),
        snapshots=queries.newest_snapshots(history, job.id),
        memory_fault=queries.newest_fault(history, job.id, memory.FAULTS),
        warnings=queries.faults_within(history, job.id, generation.number, WARNINGS) if generation else (),
        incidents=queries.incidents(history, job.id),
        holder=holder_of(history, job.id),
        flow_run_url=flow_run_url(history, job.id),
    )


def until_of(generations: Sequence[Generation]) -> int | None:
    """Return how far the job goes, as the newest generation that said so has it."""
    return next((one.until for one in reversed(generations) if one.until is not None), None)


def newest_whole(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest checkpoint without trouble; one found corrupt later is none."""
    spoilt = {one.path for one in checkpoints if one.problem}
    return next((one for one in reversed(checkpoints) if not one.problem and one.path not in spoilt), None)


def live_jobs(history: History) -> list[Job]:
    """Return the jobs that have not ended, newest first."""
    ended = select(JobTransition.job_id).where(col(JobTransition.after).in_(queries.TERMINAL))
    with history.session() as session:
        return list(session.exec(select(Job).where(col(Job.id).not_in(ended)).order_by(col(Job.id).desc())))


def find_job(history: History, reference: str | None) -> Job:
    """Return the job that *reference* names: a name (its newest run), an id or its unique beginning; none: the newest job."""
    if reference is None:
        newest = queries.jobs(history, limit=1)
        if not newest:
            raise NoJob(EMPTY)
        return newest[0]
    try:
        return queries.newest_job(history, reference)
    except UnknownJob:
        found = _by_id(history, reference)
        if found is None:
            raise
        return found


def _by_id(history: History, reference: str) -> Job | None:
    if len(reference) < SHORTEST_ID or not (reference.isascii() and reference.isalnum()):
        return None
    with history.session() as session:
        found = list(session.exec(select(Job).where(col(Job.id).startswith(reference.lower())).limit(2)))
    return found[0] if len(found) == 1 else None


def placed(members: dict[str, list[int]], most: int = 16) -> str:
    """Say which node holds which ranks, of the first nodes where there are many."""
    return listing((f"{node} ({ranks(held)})" for node, held in members.items()), most)
