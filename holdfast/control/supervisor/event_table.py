"""The events that agents send, one row each: its name, who sends it, its fields, and what is done with it.

An event first changes the state of its generation (`GenerationState`), then it is recorded, or given to the part of the job that it is
for (`EventHandlers`). docs/protocol.md is made from this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from holdfast.control.agents import events
from holdfast.control.agents.events import Event
from holdfast.control.state.generation import GenerationState as State
from holdfast.control.supervisor.event_handlers import EventHandlers
from holdfast.protocol import Message

E = TypeVar("E", bound=Event)


class Sender(StrEnum):
    """Who an event comes from; whatever does not come from the agent itself goes through it."""

    WORKER = "worker"
    STANDBY = "standby"
    AGENT = "agent"
    MONITOR = "monitor"
    MEMORY = "memory server"
    WRITER = "checkpoint writer"
    CONTROLLER = "controller"
    """The controller's own end of the connection."""


@dataclass(frozen=True, slots=True)
class EventKind(Generic[E]):
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


_W, _S, _A = (Sender.WORKER,), (Sender.STANDBY,), (Sender.AGENT,)
_MON, _MEM = (Sender.MONITOR,), (Sender.MEMORY,)

KINDS: Final[tuple[EventKind[Any], ...]] = (
    # The life of a rank.
    EventKind("worker.started", _A, events.WorkerStarted, State.on_worker_started, shows_progress=True),
    EventKind("worker.kept", _A, events.WorkerKept, State.on_worker_kept, shows_progress=True),
    EventKind("worker.succeeded", _W, events.WorkerSucceeded, State.on_worker_succeeded, shows_progress=True),
    EventKind("worker.hello", _W, events.WorkerHello, State.on_worker_hello, shows_progress=True),
    EventKind("worker.stranger", _W, events.WorkerStranger),
    EventKind("worker.groups", _W, events.WorkerGroups, State.on_worker_groups, shows_progress=True),
    EventKind("worker.roles", _W, events.WorkerRoles, record=EventHandlers.on_worker_roles, budgeted=True),
    EventKind("worker.broken", _W, events.WorkerBroken, State.on_worker_broken),
    EventKind("worker.cannot", _W, events.WorkerCannot, State.on_worker_cannot),
    EventKind("worker.regrouped", _W, events.WorkerRegrouped, State.on_worker_regrouped, shows_progress=True),
    EventKind("worker.coverage", _W, events.WorkerCoverage, State.on_worker_coverage),
    EventKind("worker.prepared", _W, events.WorkerPrepared, record=EventHandlers.on_prepared),
    EventKind("worker.unprepared", _W, events.WorkerUnprepared, record=EventHandlers.on_unprepared),
    EventKind("worker.switched", _W, events.WorkerSwitched, State.on_worker_switched, EventHandlers.on_switched),
    EventKind("worker.left", _W, events.WorkerLeft, record=EventHandlers.on_worker_left),
    EventKind("worker.stopped", _A, events.WorkerStopped, State.on_worker_stopped),
    EventKind("worker.continued", _A, events.WorkerContinued, State.on_worker_continued),
    EventKind("worker.raised", _W, events.WorkerRaised, State.on_worker_raised),
    EventKind("worker.exited", _A, events.WorkerExited, State.on_worker_exited, EventHandlers.on_worker_exited),
    EventKind("start.failed", _A, events.StartFailed, State.on_start_failed),
    EventKind("workers.gone", _A, events.WorkersGone, State.on_workers_gone),
    # Training.
    EventKind("mark", _W, events.Mark, State.on_mark, shows_progress=True),
    EventKind("resumed", _W, events.Resumed, State.on_resumed, EventHandlers.on_resumed, shows_progress=True),
    EventKind("worker.stepped", _W, events.WorkerStepped, State.on_worker_stepped, EventHandlers.on_worker_stepped, shows_progress=True),
    EventKind("steps", _W, events.Steps, State.on_steps, EventHandlers.on_steps),
    EventKind("beats", _A, events.Beats, State.on_beats),
    EventKind("worker.standing", _W, events.WorkerStanding, State.on_worker_standing),
    EventKind("worker.sums", _W, events.WorkerSums, State.on_worker_sums),
    EventKind("worker.loss", _W, events.WorkerLoss, State.on_worker_loss),
    EventKind("saved", (Sender.WORKER, Sender.WRITER), events.Saved, record=EventHandlers.on_saved, shows_progress=True, budgeted=True),
    EventKind("trouble", (Sender.WORKER, Sender.WRITER), events.Trouble, record=EventHandlers.on_trouble, budgeted=True),
    EventKind("bye", _W, events.Bye, shows_progress=True),
    # Standbys.
    EventKind("standby.started", _A, events.StandbyStarted, record=EventHandlers.on_standby_started),
    EventKind("standby.ready", _S, events.StandbyReady, record=EventHandlers.on_standby_ready),
    EventKind("standby.gone", _A, events.StandbyGone, record=EventHandlers.on_standby_gone),
    EventKind("standby.stranger", _S, events.StandbyStranger),
    EventKind("standby.prepared", _S, events.StandbyPrepared, record=EventHandlers.on_prepared),
    EventKind("standby.unprepared", _S, events.StandbyUnprepared, record=EventHandlers.on_unprepared),
    EventKind("standby.switched", _S, events.StandbySwitched, record=EventHandlers.on_switched),
    EventKind("standby.broken", _S, events.StandbyBroken),
    EventKind("standby.cannot", _S, events.StandbyCannot),
    EventKind("standby.regrouped", _S, events.StandbyRegrouped),
    EventKind("standby.coverage", _S, events.StandbyCoverage),
    # Nodes.
    EventKind("memory.none", _A, events.MemoryNone, record=EventHandlers.on_memory_trouble, budgeted=True),
    EventKind("memory.full", _MEM, events.MemoryFull, record=EventHandlers.on_memory_trouble, budgeted=True),
    EventKind("memory.fits", _MEM, events.MemoryFits),
    EventKind("replica.lost", _MEM, events.ReplicaLost, record=EventHandlers.on_memory_trouble, budgeted=True),
    EventKind("replica.kept", _MEM, events.ReplicaKept, record=EventHandlers.on_replica_kept, budgeted=True),
    EventKind("node.fault", _MON, events.NodeFault, record=EventHandlers.on_node_fault, budgeted=True),
    EventKind("node.grew", _MON, events.NodeGrew, record=EventHandlers.on_node_grew, budgeted=True),
    EventKind("node.unwatched", _A, events.NodeUnwatched, record=EventHandlers.on_node_unwatched, budgeted=True),
    EventKind("node.deaf", _MON, events.NodeDeaf, record=EventHandlers.on_node_deaf, budgeted=True),
    EventKind("node.hears", _MON, events.NodeHears, record=EventHandlers.on_node_hears, budgeted=True),
    EventKind("notice.blind", _MON, events.NoticeBlind, record=EventHandlers.on_notice_blind, budgeted=True),
    # Agents.
    EventKind("agent.leaving", (Sender.MONITOR, Sender.AGENT), events.AgentLeaving, record=EventHandlers.on_agent_leaving, budgeted=True),
    EventKind("agent.staying", _MON, events.AgentStaying, record=EventHandlers.on_agent_staying, budgeted=True),
    EventKind("agent.gone", (Sender.CONTROLLER,), events.AgentGone),
    EventKind("agent.ended", _A, events.AgentEnded),
    EventKind("lease.ended", _A, events.LeaseEnded),
    EventKind("starter.ready", _A, events.StarterReady),
    EventKind("starter.gone", _A, events.StarterGone),
    EventKind("past", _A, events.Past, record=EventHandlers.on_past),
)
EVENTS: Final[Mapping[str, EventKind[Any]]] = {kind.name: kind for kind in KINDS}
UNKNOWN: Final = EventKind("", (), Event)
"""Of a newer agent: it belongs to nothing here."""


