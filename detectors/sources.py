"""Who told of a fault, in a person's words: two faults from one source are one witness, from two sources they are two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from detectors.evidence import (
    AgentUnreachable,
    CheckpointFailure,
    FrozenParameters,
    GroupFailure,
    InterruptedRecovery,
    LogLine,
    LossHistory,
    MemstoreFailure,
    NodeLeaving,
    NodePartitioned,
    NonFiniteLoss,
    Progress,
    RecoveryTimeout,
    ReplaceRanksFailure,
    ReplicaDigests,
    SchedulerNodeState,
    StartFailure,
    StepBreakdowns,
    StepTimes,
    WorkerExit,
    WorkerStop,
)
from detectors.gpu_readings import XidEvent
from detectors.readings import CounterGrowth, NodeReading


def exception_report(rank: int) -> str:
    """Return the source of what a rank's runtime told before its process ended."""
    return f"exception report of rank {rank}"


def worker_output(rank: int | None) -> str:
    """Return the source of what a worker printed."""
    return "worker output" if rank is None else f"worker output of rank {rank}"


def _log_line(seen: LogLine) -> str:
    if seen.rank is not None:
        return worker_output(seen.rank)
    return f"{seen.log} on {seen.node}" if seen.node else seen.log


def _take_over(seen: ReplaceRanksFailure) -> str:
    return f"report of rank {seen.rank}" if seen.rank is not None else f"agent of {seen.node}"


SOURCES: Final[dict[type, Callable[[Any], str]]] = {
    WorkerExit: lambda seen: f"process exit of rank {seen.rank}",
    WorkerStop: lambda seen: f"process state of rank {seen.rank}",
    AgentUnreachable: lambda seen: f"connection to the agent of {seen.node}",
    NodePartitioned: lambda seen: f"connections tried between {seen.node} and other nodes",
    Progress: lambda _seen: "steps and beats of all ranks",
    CheckpointFailure: lambda seen: f"report of rank {seen.rank}",
    MemstoreFailure: lambda seen: f"agent of {seen.node}",
    StartFailure: lambda seen: f"agent of {seen.node}",
    InterruptedRecovery: lambda _seen: "journals of the agents",
    SchedulerNodeState: lambda seen: f"state of {seen.node}, as Slurm has it",
    NodeLeaving: lambda _seen: "persons' words, the cluster's file and notices",
    RecoveryTimeout: lambda _seen: "clock of the recovery",
    GroupFailure: lambda seen: f"report of rank {seen.rank}",
    ReplaceRanksFailure: _take_over,
    NodeReading: lambda seen: f"look at {seen.node}",
    CounterGrowth: lambda seen: f"two looks at {seen.now.node}",
    XidEvent: lambda seen: f"GPU driver events on {seen.node}",
    LogLine: _log_line,
    NonFiniteLoss: lambda seen: f"loss of rank {seen.rank}",
    LossHistory: lambda _seen: "losses of rank 0",
    StepTimes: lambda _seen: "times of steps",
    StepBreakdowns: lambda _seen: "times of own work and of waiting",
    ReplicaDigests: lambda _seen: "digests of parameters",
    FrozenParameters: lambda seen: f"digests of parameters of rank {seen.rank}",
}
"""Where a kind of evidence comes from."""


def source_of(evidence: object) -> str:
    """Return who told of *evidence*; empty for a kind that has no entry."""
    told = SOURCES.get(type(evidence))
    return told(evidence) if told is not None else ""
