"""The history: every move, fault, decision and step of every job, append-only, in SQLite or PostgreSQL."""

from __future__ import annotations

from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, LeaseKeeper, holder_of, take, this_host, wait_take
from holdfast.history.models import (
    Checkpoint,
    Decision,
    Fault,
    Generation,
    Incident,
    Job,
    Lease,
    Move,
    NodeMove,
    Phase,
    Remark,
    Request,
    Snapshots,
    Step,
    new_id,
)
from holdfast.history.recorder import Recorder
from holdfast.history.spill import absorb
from holdfast.history.store import History

__all__ = [
    "LEASE_SECONDS",
    "Checkpoint",
    "Decision",
    "Fault",
    "Generation",
    "History",
    "Incident",
    "Job",
    "Lease",
    "LeaseKeeper",
    "Move",
    "NodeMove",
    "Phase",
    "Recorder",
    "Remark",
    "Request",
    "Snapshots",
    "Step",
    "absorb",
    "holder_of",
    "new_id",
    "queries",
    "take",
    "this_host",
    "wait_take",
]
