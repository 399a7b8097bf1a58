"""The history: every move, fault, decision and step of every job, append-only, in SQLite or PostgreSQL."""

from __future__ import annotations

from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, LeaseKeeper, holder_of, take, this_host, wait_take
from holdfast.history.models import (
    Checkpoint,
    DecidedCase,
    Decision,
    Fault,
    Generation,
    Incident,
    Job,
    LastLook,
    Lease,
    Move,
    NodeHold,
    NodeMove,
    NodeVerdict,
    Phase,
    Remark,
    Request,
    ServiceMove,
    Snapshots,
    Step,
    Verdict,
    new_id,
)
from holdfast.history.outbox_file import absorb
from holdfast.history.recorder import Recorder
from holdfast.history.store import History

__all__ = [
    "LEASE_SECONDS",
    "Checkpoint",
    "DecidedCase",
    "Decision",
    "Fault",
    "Generation",
    "History",
    "Incident",
    "Job",
    "LastLook",
    "Lease",
    "LeaseKeeper",
    "Move",
    "NodeHold",
    "NodeMove",
    "NodeVerdict",
    "Phase",
    "Recorder",
    "Remark",
    "Request",
    "ServiceMove",
    "Snapshots",
    "Step",
    "Verdict",
    "absorb",
    "holder_of",
    "new_id",
    "queries",
    "take",
    "this_host",
    "wait_take",
]
