"""The events that agents send, as typed records: which fields each has, and which of them it needs.

Each is checked before anything is built on it: a damaged journal or a node in the wrong hands must not end the flow. A field that is
read is named here with its type; one without a default is needed. What is not named is let through, so that agents may say more than
this version of the flow understands. Who sends each event and who handles it says `holdfast.control.supervisor.event_table`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from holdfast.control.agents.fields import Count, Digits, Groups, Real, Record, Whole

_Row = Annotated[tuple[Count, Real, Real, float | None], Field(strict=False)]
"""A step, when it ended, its seconds and its loss; JSON has no tuples."""


class AgentEvent(Record):
    """What any event has. Times are the agent's wall clock."""

    event: Annotated[str, StringConstraints(max_length=64)]
    at: Real | None = None
    generation: Count | None = None
    """The one that it belongs to; none where it is about the node."""


class RankEvent(AgentEvent):
    """About one rank of one generation."""

    generation: Count
    rank: Count

    @property
    def who(self) -> tuple[str, int]:
        """Return whom it is about."""
        return "rank", self.rank


class WorkerEvent(RankEvent):
    """Believed from the agent of the rank's own node alone."""


class StandbyEvent(AgentEvent):
    """About one standby."""

    id: Count

    @property
    def who(self) -> tuple[str, int]:
        """Return whom it is about."""
        return "standby", self.id


class Reason(AgentEvent):
    """Something that has a reason, in words."""

    why: str


# -- the life of a rank ----------------------------------------------------------------------------------------------------


class ExceptionFacts(Record):
    """The exception that ended a script."""

    type: str
    message: str
    traceback: str | None = None
    errno: Whole | None = None
    step: Count | None = None
    peer_lost: bool = False


class WorkerStarted(WorkerEvent):
    """A rank has a process: a new one, or a standby that was promoted."""

    at: Real
    pid: Count | None
    standby: Count | None = None


class WorkerKept(WorkerEvent):
    """A rank's process lives on in a new generation."""

    at: Real
    pid: Count | None
    grouped: bool = False


class WorkerPidChanged(WorkerEvent):
    """Another process is the rank's from now on: one that a standby had forked before its script began."""

    pid: Count


class WorkerHello(WorkerEvent):
    """A rank has connected to its agent."""


class WorkerProtocolMismatch(WorkerEvent, Reason):
    """A rank speaks another protocol than its agent, and is not listened to."""


class WorkerGroups(WorkerEvent):
    """A rank's process groups are Holdfast's own: its process can be kept when others are lost."""


class WorkerRoles(WorkerEvent):
    """Which ranks do the same work, which hold copies of each other, and where what they recorded for standbys lies."""

    roles: Groups | None = None
    copies: Groups | None = None
    recordings: str = ""


class WorkerBroken(WorkerEvent, Reason):
    """A rank has given up its process groups."""

    at: Real
    group: str = ""
    step: Count | None = None


class WorkerRecoveryFailed(WorkerEvent, Reason):
    """A rank cannot go on in its process, or in that generation."""

    at: Real


class WorkerRegrouped(WorkerEvent):
    """How a rank came into this generation without a restart."""

    seconds: dict[str, Real] = Field(default_factory=dict)
    source: str = ""
    rebuilt: Count = 0
    kept: Count = 0
    bytes: Count = 0
    replica: bool = False
    bandwidth: Real | None = None
    interface: str = ""
    differs: list[str] = Field(default_factory=list)


class WorkerCoverage(WorkerEvent):
    """How much of its first step the warm-up of a standby that took a rank had foreseen."""

    calls: Count | None = None
    foreseen: Count | None = None
    first_met: list[Any] | None = None


class WorkerPrepared(WorkerEvent):
    """A rank is ready for a planned generation."""

    for_generation: Count


class WorkerUnprepared(WorkerEvent, Reason):
    """A rank cannot get ready for a planned generation."""

    for_generation: Count


