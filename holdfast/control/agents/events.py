"""The events that agents send, as typed records with their required and optional fields.

A field that the controller reads is declared here with its type; one without a default is required. Other fields are ignored, so that
agents may send more than this version understands. `holdfast.control.supervisor.event_table` lists who sends and who handles each event.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StringConstraints

from holdfast.control.agents.schema import Count, Digits, Groups, Integer, Real, Record

_UNSIZED: Final = 4
"""Values of a step whose script reports neither samples nor tokens."""


def _with_sizes(row: object) -> object:
    """Return the values of a step with those that its script does not report."""
    return [*row, None, None] if isinstance(row, list | tuple) and len(row) == _UNSIZED else row


_Row = Annotated[tuple[Count, Real, Real, float | None, Count | None, Count | None], Field(strict=False), BeforeValidator(_with_sizes)]
"""A step, when it ended, its seconds, loss, samples and tokens; JSON has no tuples."""


class AgentEvent(Record):
    """The fields of every event. Times are the agent's wall clock."""

    event: Annotated[str, StringConstraints(max_length=64)]
    at: Real | None = None
    generation: Count | None = None
    """The generation that it belongs to; None for an event about the node."""


class RankEvent(AgentEvent):
    """An event about one rank of one generation."""

    generation: Count
    rank: Count

    @property
    def who(self) -> tuple[str, int]:
        """Return the rank that it is about."""
        return "rank", self.rank


class WorkerEvent(RankEvent):
    """Accepted from the agent of the rank's own node only."""


class HotSpareEvent(AgentEvent):
    """An event about one hot spare."""

    id: Count

    @property
    def who(self) -> tuple[str, int]:
        """Return the hot spare that it is about."""
        return "hot_spare", self.id


class Reason(AgentEvent):
    """An event with a reason, as text."""

    why: str


# -- the life of a rank ----------------------------------------------------------------------------------------------------


class ExceptionFacts(Record):
    """The exception that ended a script."""

    type: str
    message: str
    traceback: str | None = None
    errno: Integer | None = None
    step: Count | None = None
    peer_lost: bool = False


class WorkerStarted(WorkerEvent):
    """A rank has a process: a new one, or a hot spare that was activated."""

    at: Real
    pid: Count | None
    hot_spare: Count | None = None


class WorkerKept(WorkerEvent):
    """A rank's process lives on in a new generation."""

    at: Real
    pid: Count | None
    grouped: bool = False


class WorkerPidChanged(WorkerEvent):
    """The rank has another process from now on: one that a hot spare had forked before its script began."""

    pid: Count


class WorkerHello(WorkerEvent):
    """A rank has connected to its agent."""


class WorkerProtocolMismatch(WorkerEvent, Reason):
    """A rank speaks another protocol than its agent; its messages are ignored."""


class WorkerGroups(WorkerEvent):
    """A rank's process groups are Holdfast's own: its process can be kept when others are lost."""


class WorkerLevel(WorkerEvent):
    """Which level of integration the script has reached, and a sentence that says what it means; sent by rank 0."""

    level: str
    text: str


class WorkerRoles(WorkerEvent):
    """Which ranks do the same work, which are replicas of each other, and where their recordings for hot spares are."""

    roles: Groups | None = None
    copies: Groups | None = None
    recordings: str = ""


class WorkerBroken(WorkerEvent, Reason):
    """A rank has aborted its process groups."""

    at: Real
    group: str = ""
    step: Count | None = None


class WorkerRecoveryFailed(WorkerEvent, Reason):
    """A rank cannot continue in its process, or in that generation."""

    at: Real


class WorkerRegrouped(WorkerEvent):
    """How a rank joined this generation without a restart."""

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
    """How much of its first step the warm-up of a hot spare that took a rank had covered."""

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
    """A rank has switched to a planned generation."""

    for_generation: Count
    seconds: Real = 0.0


class WorkerDeparted(WorkerEvent):
    """Another process has the rank's state: its exit is planned."""


class WorkerStopped(WorkerEvent):
    """A signal has stopped a rank's process."""

    at: Real
    signal: Integer


class WorkerContinued(WorkerEvent):
    """A stopped process continues."""


class WorkerRaised(WorkerEvent):
    """A rank's script has raised an exception; its process has not exited yet."""

    at: Real
    raised: ExceptionFacts
    step: Count | None


class WorkerExited(WorkerEvent):
    """A rank's process has exited."""

    ended: Real
    code: Integer | None
    signal: Integer | None
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
    errno: Integer | None


class WorkersExited(AgentEvent):
    """All workers of a node have exited after a command."""

    generation: Count


# -- training --------------------------------------------------------------------------------------------------------------


class Mark(RankEvent):
    """How long one part of a rank's startup took."""

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
    """The newest in-memory snapshot of a rank, and the cost of its snapshots."""

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
    """The digest of a rank's parameters after a step, and the shard that they are a replica of."""

    step: Count
    digest: str
    shard: str


class RankHeartbeat(Record):
    """The progress of one rank."""

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
    step_timings: list[Annotated[list[Real], Field(min_length=4, max_length=4)]] = Field(default_factory=list)
    checks: list[ParameterDigest] = Field(default_factory=list)


class Heartbeats(AgentEvent):
    """The progress of the ranks of a node; never kept in the event log."""

    generation: Count
    ranks: dict[Digits, RankHeartbeat]


