"""Histories to draw: a realistic job with three incidents, and the odd ones that a page must take as well."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sqlmodel import SQLModel

from holdfast.history.models import (
    Checkpoint,
    DecisionRecord,
    FaultRecord,
    Generation,
    Incident,
    Job,
    JobEvent,
    JobTransition,
    NodeStatusChange,
    Phase,
    Snapshots,
    StepRecord,
)
from holdfast.history.store import History
from tests.fresh_history import fresh_history

BEGAN = 1_790_000_000.0
SPEC: dict[str, Any] = {
    "name": "bytes-gpt",
    "script": "train_gpt.py",
    "args": ["--until", "600"],
    "nnodes": "1:2",
    "spare_nodes": 1,
    "nproc_per_node": 2,
    "policy": "balanced",
    "env": {"TOKEN": "swordfish"},
}
CLUSTER: dict[str, Any] = {"kind": "local", "name": "local", "nodes": 3}
TRACEBACK = """Traceback (most recent call last):
  File "train_gpt.py", line 88, in train_one
    loss.backward()
RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:40123
"""
PHASES = ("detect", "diagnose", "isolate", "reschedule", "communication", "load", "warm-up", "rollback")


def loss_at(step: int, *, noise: float = 0.05) -> float:
    """Return the loss of *step*: the same whenever it is computed."""
    return 1.35 + 4.2 * math.exp(-step / 110) + noise * random.Random(step).gauss(0, 1)


Row = TypeVar("Row", bound=SQLModel)


@dataclass(kw_only=True)
class Script:
    """Writes one job's history as its flow would, on a clock of its own."""

    history: History
    job: Job
    clock: float = BEGAN
    generation: int = 0
    state: str = "LAUNCHING"
    step: int = 0
    step_seconds: float = 0.09
    rows: list[Any] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        """Keep *row* for the next write."""
        self.rows.append(row)
        return row

    def write(self) -> Job:
        """Write all rows kept so far; return the job, which outlives them."""
        with self.history.session() as session:
            session.add_all(self.rows)
        self.rows.clear()
        return self.job

    def move(self, event: str, after: str, reason: str, *, seconds: float = 0.0) -> None:
        """Make one move after *seconds*."""
        self.clock += seconds
        self.add(
            JobTransition(
                job_id=self.job.id, at=self.clock, before=self.state, event=event, after=after, reason=reason, generation=self.generation
            )
        )  # fmt: skip
        self.state = after

    def gather_ranks(self, ranks: dict[str, list[int]], reason: str) -> Generation:
        """Agree on a new membership."""
        self.generation += 1
        size = sum(map(len, ranks.values()))
        row = Generation(
            job_id=self.job.id, number=self.generation, at=self.clock, world_size=size, ranks=ranks, port=29500,
            resumed_step=self.step, until=600, reason=reason,
        )  # fmt: skip
        return self.add(row)

    def train(self, until: int, *, save_every: int = 50, loss: bool = True) -> None:
        """Make steps up to *until*, with a checkpoint now and then."""
        while self.step < until:
            self.step += 1
            seconds = self.step_seconds * random.Random(-self.step).uniform(0.92, 1.12)
            self.clock += seconds
            value = loss_at(self.step) if loss else None
            self.add(StepRecord(job_id=self.job.id, generation=self.generation, step=self.step, at=self.clock, seconds=seconds, loss=value))
            if save_every and self.step % save_every == 0:
                self.save(seconds=0.041)

    def save(self, *, seconds: float, problem: str | None = None, reason: str = "") -> None:
        """Write a checkpoint of the present step, or trouble with it."""
        self.add(
            Checkpoint(
                job_id=self.job.id, at=self.clock, step=self.step, generation=self.generation, path=f"/srv/step-{self.step:08d}",
                seconds=seconds, size=13_654_021, problem=problem, reason=reason,
            )
        )  # fmt: skip

    def snapshots(self, generation: int, *, step: int, ages: dict[str, int]) -> None:
        """Write what a generation reported of its in-memory snapshots."""
        self.add(
            Snapshots(
                job_id=self.job.id, generation=generation, at=self.clock, step=step, age_steps=1, age_s=0.09, replica_step=step - 1,
                interval_steps=1, size=13_654_021, copied_s=4.0, overlapped_s=3.9, cost_s=0.2, trained_s=40.0, ages=ages,
            )
        )  # fmt: skip

    def stand(self, node: str, status: str, reason: str) -> None:
        """Change a node's status."""
        self.add(NodeStatusChange(cluster="local", node=node, at=self.clock, status=status, reason=reason, job_id=self.job.id))

    def suffer(self, number: int, faults: list[FaultRecord], *, detect: float, reason: str) -> Incident:
        """Open an incident that the first of *faults* is the root of."""
        root = faults[0]
        self.clock += detect
        incident = Incident(
            job_id=self.job.id, number=number, kind=root.kind, target=root.target, fault_at=root.at, detected_at=self.clock,
            commands_sent_at=self.clock + 0.012, generation_before=self.generation, step_before=self.step, reason=reason,
        )  # fmt: skip
        for fault in faults:
            fault.incident_id = incident.id
            self.add(fault)
        self.move("faulted", "DIAGNOSING", f"{root.kind} on {root.target}")
        return self.add(incident)

    def fault(self, kind: str, target: str, **facts: Any) -> FaultRecord:
        """Return a fault seen now; what *facts* do not say is as for a process that failed."""
        facts = {"recommended_action": "restart", "attributed_to": "process", "evidence": {}} | facts
        return FaultRecord(
            job_id=self.job.id, at=self.clock, kind=kind, target=target, generation=self.generation, step=self.step, **facts
        )  # fmt: skip

    def decide(self, incident: Incident, action: str, rule: str, reason: str, **facts: Any) -> None:
        """Record what the policy answered, and the move that follows."""
        incident.action = action
        self.add(
            DecisionRecord(job_id=self.job.id, incident_id=incident.id, at=self.clock, action=action, rule=rule, reason=reason, **facts)
        )  # fmt: skip
        self.move("decided", "ISOLATING", reason, seconds=0.004)

    def recover(self, incident: Incident, ranks: dict[str, list[int]], *, back_to: int, times: tuple[float, ...], reason: str) -> None:
        """Bring the job back: *times* are the seconds of `PHASES` but the last, which is the rollback and follows from the steps."""
        self.move("isolated", "RESCHEDULING", "every rank has stopped", seconds=times[2])
        before, self.step = self.step, back_to
        made = self.gather_ranks(ranks, reason)
        self.move("placed", "RESUMING", reason, seconds=times[3])
        self.move("started", "RUNNING", f"resumed from step {back_to}", seconds=sum(times[4:]))
        made.first_step_at = self.clock
        incident.generation_after, incident.outcome = self.generation, "recovered"
        incident.resumed_step, incident.steps_lost = back_to, before - back_to
        incident.closed_at, incident.downtime_s = self.clock, self.clock - incident.fault_at
        rollback = (before - back_to) * self.step_seconds
        for position, (name, seconds) in enumerate(zip(PHASES, (*times, rollback), strict=True)):
            self.add(Phase(job_id=self.job.id, incident_id=incident.id, position=position, name=name, seconds=seconds))

    def record_event(self, text: str) -> None:
        """Say something that is no fault."""
        self.add(JobEvent(job_id=self.job.id, at=self.clock, text=text))


