"""Write a job's life into a real history, row by row, as a flow would."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import SQLModel

from holdfast.history.models import (
    Checkpoint,
    DecisionRecord,
    FaultRecord,
    Generation,
    Incident,
    IncidentDiagnosis,
    Job,
    JobEvent,
    JobTransition,
    Lease,
    NodeStatusChange,
    Phase,
    Snapshots,
    StepRecord,
)
from holdfast.history.store import History

PHASES = {
    "detect": 0.02,
    "diagnose": 0.01,
    "isolate": 0.03,
    "reschedule": 0.09,
    "communication": 0.05,
    "load": 0.04,
    "warm-up": 0.07,
    "rollback": 0.1,
}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    1 / 0\nZeroDivisionError: division by zero'


@dataclass
class Author:
    """Writes one job."""

    history: History
    name: str
    zero: float
    job: Job = field(init=False)
    state: str = "LAUNCHING"

    def __post_init__(self) -> None:
        """Write the job itself."""
        self.job = Job(name=self.name, spec={"name": self.name}, cluster={"name": "local"}, directory="/somewhere", at=self.zero)
        self.write(self.job)

    def write(self, *rows: SQLModel) -> None:
        """Add rows."""
        with self.history.session() as session:
            session.add_all(rows)

    def move(self, after: str, reason: str, *, seconds: float, event: str = "started", generation: int = 1) -> None:
        """Write a move of the state."""
        at = self.zero + seconds
        self.write(
            JobTransition(job_id=self.job.id, at=at, before=self.state, event=event, after=after, reason=reason, generation=generation)
        )
        self.state = after

    def generation(self, number: int, ranks: dict[str, list[int]], *, seconds: float, until: int | None = 10_000) -> None:
        """Write a generation."""
        world = sum(len(held) for held in ranks.values())
        where = f"{self.job.id}-{number}"
        self.write(
            Generation(id=where, job_id=self.job.id, number=number, at=self.zero + seconds, world_size=world, ranks=ranks, until=until)
        )

    def steps(self, first: int, last: int, *, generation: int, seconds: float, each: float = 0.1, loss: float | None = None) -> None:
        """Write the steps from *first* to *last*, the first of them *seconds* after the start."""
        self.write(
            *(
                StepRecord(
                    job_id=self.job.id,
                    generation=generation,
                    step=step,
                    at=self.zero + seconds + (step - first) * each,
                    seconds=each,
                    loss=loss if loss is not None else 4 / math.sqrt(step + 1),
                )
                for step in range(first, last + 1)
            )
        )

    def checkpoint(self, step: int, *, seconds: float, problem: str | None = None) -> None:
        """Write a checkpoint, or a problem with one."""
        row = Checkpoint(job_id=self.job.id, at=self.zero + seconds, step=step, generation=1, path=f"/somewhere/step-{step}", seconds=0.1)
        row.problem, row.reason = problem, "checksum differs" if problem else ""
        self.write(row)

    def snapshots(self, generation: int, *, step: int, replica_step: int | None = None) -> None:
        """Write what a generation just reported of its in-memory snapshots."""
        costs: dict[str, Any] = {"copied_s": 2.0, "overlapped_s": 1.9, "cost_s": 0.2, "trained_s": 40.0}
        row = Snapshots(
            job_id=self.job.id, generation=generation, at=time.time(), step=step, age_steps=1, age_s=0.1, interval_steps=1, **costs
        )
        row.replica_step, row.size, row.ages = replica_step, 10_000_000, {"1": 40}
        self.write(row)

    def record_event(self, text: str, *, seconds: float) -> None:
        """Write an event of the job."""
        self.write(JobEvent(job_id=self.job.id, at=self.zero + seconds, text=text))

    def incident(
        self,
        number: int,
        kind: str,
        target: str,
        *,
        seconds: float,
        action: str = "restart-workers",
        is_open: bool = False,
        detail: str = "",
    ) -> Incident:
        """Write an incident with fault, decision and phases; an open one has no end."""
        at = self.zero + seconds
        reason = f"restart {number} of 3 within 1 h"
        one = Incident(
            job_id=self.job.id, number=number, kind=kind, target=target, fault_at=at, detected_at=at + 0.02, commands_sent_at=at + 0.03,
            generation_before=number, action=action, step_before=102, reason=reason,
        )  # fmt: skip
        if not is_open:
            one.closed_at, one.outcome, one.downtime_s = at + 0.41, "recovered", 0.31
            one.steps_lost, one.resumed_step, one.generation_after = 2, 100, number + 1
        fault = FaultRecord(
            job_id=self.job.id, incident_id=one.id, at=at, kind=kind, recommended_action="restart", target=target, attributed_to="process",
            rank=1,
            node="n0", generation=number, step=102, root=True,
        )  # fmt: skip
        fault.evidence = {"quote": "ended by signal 9 (SIGKILL)", "signature": "signal 9", "detail": detail, "source": "process exit"}
        decision = DecisionRecord(
            job_id=self.job.id, incident_id=one.id, at=at + 0.03, action=action, rule="RestartWorkers(budget=3)", reason=reason,
            passed_over={"FailTheJob()": "the fault is not the user's"},
        )  # fmt: skip
        self.write(one, fault, decision)
        for place, (name, took) in enumerate([] if is_open else PHASES.items()):
            self.write(Phase(job_id=self.job.id, incident_id=one.id, position=place, name=name, seconds=took))
        return one

    def lease(self, lease: Lease) -> None:
        """Write who controls the job."""
        self.write(lease)

    def node(self, name: str, status: str, reason: str, *, seconds: float) -> None:
        """Write a change of a node's status."""
        self.write(NodeStatusChange(cluster="local", node=name, at=self.zero + seconds, status=status, reason=reason, job_id=self.job.id))


