"""The history: every move, fault, decision and step of every job, append-only, in SQLite or PostgreSQL."""

from __future__ import annotations

from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, LeaseRenewer, acquire_when_free, holder_of, take, this_host
from holdfast.history.models import (
    Checkpoint,
    DecidedCase,
    DecisionRecord,
    FaultRecord,
    Generation,
    HealthSample,
    Incident,
    IncidentDiagnosis,
    Job,
    JobEvent,
    JobTransition,
    Lease,
    NodeCordon,
    NodeHealthChange,
    NodeStatusChange,
    Phase,
    Request,
    ServiceTransition,
    Snapshots,
    StepRecord,
    new_id,
)
from holdfast.history.outbox_file import absorb
from holdfast.history.recorder import Recorder
from holdfast.history.store import History

__all__ = [
    "LEASE_SECONDS",
    "Checkpoint",
    "DecidedCase",
    "DecisionRecord",
    "FaultRecord",
    "Generation",
    "HealthSample",
    "History",
    "Incident",
    "IncidentDiagnosis",
    "Job",
    "JobEvent",
    "JobTransition",
    "Lease",
    "LeaseRenewer",
    "NodeCordon",
    "NodeHealthChange",
    "NodeStatusChange",
    "Phase",
    "Recorder",
    "Request",
    "ServiceTransition",
    "Snapshots",
    "StepRecord",
    "absorb",
    "acquire_when_free",
    "holder_of",
    "new_id",
    "queries",
    "take",
    "this_host",
]
