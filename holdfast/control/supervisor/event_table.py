"""The events that agents send, one row each: its name, who sends it, its fields, and what is done with it.

An event first changes the state of its generation (`GenerationState`), then it is recorded, or passed to the part of the controller that it
concerns (`EventHandlers`). docs/reference/protocol.md is made from this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from holdfast.control.agents import events
from holdfast.control.agents.events import AgentEvent
from holdfast.control.state.generation import GenerationState as State
from holdfast.control.supervisor.event_handlers import EventHandlers
from holdfast.protocol import Message

E = TypeVar("E", bound=AgentEvent)


class Sender(StrEnum):
    """Who an event comes from; whatever does not come from the agent itself goes through it."""

    WORKER = "worker"
    HOT_SPARE = "hot-spare"
    AGENT = "agent"
    MONITOR = "monitor"
    MEMORY = "memory server"
    WRITER = "checkpoint writer"
    CONTROLLER = "controller"
    """The controller's own end of the connection."""


@dataclass(frozen=True, slots=True)
class AgentEventKind(Generic[E]):
    """One kind of event."""

    name: str
    senders: tuple[Sender, ...]
    fields: type[E]
    state: Callable[[State, str, E], None] | None = None
    """How it changes the state of the generation; gets the node's name too."""
    record: Callable[[EventHandlers, str, E], None] | None = None
    """How it is recorded, or which part of the job gets it; gets the node's name too."""
    shows_progress: bool = False
    """Whether the rank makes progress that sends it."""
    budgeted: bool = False
    """Whether something is recorded for each: a node that sends too many has the rest dropped."""


_W, _S, _A = (Sender.WORKER,), (Sender.HOT_SPARE,), (Sender.AGENT,)
_MON, _MEM = (Sender.MONITOR,), (Sender.MEMORY,)

