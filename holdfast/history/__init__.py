"""The history of every job: transitions, faults, decisions and steps, append-only, in SQLite or PostgreSQL.

Here are its tables, queries, and what must be decided by one row (leases, cordons, approvals). What is computed from it belongs to
`holdfast.accounting`, what people read of it to `holdfast.report`.
"""

from __future__ import annotations

from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, LeaseRenewer, acquire, acquire_when_free, holder_of, this_host
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
from holdfast.history.recorder import Recorder, absorb
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
    "acquire",
    "acquire_when_free",
    "holder_of",
    "new_id",
    "queries",
    "this_host",
]
