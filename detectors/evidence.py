"""Raw signals as values. Who fetched them, and how, a detector cannot know.

Every time is in seconds on one clock of the reader's choice; ages are seconds already passed when the evidence was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Unknown:
    """Evidence that could not be had, and why: neither healthy nor a fault."""

    why: str


NOT_REQUESTED: Final = Unknown("not asked for")
"""What stands where nobody looked."""
Number = int | Unknown
"""A count, or why it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerException:
    """An exception that left a worker's script."""

    type: str
    message: str
    traceback: str = ""
    errno: int | None = None
    peer_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of a worker's process."""

    node: str
    rank: int
    at: float
    code: int | None = None
    signal: int | None = None
    finished: bool = False
    """It had said that all its steps are done, or its script reports no steps."""
    step: int | None = None
    raised: WorkerException | None = None
    oom: str | Unknown | None = None
    """The kernel's line about an out-of-memory kill of this process."""
    output: str = ""
    """The last lines it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStop:
    """A worker that a signal stopped, and that nobody let go on."""

    node: str
    rank: int
    at: float
    signal: int
    seconds: float
    """How long it has stood still."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUnreachable:
    """An agent that no longer speaks."""

    node: str
    at: float
    why: str
    node_answers: bool | Unknown
    """Whether a second, independent look reached the node."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePartitioned:
    """A node that can be asked, and that other nodes do not reach."""

    node: str
    at: float
    peers: tuple[str, ...]
    """Those that were tried and do not meet it."""
    why: str
    """Why the first of them did not."""
    alone: bool = True
    """It meets nobody while others meet each other: what is wrong is at its end. Else it is between the two, or nobody knows where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOperation:
    """An operation of a group that a rank has begun and that has not ended there."""

    way: str = ""
    """Empty for what all members take part in; ``send>3`` or ``recv<3`` for what passes between two ranks."""
    number: int
    """The how manieth of its way in this group, from 1: members agree about it."""
    name: str
    size: int = 0
    """Elements of its first tensor."""
    kind: str = ""
    """Their type."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a rank is in one group."""

    name: str
    ranks: tuple[int, ...]
    counts: Mapping[str, int]
    """Operations begun, by their way."""
    pending: tuple[PendingOperation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Where a rank stands, as it told when it was asked."""

    waits: str = ""
    """What it waits for (``gradients``, ``pipeline``, ``vote``, ``data``, ...); empty while it works, as far as can be seen."""
    seconds: float = 0.0
    """For how long."""
    groups: tuple[GroupProgress, ...] = ()
    place: str = ""
    """The innermost line of the user's own code."""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one rank is."""

    node: str
    step: int
    age: float
    """Seconds since its last sign of progress (a step, a section's begin or end, its start)."""
    section: str | None = None
    section_limit: float | None = None
    process: str = "?"
    """The kernel's one-letter process state."""
    wait: str = ""
    """The kernel function it sleeps in, if it could be read."""
    managed: bool = True
    """It has announced itself, so that steps are expected of it."""
    status: RankStatus | None = None
    """Where it stands, if it was asked since its last sign of progress and has answered."""
    heard: bool = True
    """Its agent has told of it in this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far all ranks are, now."""

    at: float
    ranks: dict[int, RankProgress]
    step_seconds: tuple[float, ...] = ()
    """Durations of the newest steps, oldest first."""
    since_start: float = 0.0
    """Seconds since the workers of this generation started."""
    steps_expected: bool = True
    output_age: float | None = None
    """Seconds since any worker printed anything, or ended."""
    moved: float | None = None
    """Seconds since ranks were last seen to get on within their step: operations of groups that begin."""
    status_requested: bool = False
    """All ranks were asked where they stand, long enough ago to have answered."""
    longest_pause: float = 0.0
    """The longest time without progress after which this job went on by itself."""
    printed: bool = True
    """Whether any rank has printed anything since the start."""
    ended: tuple[int, ...] = ()
    """Ranks that have ended with status 0, while those in `ranks` still run."""
    since_end: float = 0.0
    """Seconds since the newest of these ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteLoss:
    """A rank's loss that is no number, after one that was."""

    node: str
    rank: int
    at: float
    step: int
    loss: float
    alone: bool = False
    """No other rank told the like, although they had the time."""
    good: str = ""
    """What there is from before, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHistory:
    """The newest losses that rank 0 told of, oldest first."""

    at: float
    losses: tuple[tuple[int, float], ...]
    """Step and loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long the newest steps of a generation took, oldest first, all since its warm-up."""

    at: float
    steps: tuple[tuple[int, float], ...]
    """Step and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """How a rank's steps spent their time: medians of a block of steps, in seconds a step."""

    own: float
    """Own work: neither waiting for other ranks nor for data."""
    talk: float
    """Waiting for other ranks: for those that are slower, and for what passes between them."""
    data: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdowns:
    """How all ranks spent their time, block by block since the warm-up of the generation."""

    at: float
    step: int
    nodes: Mapping[int, str]
    first: Mapping[int, tuple[StepBreakdown, ...]]
    """By rank, the first blocks after the warm-up: what the newest are compared with."""
    blocks: Mapping[int, tuple[StepBreakdown, ...]]
    """By rank, the newest blocks, oldest first."""
    roles: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks that do the same work; empty where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigests:
    """Digests of the parameters of ranks that hold copies of one state, after the same step."""

    at: float
    step: int
    nodes: Mapping[int, str]
    digests: Mapping[int, str]
    sums: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By rank, the sums of single tensors, where they were asked for."""
    equal_at: int | None = None
    """The newest step after which they were equal."""
    good: str = ""
    """What there is from before the difference, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenParameters:
    """A rank whose parameters are the same to the bit in check after check."""

    at: float
    node: str
    rank: int
    steps: tuple[int, ...]
    """The steps of those checks, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailure:
    """What a worker said about a checkpoint that is not whole, or could not be written."""

    node: str
    rank: int
    at: float
    kind: str
    path: str
    why: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemstoreFailure:
    """What a node's agent said about state that is not kept in memory, or not on another node."""

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
    """What a worker that lives said of a process group that no longer works."""

    node: str
    rank: int
    at: float
    why: str
    group: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRanksFailure:
    """A take-over that somebody who has a part in it cannot carry out: a worker, or the agent of *node*."""

    node: str
    at: float
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimeout:
    """A recovery that did not bring the job to a step within its action's deadline."""

    at: float
    action: str
    seconds: float
    limit: float
    reached: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    """Rank to its node, how far its start came (higher is further), and that in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """A node whose time is up: its ranks could not move while training went on, and it will be gone in a moment."""

    node: str
    at: float
    why: str
    """Who takes it away, when and why; and why its ranks are on it still. Empty: nobody does."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerNodeState:
    """What the scheduler says of a node."""

    node: str
    at: float
    states: tuple[str, ...]
    """In its own words, in capitals: `DOWN`, `NOT_RESPONDING`, `DRAIN`, `ALLOCATED` and so on."""
    reason: str = ""
    """What somebody wrote beside it."""
    ours: bool = False
    """It was drained by Holdfast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRecovery:
    """Ranks that a flow had stopped for a recovery which it did not live to finish."""

    at: float
    state: str
    """What the history says the job was doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of any log, or a whole traceback."""

    text: str
    at: float = 0.0
    node: str | None = None
    rank: int | None = None
    log: str = "log"
    """What it stands in, such as ``kernel log``."""


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
    """When no progress is a hang: at least *least* seconds and *factor* median steps, and *timeout* seconds where nothing proves it."""

    first_step: float = 1800.0
    least: float = 2.0
    factor: float = 3.0
    timeout: float = 300.0
    section: float = 1800.0
    stopped_grace: float = 1.0
    output_silence: float | None = None
    end_grace: float = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """An example of evidence for a fault kind: either it shows the fault, or it looks alike and is healthy."""

    evidence: Any
    limits: HangLimits = field(default_factory=HangLimits, kw_only=True)