class WorkerSwitched(WorkerEvent):
    """A rank has gone on into a planned generation by itself."""

    for_generation: Count
    seconds: Real = 0.0


class WorkerDeparted(WorkerEvent):
    """A rank's state is with another process: its end is as planned."""


class WorkerStopped(WorkerEvent):
    """A signal has stopped a rank's process."""

    at: Real
    signal: Whole


class WorkerContinued(WorkerEvent):
    """A process that was stopped goes on."""


class WorkerRaised(WorkerEvent):
    """A rank's script has raised an exception; its process has still to end."""

    at: Real
    raised: ExceptionFacts
    step: Count | None


class WorkerExited(WorkerEvent):
    """A rank's process has ended."""

    ended: Real
    code: Whole | None
    signal: Whole | None
    finished: bool
    ordered: bool
    step: Count | None
    raised: ExceptionFacts | None
    oom: str | None
    oom_blind: str | None
    output: str | None


class StartFailed(RankEvent, Reason):
    """A rank's process could not be started."""

    at: Real
    errno: Whole | None


class WorkersExited(AgentEvent):
    """All workers of a node have ended by order."""

    generation: Count


# -- training --------------------------------------------------------------------------------------------------------------


class Mark(RankEvent):
    """How long a part of a rank's start took."""

    name: str
    seconds: Real


class Resumed(RankEvent):
    """A rank has loaded its state."""

    step: Count
    path: str | None = None
    replica: bool = False


class WorkerStepped(WorkerEvent):
    """A rank has finished its first step of this generation."""

    at: Real
    step: Count
    until: Count | None = None
    heartbeat: bool = False


class Steps(AgentEvent):
    """Steps that rank 0 has finished."""

    generation: Count
    steps: Annotated[list[_Row], Field(min_length=1)]


class SnapshotFacts(Record):
    """The newest snapshot of a rank, and what its snapshots have cost."""

    step: Count | None = None
    age: Real | None = None
    every: Count | None = None
    size: Count = 0
    copied: Real = 0.0
    overlapped: Real = 0.0
    slowed: Real = 0.0
    trained: Real = 0.0
    why: str | None = None


class ParameterDigest(Record):
    """The digest of a rank's parameters after a step, and whose copies they are."""

    step: Count
    digest: str
    shard: str


class RankHeartbeat(Record):
    """How far one rank is."""

    step: Count | None
    age: Real
    section: str | None
    section_limit: Real | None
    managed: bool
    process: str
    wait: str
    output_age: Real | None
    printed: bool = True
    snapshot: SnapshotFacts = SnapshotFacts()
    replica: Count | None = None
    paces: list[Annotated[list[Real], Field(min_length=4, max_length=4)]] = Field(default_factory=list)
    checks: list[ParameterDigest] = Field(default_factory=list)


class Heartbeats(AgentEvent):
    """How far the ranks of a node are; never journaled."""

    generation: Count
    ranks: dict[Digits, RankHeartbeat]


class WorkerAnswer(WorkerEvent):
    """A rank's answer to a question of the controller: never journaled."""

    said: dict[str, Any] = Field(default_factory=dict)


class WorkerRankStatus(WorkerAnswer):
    """Where a rank stands, and what it waits for."""


class WorkerChecksums(WorkerAnswer):
    """The sums of single tensors of a rank."""


class WorkerLoss(WorkerEvent):
    """A rank's loss is no number any more."""

    at: Real
    step: Count
    loss: float


class Saved(RankEvent):
    """A checkpoint is whole."""

    at: Real
    step: Count
    path: str
    seconds: Real
    size: Count
    beside: Real | None = None
    """Seconds for which it was written beside training."""


class StorageErrorEvent(RankEvent, Reason):
    """Something is wrong with a checkpoint, or with snapshots."""

    at: Real
    kind: str
    path: str
    step: Count | None


