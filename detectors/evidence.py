"""Evidence about jobs: raw signals as values, independent of how they were collected.

Times are in seconds on one clock that the collector chooses; ages are in seconds before the evidence was collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Unknown:
    """Evidence that could not be collected, and why: neither healthy nor a fault."""

    why: str


NOT_REQUESTED: Final = Unknown("not requested")
"""Value of evidence that was not requested."""
Number = int | Unknown
"""A count, or why it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerException:
    """An exception that ended a worker's script."""

    type: str
    message: str
    traceback: str = ""
    errno: int | None = None
    peer_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The exit of a worker's process."""

    node: str
    rank: int
    at: float
    code: int | None = None
    signal: int | None = None
    finished: bool = False
    """It had reported that all steps are done, or its script reports no steps."""
    step: int | None = None
    raised: WorkerException | None = None
    oom: str | Unknown | None = None
    """The kernel's log line about an out-of-memory kill of this process."""
    output: str = ""
    """The last lines it printed."""
    missed_by: tuple[int, ...] = ()
    """Ranks that failed after it because a peer was lost: to them it had not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStop:
    """A worker that a signal stopped and that was not continued."""

    node: str
    rank: int
    at: float
    signal: int
    seconds: float
    """How long it has been stopped."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUnreachable:
    """An agent that no longer answers."""

    node: str
    at: float
    why: str
    node_answers: bool | Unknown
    """Whether an independent second check reached the node."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePartitioned:
    """A node that answers the controller, and that other nodes cannot reach."""

    node: str
    at: float
    peers: tuple[str, ...]
    """Nodes that tried to connect and failed."""
    why: str
    """Why the first of them failed."""
    alone: bool = True
    """It reaches no node while others reach each other, so the problem is on its side; otherwise the location is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOperation:
    """An operation of a process group that a rank has started and not finished."""

    way: str = ""
    """Empty for a collective; ``send>3`` or ``recv<3`` for point-to-point operations."""
    number: int
    """Its sequence number among operations of this direction in the group, from 1; equal on all members."""
    name: str
    size: int = 0
    """Number of elements of its first tensor."""
    kind: str = ""
    """Data type of its first tensor."""
    seconds: float = 0.0
    """How long ago it was started; infinite if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """Progress of a rank in one process group."""

    name: str
    ranks: tuple[int, ...]
    counts: Mapping[str, int]
    """Number of started operations by direction."""
    pending: tuple[PendingOperation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedOperations:
    """How many collectives the ranks of one NCCL communicator have launched, where they differ; from NCCL's RAS."""

    name: str
    """The collective, as NCCL names it; ``collective`` for all together."""
    ranks: int
    """How many ranks the communicator has."""
    most: int
    """The number of the newest operation that any rank has launched."""
    behind: Mapping[int, int]
    """By rank, the newest operation of those that have launched fewer, as far as RAS names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Status of a rank, as it reported on request."""

    waits: str = ""
    """What it waits for (``gradients``, ``pipeline``, ``vote``, ``data``, ...); empty while it computes."""
    seconds: float = 0.0
    """For how long it has waited."""
    groups: tuple[GroupProgress, ...] = ()
    launched: tuple[LaunchedOperations, ...] = ()
    place: str = ""
    """The innermost line of the user's code."""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Progress of one rank."""

    node: str
    step: int
    age: float
    """Seconds since its last progress (a step, the start or end of a section, its start)."""
    section: str | None = None
    section_limit: float | None = None
    process: str = "?"
    """The kernel's one-letter process state."""
    wait: str = ""
    """The kernel function that it sleeps in, if known."""
    managed: bool = True
    """It uses the runtime, so that steps are expected of it."""
    status: RankStatus | None = None
    """Its status, if it was requested since its last progress and was answered."""
    reported: bool = True
    """Its agent has reported it in this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of all ranks."""

    at: float
    ranks: dict[int, RankProgress]
    step_seconds: tuple[float, ...] = ()
    """Durations of the newest steps, oldest first."""
    since_start: float = 0.0
    """Seconds since the workers of this generation started."""
    steps_expected: bool = True
    output_age: float | None = None
    """Seconds since any worker printed something or exited."""
    moved: float | None = None
    """Seconds since ranks last started an operation within their step."""
    status_requested: bool = False
    """The status of all ranks was requested long enough ago for an answer."""
    longest_pause: float = 0.0
    """The longest time without progress from which this job continued by itself."""
    printed: bool = True
    """Whether any rank has printed something since the start."""
    ended: tuple[int, ...] = ()
    """Ranks that exited with status 0 while those in `ranks` still run."""
    since_end: float = 0.0
    """Seconds since the last of them exited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExit:
    """Ranks that exited with status 0 while others still run, before any step of this generation is known."""

    at: float
    node: str
    """Node of the first of them."""
    ended: tuple[int, ...]
    """First to exit first."""
    running: tuple[int, ...]
    ran: float
    """Seconds from the start of the first to its exit."""
    since: float
    """Seconds since the first exited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteLoss:
    """A rank's non-finite loss after a finite one."""

    node: str
    rank: int
    at: float
    step: int
    loss: float
    alone: bool = False
    """No other rank reported one in time."""
    good: str = ""
    """The checkpoint from before, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHistory:
    """The newest losses of rank 0, oldest first."""

    at: float
    losses: tuple[tuple[int, float], ...]
    """Step and loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step times of a generation since its warm-up, oldest first."""

    at: float
    steps: tuple[tuple[int, float], ...]
    """Step and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Where the time of a rank's steps went: medians of a block of steps, in seconds per step."""

    own: float
    """Compute: neither waiting for other ranks nor for data."""
    talk: float
    """Waiting for other ranks and for transfers."""
    data: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdowns:
    """Step time breakdowns of all ranks, block by block since the warm-up of the generation."""

    at: float
    step: int
    nodes: Mapping[int, str]
    first: Mapping[int, tuple[StepBreakdown, ...]]
    """By rank, the first blocks after the warm-up, as a baseline."""
    blocks: Mapping[int, tuple[StepBreakdown, ...]]
    """By rank, the newest blocks, oldest first."""
    roles: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks with the same work; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigests:
    """Digests of the parameters of replicas, after the same step."""

    at: float
    step: int
    nodes: Mapping[int, str]
    digests: Mapping[int, str]
    sums: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By rank, checksums of single tensors, if requested."""
    equal_at: int | None = None
    """The newest step after which they were equal."""
    good: str = ""
    """The checkpoint from before the difference, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenParameters:
    """A rank whose parameters stay bit-equal in consecutive checks."""

    at: float
    node: str
    rank: int
    steps: tuple[int, ...]
    """Steps of the checks, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailure:
    """A checkpoint that is incomplete or could not be written, as a worker reported."""

    node: str
    rank: int
    at: float
    kind: str
    path: str
    why: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemstoreFailure:
    """In-memory snapshots that cannot be stored or replicated, as an agent reported."""

    node: str
    at: float
    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """Workers that could not be started."""

    node: str
    at: float
    why: str
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """A broken process group, as a live worker reported."""

    node: str
    rank: int
    at: float
    why: str
    group: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRanksFailure:
    """A replacement of ranks that a worker, or the agent of *node*, cannot carry out."""

    node: str
    at: float
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimeout:
    """A recovery that brought no step within its action's timeout."""

    at: float
    action: str
    seconds: float
    limit: float
    reached: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    """Rank to its node, the phase that its start reached (higher is later), and the phase's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """A node that is about to be removed, and whose ranks could not migrate."""

    node: str
    at: float
    why: str
    """Who removes it, when and why, and why its ranks are still on it. Empty: it stays."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerNodeState:
    """State of a node in the scheduler."""

    node: str
    at: float
    states: tuple[str, ...]
    """The scheduler's names, in capitals: `DOWN`, `NOT_RESPONDING`, `DRAIN`, `ALLOCATED`, ..."""
    reason: str = ""
    """The reason in the scheduler."""
    ours: bool = False
    """Holdfast drained it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRecovery:
    """Ranks that a controller stopped for a recovery and did not restart before it died."""

    at: float
    state: str
    """The job's state in the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A log line, or a complete traceback."""

    text: str
    at: float = 0.0
    node: str | None = None
    rank: int | None = None
    log: str = "log"
    """The log, such as ``kernel log``."""


Evidence = (
    InterruptedRecovery
    | NodeLeaving
    | SchedulerNodeState
    | RecoveryTimeout
    | WorkerExit
    | WorkerStop
    | AgentUnreachable
    | NodePartitioned
    | Progress
    | EarlyExit
    | CheckpointFailure
    | MemstoreFailure
    | StartFailure
    | GroupFailure
    | ReplaceRanksFailure
    | NonFiniteLoss
    | LossHistory
    | StepTimes
    | StepBreakdowns
    | ReplicaDigests
    | FrozenParameters
    | LogLine
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When missing progress is a hang: after *hang_min* seconds and *hang_multiplier* median steps if proven, else after *hang* seconds."""

    startup: float = 1800.0
    hang_min: float = 2.0
    hang_multiplier: float = 3.0
    hang: float = 300.0
    section: float = 1800.0
    stopped_process: float = 1.0
    log_silence: float | None = None
    exit_grace: float = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """An example of evidence for a fault kind: either it shows the fault, or it looks alike and is healthy."""

    evidence: Any
    limits: HangLimits = field(default_factory=HangLimits, kw_only=True)