def script(history: History, *, name: str = "bytes-gpt", spec: dict[str, Any] | None = None) -> Script:
    """Submit a job of which nothing else is known yet."""
    job = Job(name=name, spec=SPEC if spec is None else spec, cluster=CLUSTER, directory="/srv/jobs/bytes-gpt", at=BEGAN)
    begun = Script(history=history, job=job)
    begun.add(job)
    return begun


def launched(history: History, **facts: Any) -> Script:
    """Submit a job and bring it to RUNNING on two nodes."""
    begun = script(history, **facts)
    for node in ("node-0", "node-1", "node-2"):
        begun.stand(node, "healthy", "its agent answers")
    begun.gather_ranks({"node-0": [0, 1], "node-1": [2, 3]}, "first start: 2 of 2 nodes, 1 spare")
    begun.move("started", "RUNNING", "every worker made its first step", seconds=3.1)
    return begun


def killed(on: Script, number: int = 1) -> None:
    """Let a rank be killed, and restart in place."""
    root = on.fault(
        "worker-sigkill", "rank 1 on node-0", rank=1, node="node-0", root=True,
        evidence={"quote": "rank 1 on node-0 was ended by SIGKILL", "signal": 9, "pid": 41233, "signature": "SIGKILL"},
    )  # fmt: skip
    echo = on.fault(
        "worker-peer-lost", "rank 3 on node-1", rank=3, node="node-1", recommended_action="record", attributed_to="none",
        evidence={"quote": "RuntimeError: Connection closed by peer", "detail": TRACEBACK},
    )  # fmt: skip
    reason = "worker-sigkill on rank 1 of node-0 came 18 ms before the connection errors of the other ranks; restart 1 of 3 within 3600 s"
    incident = on.suffer(number, [root, echo], detect=0.021, reason=reason)
    on.decide(
        incident, "restart-workers", "RestartWorkers()", reason, act={"restarts": 1},
        passed_over={
            "Dismiss()": "worker-sigkill asks for restart",
            "StopForUserError()": "no user error",
            "StopWhenSpent()": "0 of 20 recoveries used",
        },
    )  # fmt: skip
    on.recover(
        incident, {"node-0": [0, 1], "node-1": [2, 3]}, back_to=max(0, on.step - 22), reason="the same nodes",
        times=(0.021, 0.004, 0.118, 0.172, 0.31, 0.082, 0.41),
    )  # fmt: skip