KINDS: Final[tuple[AgentEventKind[Any], ...]] = (
    # The life of a rank.
    AgentEventKind("worker.started", _A, events.WorkerStarted, State.on_worker_started, shows_progress=True),
    AgentEventKind("worker.kept", _A, events.WorkerKept, State.on_worker_kept, shows_progress=True),
    AgentEventKind("worker.pid-changed", _W, events.WorkerPidChanged, State.on_worker_pid_changed, shows_progress=True),
    AgentEventKind("worker.hello", _W, events.WorkerHello, State.on_worker_hello, shows_progress=True),
    AgentEventKind("worker.protocol-mismatch", _W, events.WorkerProtocolMismatch),
    AgentEventKind("worker.level", _W, events.WorkerLevel, record=EventHandlers.on_worker_level, shows_progress=True, budgeted=True),
    AgentEventKind("worker.groups", _W, events.WorkerGroups, State.on_worker_groups, shows_progress=True),
    AgentEventKind("worker.roles", _W, events.WorkerRoles, record=EventHandlers.on_worker_roles, budgeted=True),
    AgentEventKind("worker.broken", _W, events.WorkerBroken, State.on_worker_broken),
    AgentEventKind("worker.recovery-failed", _W, events.WorkerRecoveryFailed, State.on_worker_recovery_failed),
    AgentEventKind("worker.regrouped", _W, events.WorkerRegrouped, State.on_worker_regrouped, shows_progress=True),
    AgentEventKind("worker.coverage", _W, events.WorkerCoverage, State.on_worker_coverage),
    AgentEventKind("worker.prepared", _W, events.WorkerPrepared, record=EventHandlers.on_prepared),
    AgentEventKind("worker.unprepared", _W, events.WorkerUnprepared, record=EventHandlers.on_unprepared),
    AgentEventKind("worker.switched", _W, events.WorkerSwitched, State.on_worker_switched, EventHandlers.on_switched),
    AgentEventKind("worker.departed", _W, events.WorkerDeparted, record=EventHandlers.on_worker_departed),
    AgentEventKind("worker.stopped", _A, events.WorkerStopped, State.on_worker_stopped),
    AgentEventKind("worker.continued", _A, events.WorkerContinued, State.on_worker_continued),
    AgentEventKind("worker.raised", _W, events.WorkerRaised, State.on_worker_raised),
    AgentEventKind("worker.exited", _A, events.WorkerExited, State.on_worker_exited, EventHandlers.on_worker_exited),
    AgentEventKind("start.failed", _A, events.StartFailed, State.on_start_failed),
    AgentEventKind("workers.exited", _A, events.WorkersExited, State.on_workers_exited),
    # Training.
    AgentEventKind("mark", _W, events.Mark, State.on_mark, shows_progress=True),
    AgentEventKind("resumed", _W, events.Resumed, State.on_resumed, EventHandlers.on_resumed, shows_progress=True),
    AgentEventKind(
        "worker.stepped", _W, events.WorkerStepped, State.on_worker_stepped, EventHandlers.on_worker_stepped, shows_progress=True
    ),
    AgentEventKind("steps", _W, events.Steps, State.on_steps, EventHandlers.on_steps),
    AgentEventKind("heartbeats", _A, events.Heartbeats, State.on_heartbeats),
    AgentEventKind("worker.rank-status", _W, events.WorkerRankStatus, State.on_worker_rank_status),
    AgentEventKind("worker.checksums", _W, events.WorkerChecksums, State.on_worker_checksums),
    AgentEventKind("worker.loss", _W, events.WorkerLoss, State.on_worker_loss),
    AgentEventKind(
        "saved", (Sender.WORKER, Sender.WRITER), events.Saved, record=EventHandlers.on_saved, shows_progress=True, budgeted=True
    ),
    AgentEventKind(
        "storage-error", (Sender.WORKER, Sender.WRITER), events.StorageErrorEvent, record=EventHandlers.on_storage_error, budgeted=True
    ),
    AgentEventKind("finished", _W, events.Finished, shows_progress=True),
    # Hot spares.
    AgentEventKind("hot-spare.started", _A, events.HotSpareStarted, record=EventHandlers.on_hot_spare_started),
    AgentEventKind("hot-spare.ready", _S, events.HotSpareReady, record=EventHandlers.on_hot_spare_ready),
    AgentEventKind("hot-spare.exited", _A, events.HotSpareExited, record=EventHandlers.on_hot_spare_exited),
    AgentEventKind("hot-spare.protocol-mismatch", _S, events.HotSpareProtocolMismatch),
    AgentEventKind("hot-spare.prepared", _S, events.HotSparePrepared, record=EventHandlers.on_prepared),
    AgentEventKind("hot-spare.unprepared", _S, events.HotSpareUnprepared, record=EventHandlers.on_unprepared),
    AgentEventKind("hot-spare.switched", _S, events.HotSpareSwitched, record=EventHandlers.on_switched),
    AgentEventKind("hot-spare.broken", _S, events.HotSpareBroken),
    AgentEventKind("hot-spare.recovery-failed", _S, events.HotSpareRecoveryFailed),
    AgentEventKind("hot-spare.regrouped", _S, events.HotSpareRegrouped),
    AgentEventKind("hot-spare.coverage", _S, events.HotSpareCoverage),
    # Nodes.
    AgentEventKind("memstore.unavailable", _A, events.MemstoreUnavailable, record=EventHandlers.on_memstore_problem, budgeted=True),
    AgentEventKind("memstore.full", _MEM, events.MemstoreFull, record=EventHandlers.on_memstore_problem, budgeted=True),
    AgentEventKind("memstore.has-room", _MEM, events.MemstoreHasRoom),
    AgentEventKind("replica.lost", _MEM, events.ReplicaLost, record=EventHandlers.on_memstore_problem, budgeted=True),
    AgentEventKind("replica.restored", _MEM, events.ReplicaRestored, record=EventHandlers.on_replica_restored, budgeted=True),
    AgentEventKind("node.fault", _MON, events.NodeFaultSeen, record=EventHandlers.on_node_fault, budgeted=True),
    AgentEventKind(
        "node.counter-increases", _MON, events.NodeCounterIncreases, record=EventHandlers.on_node_counter_increases, budgeted=True
    ),
    AgentEventKind("node.unmonitored", _A, events.NodeUnmonitored, record=EventHandlers.on_node_unmonitored, budgeted=True),
    AgentEventKind("node.gpu-events-lost", _MON, events.NodeGpuEventsLost, record=EventHandlers.on_node_gpu_events_lost, budgeted=True),
    AgentEventKind(
        "node.gpu-events-restored", _MON, events.NodeGpuEventsRestored, record=EventHandlers.on_node_gpu_events_restored, budgeted=True
    ),
    AgentEventKind(
        "node.conditions-unreadable",
        _MON,
        events.NodeConditionsUnreadable,
        record=EventHandlers.on_node_conditions_unreadable,
        budgeted=True,
    ),
    AgentEventKind("notice.unknown", _MON, events.NoticeUnknown, record=EventHandlers.on_notice_unknown, budgeted=True),
    # Agents.
    AgentEventKind(
        "agent.preemption-notice",
        (Sender.MONITOR, Sender.AGENT),
        events.PreemptionNoticed,
        record=EventHandlers.on_preemption_notice,
        budgeted=True,
    ),
    AgentEventKind(
        "agent.preemption-cancelled", _MON, events.PreemptionCancelled, record=EventHandlers.on_preemption_cancelled, budgeted=True
    ),
    AgentEventKind("agent.disconnected", (Sender.CONTROLLER,), events.AgentConnectionLost),
    AgentEventKind("agent.ended", _A, events.AgentEnded),
    AgentEventKind("lease.ended", _A, events.LeaseEnded),
    AgentEventKind("fork-server.ready", _A, events.ForkServerReady),
    AgentEventKind("fork-server.exited", _A, events.ForkServerExited),
    AgentEventKind("replay", _A, events.ReplayedEvents, record=EventHandlers.on_replay),
)
EVENTS: Final[Mapping[str, AgentEventKind[Any]]] = {kind.name: kind for kind in KINDS}
UNKNOWN: Final = AgentEventKind("", (), AgentEvent)
"""Of a newer agent: it belongs to nothing here."""


