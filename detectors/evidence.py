"""Raw signals as values. Who fetched them, and how, a detector cannot know.

Every time is in seconds on one clock of the reader's choice; ages are seconds already passed when the evidence was taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Blind:
    """Evidence that could not be had, and why: neither healthy nor a fault."""

    why: str


NOT_ASKED: Final = Blind("not asked for")
"""What stands where nobody looked."""
Number = int | Blind
"""A count, or why it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
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
    raised: Raised | None = None
    oom: str | Blind | None = None
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
class AgentSilence:
    """An agent that no longer speaks."""

    node: str
    at: float
    why: str
    node_answers: bool | Blind
    """Whether a second, independent look reached the node."""
    step: int | None = None


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
    """Seconds since any worker printed anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTrouble:
    """What a worker said about a checkpoint that is not whole, or could not be written."""

    node: str
    rank: int
    at: float
    kind: str
    path: str
    why: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrouble:
    """What a node's agent said about state that is not kept in memory, or not on another node."""

    node: str
    at: float
    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrouble:
    """Workers that could not be started."""

    node: str
    at: float
    why: str
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTrouble:
    """What a worker that lives said of a process group that no longer works."""

    node: str
    rank: int
    at: float
    why: str
    group: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOverTrouble:
    """A take-over that somebody who has a part in it cannot carry out: a worker, or the agent of *node*."""

    node: str
    at: float
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """A recovery that did not bring the job to a step within its rung's deadline."""

    at: float
    rung: str
    seconds: float
    limit: float
    reached: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    """Rank to its node, how far its start came (higher is further), and that in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutShort:
    """Ranks that a flow had stopped for a recovery which it did not live to finish."""

    at: float
    state: str
    """What the history says the job was doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of any log, or a whole traceback. Nobody hands the flow such evidence yet."""

    text: str
    at: float = 0.0
    node: str | None = None
    rank: int | None = None


Evidence = (
    CutShort
    | Overrun
    | WorkerExit
    | WorkerStop
    | AgentSilence
    | Progress
    | CheckpointTrouble
    | MemoryTrouble
    | StartTrouble
    | GroupTrouble
    | TakeOverTrouble
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When no progress is a hang: at least *least* seconds and *factor* median steps."""

    first_step: float = 1800.0
    least: float = 2.0
    factor: float = 3.0
    section: float = 1800.0
    stopped_grace: float = 1.0
    output_silence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An example of evidence for a kind: by what it is seen, or what looks alike and is none."""

    evidence: Any
    limits: HangLimits = field(default_factory=HangLimits)