def stopped(on: Script, number: int = 2) -> None:
    """Let a rank pause, so that it is seen late."""
    root = on.fault(
        "worker-stopped", "rank 2 on node-1", rank=2, node="node-1", root=True,
        evidence={"quote": "rank 2 has been stopped by SIGSTOP for 1.0 s", "signal": 19},
    )  # fmt: skip
    reason = "worker-stopped on rank 2 of node-1: nobody let it go on for 1.0 s; restart 1 of 3 within 3600 s"
    incident = on.suffer(number, [root], detect=1.044, reason=reason)
    passed = {"Dismiss()": "worker-stopped asks for restart"}
    on.decide(incident, "restart-workers", "RestartWorkers()", reason, act={"restarts": 1}, passed_over=passed)
    on.recover(
        incident, {"node-0": [0, 1], "node-1": [2, 3]}, back_to=max(0, on.step - 37), reason="the same nodes",
        times=(1.044, 0.005, 0.097, 0.181, 0.29, 0.079, 0.39),
    )  # fmt: skip


def lost_node(on: Script, number: int = 3) -> None:
    """Let a node die, find the newest checkpoint corrupt, and go on with the spare."""
    root = on.fault(
        "node-lost", "node node-1", recommended_action="evict", attributed_to="node", node="node-1", root=True,
        evidence={"quote": "the agent of node-1 closed its connection and the node is silent", "last_words": ["beat 411", "beat 412"]},
    )  # fmt: skip
    on.stand("node-1", "lost", "its agent closed the connection and the node does not answer")
    reason = "node-lost on node node-1; node-2 replaces node-1"
    incident = on.suffer(number, [root], detect=0.034, reason=reason)
    on.decide(
        incident, "replace-node", "ReplaceNode()", reason, act={"drop": ["node-1"], "add": ["node-2"]},
        passed_over={"RestartWorkers()": "node-1 no longer answers"},
    )  # fmt: skip
    on.save(seconds=0.0, problem="checkpoint-corrupt", reason="shard 2 is not what the manifest says; the one before is taken")
    on.recover(
        incident, {"node-0": [0, 1], "node-2": [2, 3]}, back_to=max(0, on.step - 12), reason="node-2 for node-1",
        times=(0.034, 0.006, 0.141, 0.902, 0.33, 0.121, 0.47),
    )  # fmt: skip
    incident.facts = {"source": "memory", "replicas": 2, "snapshot_age": 12}


def three_incidents(history: History) -> Job:
    """Write a job of 600 steps that came through a killed rank, a stopped rank and a lost node."""
    on = launched(history)
    on.train(122)
    killed(on)
    on.train(287)
    stopped(on)
    on.train(350)
    on.record_event("the flow process ended and was started again; it adopted the running job, no worker restarted")
    on.train(412)
    lost_node(on)
    on.train(600)
    on.snapshots(2, step=286, ages={"1": 14})
    on.snapshots(4, step=599, ages={"1": 16, "2": 1})
    on.move("finished", "COMPLETED", "every worker said that all its steps are done", seconds=0.2)
    return on.write()


def open_history(folder: Path) -> History:
    """Open a fresh history in *folder*."""
    return fresh_history(folder / "history.db")
