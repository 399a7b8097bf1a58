"""Rows with what a test does not care about filled in."""

from __future__ import annotations

import time
from typing import Any

from sqlmodel import col, select

from holdfast.history import (
    Checkpoint,
    DecisionRecord,
    FaultRecord,
    Generation,
    History,
    Incident,
    Job,
    JobEvent,
    JobTransition,
    NodeHealthChange,
    NodeStatusChange,
    Phase,
    Request,
    ServiceTransition,
    Snapshots,
    StepRecord,
)


def a_job(name: str = "gpt", **fields: Any) -> Job:
    """Return a job."""
    return Job(**{"name": name, "spec": {"name": name}, "directory": "/jobs", "at": time.time(), **fields})


def a_move(job: str, after: str, **fields: Any) -> JobTransition:
    """Return a move to the state *after*."""
    return JobTransition(**{"job_id": job, "at": 1.0, "before": "", "event": "", "after": after, "reason": "", "generation": 1, **fields})


def a_step(job: str, step: int, **fields: Any) -> StepRecord:
    """Return a step of generation 1 that took a second."""
    return StepRecord(**{"job_id": job, "generation": 1, "step": step, "at": float(step), "seconds": 1.0, "loss": 1.0 / step, **fields})


def an_incident(job: str, number: int, **fields: Any) -> Incident:
    """Return an incident."""
    known = {"kind": "killed", "target": "rank 0", "fault_at": 1.0, "detected_at": 1.1, "generation_before": 1}
    return Incident(**{"job_id": job, "number": number, **known, **fields})


def a_fault(job: str, **fields: Any) -> FaultRecord:
    """Return a fault."""
    known = {"at": 1.0, "kind": "killed", "recommended_action": "restart", "target": "rank 0", "attributed_to": "unknown", "generation": 1}
    return FaultRecord(**{"job_id": job, **known, **fields})


def a_decision(job: str, incident: str, **fields: Any) -> DecisionRecord:
    """Return a decision."""
    known = {"at": 1.0, "action": "restart-workers", "rule": "RestartWithin()", "reason": "restart 1 of 3"}
    return DecisionRecord(**{"job_id": job, "incident_id": incident, **known, **fields})


def one_of_each(job: str) -> list[Any]:
    """Return a row of every table that a recorder writes."""
    incident = an_incident(job, 1)
    return [
        a_job(id=job),
        a_move(job, "LAUNCHING"),
        Generation(job_id=job, number=1, at=1.0, world_size=2, ranks={"n0": [0, 1]}),
        NodeStatusChange(cluster="local", node="n0", at=1.0, status="healthy", reason="new"),
        incident,
        a_fault(job, incident_id=incident.id),
        a_decision(job, incident.id),
        Phase(job_id=job, incident_id=incident.id, position=0, name="detect", seconds=0.1),
        a_step(job, 1),
        Checkpoint(job_id=job, at=1.0, step=1, generation=1, path="/c/1", size=5 * 2**40),
        Snapshots(job_id=job, generation=1, at=1.0, step=1, age_steps=1, age_s=0.5, interval_steps=1, size=5 * 2**40, ages={"1": 3}),
        Request(job_id=job, at=1.0, kind="stop", by="me"),
        JobEvent(job_id=job, at=1.0, text="hello"),
    ]


def service_moves(history: History, cluster: str, node: str) -> list[ServiceTransition]:
    """Return the moves of *node* in their order."""
    query = select(ServiceTransition).where(col(ServiceTransition.cluster) == cluster, col(ServiceTransition.node) == node)
    with history.session() as session:
        return list(session.exec(query.order_by(col(ServiceTransition.number))))


def health_changes(history: History, cluster: str) -> list[NodeHealthChange]:
    """Return what changed about the nodes of *cluster*, oldest first."""
    with history.session() as session:
        return list(
            session.exec(select(NodeHealthChange).where(col(NodeHealthChange.cluster) == cluster).order_by(col(NodeHealthChange.id)))
        )
