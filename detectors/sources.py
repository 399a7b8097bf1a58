"""Names of the sources of evidence. Faults from different sources are independent observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.detectors.catalogue import DRIVER_EVENTS
from holdfast.detectors.evidence import (
    AgentUnreachable,
    CheckpointFailure,
    EarlyExit,
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
from holdfast.detectors.nodes.gpu_readings import XidEvent
from holdfast.detectors.nodes.readings import CounterGrowth, NodeReading


def exception_report(rank: int) -> str:
    """Return the source of a rank's exception report."""
    return f"exception report of rank {rank}"


def worker_output(rank: int | None) -> str:
    """Return the source of a worker's output."""
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
    NodePartitioned: lambda seen: f"connection checks between {seen.node} and other nodes",
    Progress: lambda _seen: "heartbeats of all ranks",
    EarlyExit: lambda seen: f"agent of {seen.node}",
    CheckpointFailure: lambda seen: f"report of rank {seen.rank}",
    MemstoreFailure: lambda seen: f"agent of {seen.node}",
    StartFailure: lambda seen: f"agent of {seen.node}",
    InterruptedRecovery: lambda _seen: "event logs of the agents",
    SchedulerNodeState: lambda seen: f"Slurm state of {seen.node}",
    NodeLeaving: lambda _seen: "drains, maintenance windows and preemption notices",
    RecoveryTimeout: lambda _seen: "clock of the recovery",
    GroupFailure: lambda seen: f"report of rank {seen.rank}",
    ReplaceRanksFailure: _take_over,
    NodeReading: lambda seen: f"probe of {seen.node}",
    CounterGrowth: lambda seen: f"two probes of {seen.now.node}",
    XidEvent: lambda seen: f"{DRIVER_EVENTS} on {seen.node}",
    LogLine: _log_line,
    NonFiniteLoss: lambda seen: f"loss of rank {seen.rank}",
    LossHistory: lambda _seen: "losses of rank 0",
    StepTimes: lambda _seen: "step times",
    StepBreakdowns: lambda _seen: "compute and wait times",
    ReplicaDigests: lambda _seen: "digests of parameters",
    FrozenParameters: lambda seen: f"digests of parameters of rank {seen.rank}",
}
"""Type of evidence to the name of its source."""


def source_of(evidence: object) -> str:
    """Return the source of *evidence*; empty for an unlisted type."""
    name = SOURCES.get(type(evidence))
    return name(evidence) if name is not None else ""