def parse(message: Message) -> AgentEvent:
    """Return the event in *message*, with the fields of its kind; raise ``ValueError`` where one is missing or wrong."""
    return _kind(message.get("event")).fields.of(message)  # type: ignore[no-any-return]  # the table has events of all kinds


def change_state(state: State, node: str, event: AgentEvent, now: float) -> None:
    """Change the *state* of a generation by an *event* of *node*'s agent which arrived at *now*, if it belongs to that generation.

    Raise one of `MALFORMED_EVENT` for what cannot be understood, and for what *node* says of a rank that another one has.
    """
    kind = _kind(event.event)
    if state.admits(node, event):
        state.note_arrival(event, now, shows_progress=kind.shows_progress)
        if kind.state is not None:
            kind.state(state, node, event)


def take(handlers: EventHandlers, node: str, message: Message) -> None:
    """Apply a *message* of *node*'s agent to the present generation and record it; raise `MALFORMED_EVENT` where it is invalid."""
    event = parse(message)
    kind, generations = _kind(event.event), handlers.generations
    change_state(generations.state, node, event, time.time())
    generations.best = max(generations.best, generations.state.step_before)
    if isinstance(event, events.Steps):
        handlers.note_old_steps(node, event)
    if kind.record is not None and handlers.admits(node, event, budgeted=kind.budgeted):
        kind.record(handlers, node, event)


def _kind(name: object) -> AgentEventKind[Any]:
    return EVENTS.get(name, UNKNOWN) if isinstance(name, str) else UNKNOWN