class WorkerAnswer(WorkerEvent):
    """A rank's answer to a query of the controller; never kept in the event log."""

    said: dict[str, Any] = Field(default_factory=dict)


class WorkerRankStatus(WorkerAnswer):
    """What a rank executes, and what it waits for."""


class WorkerChecksums(WorkerAnswer):
    """The checksums of single tensors of a rank."""


class WorkerLoss(WorkerEvent):
    """A rank's loss is not finite."""

    at: Real
    step: Count
    loss: float


class Saved(RankEvent):
    """A checkpoint is complete."""

    at: Real
    step: Count
    path: str
    seconds: Real
    size: Count
    overlapped: Real | None = None
    """Seconds for which training continued while it was written."""


class StorageErrorEvent(RankEvent, Reason):
    """A problem with a checkpoint, or with in-memory snapshots."""

    at: Real
    kind: str
    path: str
    step: Count | None


class Finished(RankEvent):
    """A rank's script has finished."""


# -- hot spares ------------------------------------------------------------------------------------------------------------


class HotSpareStarted(HotSpareEvent):
    """A hot spare has a process."""


class WarmUpCoverage(Record):
    """How many collectives the warm-up of a hot spare had, and how many of them were answered from the recording of a rank."""

    calls: Count = 0
    played: Count = 0


class HotSpareReady(HotSpareEvent):
    """A hot spare has warmed up and waits."""

    role: Count | None = None
    seconds: Real | None = None
    rss: Count | None = None
    coverage: WarmUpCoverage = WarmUpCoverage()


class HotSpareExited(HotSpareEvent):
    """A hot spare has exited, or could not be started."""

    ordered: bool = False
    raised: ExceptionFacts | None = None
    why: str | None = None
    signal: Integer | None = None
    code: Integer | None = None


class HotSpareProtocolMismatch(HotSpareEvent, Reason):
    """A hot spare speaks another protocol than its agent; its messages are ignored."""


class HotSparePrepared(HotSpareEvent):
    """A hot spare is ready for a planned generation."""

    for_generation: Count


class HotSpareUnprepared(HotSpareEvent, Reason):
    """A hot spare cannot get ready for a planned generation."""

    for_generation: Count


class HotSpareSwitched(HotSpareEvent):
    """A hot spare has switched to a planned generation."""

    for_generation: Count
    seconds: Real = 0.0


class HotSpareBroken(HotSpareEvent):
    """A hot spare has aborted its process groups."""


class HotSpareRecoveryFailed(HotSpareEvent):
    """A hot spare cannot take the rank that it was given."""


class HotSpareRegrouped(HotSpareEvent):
    """A hot spare has joined a generation that is not on record yet."""


class HotSpareCoverage(HotSpareEvent):
    """How much of its first step the warm-up of a hot spare had covered."""


# -- nodes -----------------------------------------------------------------------------------------------------------------


class MemstoreUnavailable(Reason):
    """A node has no memory store, or does not serve it to other nodes."""

    at: Real


class MemstoreFull(Reason):
    """A node has no room for replicas."""

    at: Real


class MemstoreHasRoom(AgentEvent):
    """A node has room for replicas again."""


class ReplicaLost(Reason):
    """A node's snapshots do not reach their replica node."""

    at: Real
    peer: str


class ReplicaRestored(AgentEvent):
    """A node's snapshots are complete on their replica node again."""

    at: Real
    peer: str


class NodeFaultSeen(AgentEvent):
    """A fault of a node."""

    kind: str
    seen_at: Real
    part: str
    quote: str
    source: str
    on: list[Count] = Field(default_factory=list)
    """Ranks that compute on that device."""
    idle: bool = False
    """No rank uses that device, as is known for sure: a GPU that none has open, a network interface that none is connected through, a
    disk or mount without anything of the job."""
    contradicted: str = ""
    """What the node measured that contradicts the line; empty if nothing does."""
    supported: str = ""
    """What the node measured that agrees with the line."""


class NodeCounterIncreases(AgentEvent):
    """Error counters that increased on a node while a generation ran."""

    over: Count
    seconds: Real
    counter_increases: dict[str, Any]


class NodeUnmonitored(Reason):
    """A node's monitor has ended: it no longer detects faults."""


class NodeGpuEventsLost(Reason):
    """A node does not receive the error events of its GPUs' driver."""


class NodeGpuEventsRestored(AgentEvent):
    """A node receives the error events of its GPUs' driver again."""


class NodeConditionsUnreadable(Reason):
    """The conditions that a node has in its Kubernetes cluster cannot be read."""


class NoticeUnknown(Reason):
    """Preemption notices for a node cannot be read."""


class PreemptionNoticed(AgentEvent):
    """A node has a preemption notice."""

    at: Real
    seconds: Real
    why: str = "preemption notice"


class PreemptionCancelled(AgentEvent):
    """A preemption notice was cancelled."""


class AgentConnectionLost(Reason):
    """An agent is lost: its connection could not be restored."""


class AgentEnded(AgentEvent):
    """An agent has ended."""


class LeaseEnded(AgentEvent):
    """The agent has received nothing from a controller for so long that it ends its workers and itself."""

    seconds: Real


class ForkServerReady(AgentEvent):
    """The fork server has imported what the script needs."""

    seconds: Real


class ForkServerExited(AgentEvent):
    """The fork server has exited."""


class ReplayedEvents(AgentEvent):
    """Events that a killed agent may not have delivered."""

    events: list[dict[str, Any]]