def an_incident_diagnosis(incident: Incident, confidence: float) -> IncidentDiagnosis:
    """Return the hypotheses of an incident: a GPU that explains it, and a kill."""
    seen = {"at": incident.fault_at, "source": "kernel log on n1", "target": "node n1", "quote": "NVRM: Xid 79"}
    killed = {"kind": "worker-sigkill", "count": 1, "targets": ["rank 5 on n2"]}
    gpu = {
        "kind": "gpu-off-bus", "target": "node n1", "node": "n1", "rank": None, "confidence": confidence, "attributed_to": "gpu",
        "recommended_action": "evict",
        "evidence": [seen], "unexplained": [killed],
        "explains": [{"kind": "worker-peer-lost", "count": 1000, "targets": ["rank 0 on n0"]}],
    }  # fmt: skip
    kill = {
        "kind": "worker-sigkill", "target": "rank 5 on n2", "node": "n2", "rank": 5, "confidence": 1 - confidence,
        "attributed_to": "process",
        "recommended_action": "restart", "explains": [], "unexplained": [],
        "evidence": [{**seen, "source": "process exit of rank 5", "target": "rank 5 on n2", "quote": "ended by signal 9"}],
    }  # fmt: skip
    return IncidentDiagnosis(
        job_id=incident.job_id, incident_id=incident.id, at=incident.detected_at, kind="gpu-off-bus", target="node n1",
        confidence=confidence,
        reason="gpu-off-bus of node n1: NVRM: Xid 79", candidates=[gpu, kill],
    )  # fmt: skip


def a_running_job(history: History, name: str, zero: float) -> Author:
    """Write a job that has been through three incidents, the last of them open, and trains since."""
    author = Author(history, name, zero)
    author.move("LAUNCHING", "submitted", seconds=0, event="submitted")
    author.generation(1, {"n0": [0, 1], "n1": [2, 3]}, seconds=0.5)
    author.steps(1, 102, generation=1, seconds=2)
    author.move("RUNNING", "every worker made its first step", seconds=2.1)
    author.checkpoint(100, seconds=12)
    author.incident(1, "worker-sigkill", "rank 1 on n0", seconds=12.3)
    author.move("DIAGNOSING", "worker-sigkill of rank 1 on n0", seconds=12.31, event="faulted")
    author.generation(2, {"n0": [0, 1], "n1": [2, 3]}, seconds=12.5)
    author.steps(101, 150, generation=2, seconds=12.7)
    author.move("RUNNING", "every worker made its first step", seconds=12.8, generation=2)
    author.incident(2, "node-lost", "node n1", seconds=18, action="replace-node")
    author.generation(3, {"n0": [0, 1], "n2": [2, 3]}, seconds=18.2)
    author.steps(151, 400, generation=3, seconds=18.4)
    author.record_event("spare n3 is gone; 0 spares left", seconds=19)
    author.incident(3, "worker-exception", "rank 3 on n2", seconds=43.5, is_open=True, detail=TRACEBACK)
    author.move("RESCHEDULING", "restart 3 of 3 within 1 h", seconds=43.6, event="isolated", generation=3)
    return author