class Finished(RankEvent):
    """A rank's script has come to its end."""


# -- standbys --------------------------------------------------------------------------------------------------------------


class StandbyStarted(StandbyEvent):
    """A standby has a process."""


class StandbyReady(StandbyEvent):
    """A standby is warm and parked."""

    role: Count | None = None
    seconds: Real | None = None
    rss: Count | None = None
    coverage: dict[str, Any] = Field(default_factory=dict)


class StandbyExited(StandbyEvent):
    """A standby has ended, or could not be started."""

    ordered: bool = False
    raised: ExceptionFacts | None = None
    why: str | None = None
    signal: Whole | None = None
    code: Whole | None = None


class StandbyProtocolMismatch(StandbyEvent, Reason):
    """A standby speaks another protocol than its agent, and is not listened to."""


class StandbyPrepared(StandbyEvent):
    """A standby is ready for a planned generation."""

    for_generation: Count


class StandbyUnprepared(StandbyEvent, Reason):
    """A standby cannot get ready for a planned generation."""

    for_generation: Count


class StandbySwitched(StandbyEvent):
    """A standby has gone on into a planned generation by itself."""

    for_generation: Count
    seconds: Real = 0.0


class StandbyBroken(StandbyEvent):
    """A standby has given up its process groups."""


class StandbyRecoveryFailed(StandbyEvent):
    """A standby cannot take the rank that it was given."""


class StandbyRegrouped(StandbyEvent):
    """A standby has come into a generation that is not on record yet."""


class StandbyCoverage(StandbyEvent):
    """How much of its first step the warm-up of a standby had foreseen."""


# -- nodes -----------------------------------------------------------------------------------------------------------------


class MemstoreUnavailable(Reason):
    """A node keeps no training state in memory, or serves none to others."""

    at: Real


class MemstoreFull(Reason):
    """A node has no room for replicas."""

    at: Real


class MemstoreHasRoom(AgentEvent):
    """A node has room for replicas again."""


class ReplicaLost(Reason):
    """A node's snapshots do not reach the node that keeps their replicas."""

    at: Real
    peer: str


class ReplicaRestored(AgentEvent):
    """A node's snapshots are whole on another node again."""

    at: Real
    peer: str


class NodeFaultSeen(AgentEvent):
    """Something is wrong with a node."""

    kind: str
    seen_at: Real
    part: str
    quote: str
    source: str
    on: list[Count] = Field(default_factory=list)
    """Ranks that compute on that part."""


class NodeCounterIncreases(AgentEvent):
    """Error counters that grew on a node while a generation ran."""

    over: Count
    seconds: Real
    counter_increases: dict[str, Any]


class NodeUnmonitored(Reason):
    """Nothing looks for faults on a node any more."""


class NodeGpuEventsLost(Reason):
    """A node does not get the errors of its GPUs' driver."""


class NodeGpuEventsRestored(AgentEvent):
    """A node gets the errors of its GPUs' driver again."""


class NoticeUnknown(Reason):
    """Whether a node will be taken away cannot be seen."""


class PreemptionNoticed(AgentEvent):
    """A node is about to go."""

    at: Real
    seconds: Real
    why: str = "it was told to go"


class PreemptionCancelled(AgentEvent):
    """The notice that a node would go was taken back."""


class AgentConnectionLost(Reason):
    """An agent does not answer any more: its connection could not be had again."""


class AgentEnded(AgentEvent):
    """An agent ends."""


class LeaseEnded(AgentEvent):
    """No controller has spoken for so long that the agent ends its workers and itself."""

    seconds: Real


class ForkServerReady(AgentEvent):
    """The warm starter has imported what the script needs."""

    seconds: Real


class ForkServerExited(AgentEvent):
    """The warm starter has ended."""


class ReplayedEvents(AgentEvent):
    """Events that an agent which was killed may have sent to nobody."""

    events: list[dict[str, Any]]