def parse(message: Message) -> Event:
    """Return the event in *message*, with the fields of its kind; raise ``ValueError`` where one is missing or wrong."""
    return _kind(message.get("event")).fields.of(message)  # type: ignore[no-any-return]  # the table has events of all kinds


def change_state(state: State, node: str, event: Event, now: float) -> None:
    """Change the *state* of a generation by an *event* of *node*'s agent which arrived at *now*, if it belongs to that generation.

    Raise one of `NONSENSE` for what cannot be understood, and for what *node* says of a rank that another one has.
    """
    kind = _kind(event.event)
    if state.admits(node, event):
        state.note_arrival(event, now, shows_progress=kind.shows_progress)
        if kind.state is not None:
            kind.state(state, node, event)


def take(handlers: EventHandlers, node: str, message: Message) -> None:
    """Apply a *message* of *node*'s agent to the present generation and have it recorded; raise one of `NONSENSE` where it is invalid."""
    event = parse(message)
    kind, generations = _kind(event.event), handlers.generations
    change_state(generations.state, node, event, time.time())
    generations.best = max(generations.best, generations.state.step_before)
    if isinstance(event, events.Steps):
        handlers.note_old_steps(node, event)
    if kind.record is not None and handlers.admits(node, event, budgeted=kind.budgeted):
        kind.record(handlers, node, event)


def _kind(name: object) -> EventKind[Any]:
    return EVENTS.get(name, UNKNOWN) if isinstance(name, str) else UNKNOWN
