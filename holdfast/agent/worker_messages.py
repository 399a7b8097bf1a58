"""The messages that workers, hot spares and the checkpoint writer send to the agent: the table of them all, and what is done with each."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

from holdfast.agent import schema
from holdfast.agent.connection import ClientConnection
from holdfast.agent.memstore.writer_client import CheckpointWriterClient
from holdfast.agent.schema import Anything, Count, Durations, FilePath, Flag, Groups, Number, Seconds, Step, Text, Texts
from holdfast.agent.workers.group import WorkerGroup
from holdfast.agent.workers.worker import Worker
from holdfast.host.process import parent_of
from holdfast.log import note
from holdfast.protocol import PROTOCOL, Message

log = logging.getLogger("holdfast.agent")

FLUSH_SECONDS: Final = 0.02
"""Seconds that finished steps may wait to be logged together: those that wait are lost with a killed agent."""
AGENT_FIELDS: Final = frozenset({"t", "event", "seq", "at", "id", "rank", "generation", "for_generation", "hot_spare", "self"})
"""Fields of an event that only the agent sets."""

_SNAPSHOT: Final[Mapping[str, Callable[[Message, str], object]]] = {
    "step": schema.integer,
    "at": schema.seconds,
    "every": schema.integer,
    "size": schema.integer,
    "taken": schema.integer,
    "given_up": schema.integer,
    "copied": schema.seconds,
    "overlapped": schema.seconds,
    "paused": schema.seconds,
    "prepared": schema.seconds,
    "slowed": schema.seconds,
    "trained": schema.seconds,
    "why": schema.text,
}
"""What a worker reports of its in-memory snapshots; `holdfast.runtime.snapshots.reports` has the meanings."""


def _snapshot(message: Message, name: str) -> Message:
    facts = schema.mapping(message, name)
    return {field: read(facts, field) for field, read in _SNAPSHOT.items() if facts.get(field) is not None}


def _step_times(message: Message, name: str) -> list[float]:
    """Return the seconds of a step's own work, of its waits for other ranks, and of its waits for data."""
    times = schema.mapping(message, name)
    return [schema.seconds(times, part) for part in ("own", "talk", "data")]


SnapshotFacts = Annotated[Message, _snapshot]
StepTimes = Annotated[list[float], _step_times]
ChildPid = Annotated[int, partial(schema.integer, minimum=2)]


class FinishedStep(NamedTuple):
    """A step of rank 0, as the event log has it."""

    step: int
    at: float
    seconds: float
    loss: float | None
    samples: int | None
    tokens: int | None


class StepBatch:
    """Rank 0's finished steps on their way into the event log: a single one at once, those that follow quickly together."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._steps: list[FinishedStep] = []
        self._generation = 0
        self._last = 0.0

    def add(self, generation: int, step: FinishedStep) -> None:
        """Add a step."""
        if generation != self._generation:
            self.flush()
            self._generation = generation
        self._steps.append(step)

    def due(self) -> float | None:
        """Return when they go into the event log (monotonic)."""
        return self._last + FLUSH_SECONDS if self._steps else None

    def tick(self, now: float) -> None:
        """Flush when that is due."""
        due = self.due()
        if due is not None and now >= due:
            self.flush()

    def flush(self) -> None:
        """Log what has come since the last time."""
        if self._steps:
            steps, self._steps, self._last = self._steps, [], time.monotonic()
            self._emit("steps", generation=self._generation, steps=steps)


class WorkerMessages:
    """Handles what workers send. The parameters of a message's method, apart from the worker, are the fields of the message."""

    def __init__(
        self,
        workers: WorkerGroup,
        steps: StepBatch,
        emit: Callable[..., None],
        send: Callable[[Worker, Message], bool],
        writer: CheckpointWriterClient,
    ) -> None:
        self._workers, self._steps, self._emit, self._send, self._writer = workers, steps, emit, send, writer
        self.emit_unlogged = emit
        """Sends an event that is not logged."""

    def take(self, peer: ClientConnection, message: Message) -> Message | None:
        """Handle *message* and return the answer, if it has one; a malformed message is noted and dropped."""
        name, worker = message.get("t"), None
        if self._writer.is_sender(peer):
            sender = MessageSender.WRITER
        else:
            worker = self.sender(peer)
            sender = MessageSender.WORKER if worker is None or worker.hot_spare is None else MessageSender.HOT_SPARE
        kind = MESSAGES.get((sender, name)) if isinstance(name, str) else None
        if worker is not None and worker.is_ahead and name in DEFERRED:
            worker.deferred.append((peer, message))
            worker.advance()
            return None
        is_listened_to = sender is MessageSender.WRITER or (worker is not None and peer.mismatch is None)
        if kind is None or not (is_listened_to or kind.from_anybody):
            if is_listened_to and kind is None and sender is not MessageSender.WRITER:
                note(log, "worker.unknown-message", sender=worker.name if worker else sender, message=str(name)[:40])
            return None
        answer = None
        try:
            fields = {"message": message} if kind.fields is not None else schema.read_fields(kind.handle, message)
            context = {"peer": peer} if kind.gets_connection else {}
            if sender is MessageSender.WRITER:
                answer = kind.handle(self._writer, **context, **fields)
            else:
                answer = kind.handle(self, worker, **context, **fields)
        except schema.BadField as error:
            note(log, "worker.bad-message", sender=worker.name if worker else sender, message=name, why=error)
            answer = {"ok": False, "why": str(error)} if kind.from_anybody else None
        except Exception:  # one worker's message must not end all of them
            log.exception("worker.message-failed")
        return None if answer is None else {"re": message.get("id"), **answer}

    def sender(self, peer: ClientConnection) -> Worker | None:
        """Return the living worker or hot spare whose process *peer* is; once known it stays the same, also if a child outlives it."""
        if peer.worker is None and not peer.is_no_worker:
            peer.worker = self._workers.worker_of(peer.pid)
            peer.is_no_worker = peer.worker is None
        return peer.worker if peer.worker is not None and not peer.worker.exited else None

    def _report(self, event: str, worker: Worker, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        self._emit(event, rank=worker.rank, generation=worker.generation, **facts)

    # -- connections ------------------------------------------------------------------------------------------------------

    def on_hello(self, worker: Worker, peer: ClientConnection, protocol: Anything) -> None:
        """Note that it is connected, and send it what waits for it; ignore one that speaks another protocol."""
        if protocol != PROTOCOL:
            peer.mismatch = f"it speaks protocol {str(protocol)[:20]}, this agent {PROTOCOL}: install the same Holdfast for both"
            if worker.hot_spare is None:
                self._report("worker.protocol-mismatch", worker, why=peer.mismatch)
            else:
                self._emit("hot-spare.protocol-mismatch", id=worker.hot_spare, why=peer.mismatch)
            return
        worker.advance()
        worker.connection = worker.connection or peer
        if worker.hot_spare is None:
            self._report("worker.hello", worker)
        greetings, worker.greetings = worker.greetings, []
        for greeting in greetings:
            self._send(worker, greeting)

    def on_commit(self, worker: Worker | None, peer: ClientConnection) -> Message:
        """Answer whether it may publish a checkpoint: only a worker of the current generation may. Its steps are logged first."""
        self._steps.flush()
        workers, why = self._workers, peer.mismatch or ""
        if worker is None or worker.hot_spare is not None:
            why = "this process is no worker of the current generation"
        elif worker.former is not None:
            why = f"generation {worker.former} is over"
        elif (
            (workers.stopping and not workers.may_save) or worker.generation == workers.abandoned or worker.generation < workers.generation
        ):
            why = f"generation {worker.generation} is over"
        interval = {"every": workers.checkpoint_interval} if workers.checkpoint_interval and not why else {}
        return {"ok": not why, "why": why, **interval}

    def on_register_successor(self, worker: Worker | None, pid: ChildPid) -> Message:
        """Make process *pid* the worker from now on: the one that this hot spare forked before its script began."""
        if worker is None or pid == worker.pid or parent_of(pid) != worker.pid:
            return {"ok": False, "why": f"process {pid} is no child of a worker of this node"}
        worker.pid = pid
        worker.connection, worker.greetings = None, [*worker.greetings, {"do": "go-on"}]  # messages to it wait for its hello
        worker.advance()
        if worker.hot_spare is None:
            self._report("worker.pid-changed", worker, pid=pid)
        return {"ok": True, "why": ""}

    # -- training ---------------------------------------------------------------------------------------------------------

    def on_mark(self, worker: Worker, name: Text, seconds: Seconds, generation: Count | None) -> None:
        """Report how long a part of its start took."""
        worker.managed, worker.heartbeats = True, False
        worker.advance()
        self._emit("mark", rank=worker.rank, generation=_generation(worker, generation), name=name, seconds=seconds)

    def on_resumed(self, worker: Worker, step: Step, path: Text | None, replica: Anything, generation: Count | None) -> None:
        """Note its step, and report where its state came from."""
        worker.managed = True  # a hello alone promises no steps: the fork server sends it for any script that raises
        worker.heartbeats = False
        worker.advance()
        if _generation(worker, generation) < worker.generation:
            return  # it has been kept for another one meanwhile
        worker.step, worker.former = step, None
        self._report("resumed", worker, step=step, path=path, replica=replica is True)

    def on_beat(  # noqa: PLR0913, PLR0917 (the fields of the message)
        self,
        worker: Worker,
        step: Step,
        seconds: Seconds,
        until: Count | None,
        loss: Number | None,
        snapshot: SnapshotFacts | None,
        timing: StepTimes | None,
        samples: Count | None,
        tokens: Count | None,
        heartbeat: Anything,
        generation: Count | None,
    ) -> None:
        """Note a finished step for the heartbeats, and report the first of a generation, a bad loss, and each of the lowest rank."""
        worker.step, now = step, time.time()
        worker.managed, worker.heartbeats = True, heartbeat is True
        worker.advance()
        # Until it has resumed in a new generation, its steps belong to the former one.
        of = _generation(worker, generation) if worker.former is None else worker.former
        if of == worker.generation:
            if worker.first_step is None:
                worker.first_step = now
                self._report("worker.stepped", worker, step=step, until=until, heartbeat=worker.heartbeats)
            worker.snapshot |= snapshot or {}
            if timing is not None:  # a step with a section in it has none
                worker.step_timings.add(step, timing)
            if loss is not None:
                bad, before, worker.bad_loss = not math.isfinite(loss), worker.bad_loss, not math.isfinite(loss)
                if bad and not before:
                    self._report("worker.loss", worker, step=step, loss=loss)
        if worker.rank == self._workers.first:
            # It was another's place where the job continues without a lower rank: that one's loss of the step was not this one's.
            known = loss if of == worker.generation or worker.was_first else None
            self._steps.add(of, FinishedStep(step, now, seconds, known, samples, tokens))

    def on_section(self, worker: Worker, name: Text, begin: Flag, limit_s: Seconds | None) -> None:
        """Note the begin or end of a declared section for the heartbeats; an event for each would fill the event log."""
        worker.section, worker.section_limit = (name, limit_s) if begin else (None, None)
        worker.advance()

    def on_saved(self, worker: Worker, step: Step, path: Text, seconds: Seconds, size: Count) -> None:
        """Report a complete checkpoint."""
        worker.advance()
        self._report("saved", worker, step=step, path=path, seconds=seconds, size=size)

    def on_storage_error(self, worker: Worker, kind: Text, why: Text, step: Count | None, path: Text | None) -> None:
        """Report an error with a checkpoint, or with snapshots."""
        self._report("storage-error", worker, kind=kind, step=step, path=path or "", why=why)

    def on_flush(self, worker: Worker, python: FilePath) -> None:
        """Have a snapshot written to disk that this worker has just completed."""
        worker.advance()
        self._writer.request(python)

    def on_check(self, worker: Worker, step: Step, digest: Text, shard: Text | None, generation: Count | None) -> None:
        """Keep the checksum of its parameters for the heartbeats."""
        if _generation(worker, generation) == worker.generation and worker.former is None:
            worker.checks.append({"step": step, "digest": digest[:64], "shard": (shard or "")[:64]})

    def on_exception(  # noqa: PLR0913, PLR0917 (the fields of the message)
        self,
        worker: Worker,
        type_: Text,
        message: Text,
        traceback: Text | None,
        step: Count | None,
        errno: Count | None,
        peer_lost: Anything,
    ) -> None:
        """Report the exception that ends it: its process may take a second to exit."""
        worker.raised = {
            "type": type_,
            "message": message,
            "traceback": traceback,
            "step": step,
            "errno": errno,
            "peer_lost": peer_lost is True,
        }
        if worker.hot_spare is None:
            self._report("worker.raised", worker, raised=worker.raised, step=worker.step)

    def on_finished(self, worker: Worker, step: Count | None) -> None:
        """Note that its script has come to its end, so that no steps are expected any more."""
        worker.finished = True
        worker.section, worker.section_limit = "end of script", None
        worker.advance()
        self._report("finished", worker, step=step)

    # -- queries: the answer is worth nothing later, so it is not logged --------------------------------------------------

    def on_rank_status(self, worker: Worker, message: Message) -> None:
        """Pass on what it waits for: an answer to the controller's query."""
        self.emit_unlogged("worker.rank-status", rank=worker.rank, generation=worker.generation, said=self._facts(worker, message))

    def on_checksums(self, worker: Worker, message: Message) -> None:
        """Pass on the checksums of its single tensors: an answer to the controller's query."""
        self.emit_unlogged("worker.checksums", rank=worker.rank, generation=worker.generation, said=self._facts(worker, message))

    # -- managed groups: messages for the controller, passed on with all of their fields ----------------------------------

    def forward(self, worker: Worker, message: Message, **defaults: None) -> None:
        """Pass it on to the controller."""
        worker.advance()
        generation = schema.optional(schema.integer, message, "generation")
        whose = {"id": worker.hot_spare}
        if worker.hot_spare is None:
            whose = {"rank": worker.rank, "generation": _generation(worker, generation)}
        if generation is not None:
            whose["for_generation"] = generation
        role = "worker" if worker.hot_spare is None else "hot-spare"
        self._emit(f"{role}.{message['t']}", **(defaults | self._facts(worker, message) | whose))

    def on_groups(self, worker: Worker, message: Message) -> None:
        """Note that its process can be kept when others are lost, and pass it on."""
        self.forward(worker, message)
        worker.grouped = True

    def on_roles(self, worker: Worker, message: Message) -> None:
        """Keep the job's roles for controllers that come later, and pass them on."""
        self.forward(worker, message, roles=None)
        self._workers.roles = {"roles": None, **self._facts(worker, message)}

    def on_switched(self, worker: Worker, message: Message) -> None:
        """Note that it has gone on into a planned generation, which the controller records once all have, and pass it on."""
        worker.ahead = schema.integer(message, "generation")
        self.forward(worker, message)

    def on_departed(self, worker: Worker, message: Message) -> None:
        """Note that its end is as planned, as another process has its state, and pass it on."""
        self.forward(worker, message)
        worker.ordered = True

    def on_parked(self, worker: Worker, message: Message) -> None:
        """Note that a hot spare is ready to become any rank, and report it."""
        worker.parked = self._facts(worker, message)
        self._emit("hot-spare.ready", id=worker.hot_spare, **worker.parked)

    @staticmethod
    def _facts(worker: Worker, message: Message) -> Message:
        """Return the fields of *message* that its sender may set; raise `BadField` where the table has another type for one."""
        sender = MessageSender.WORKER if worker.hot_spare is None else MessageSender.HOT_SPARE
        fields = MESSAGES[sender, message["t"]].fields
        assert fields is not None
        facts = {**message, **schema.read_fields(fields, message)}
        return {name: value for name, value in facts.items() if name not in AGENT_FIELDS and value is not None}


def _generation(worker: Worker, named: int | None) -> int:
    """Return the generation that a message is about: the worker's own, or an older one that it names."""
    return worker.generation if named is None else min(named, worker.generation)


# -- the fields of messages that are passed on: these are checked, all others are passed on as they are ---------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """What every message for the controller may have."""

    generation: Count | None = None
    step: Count | None = None
    why: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded(CommonFields):
    """A message for the controller, with the seconds that it took."""

    seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Forwarded):
    """The same with the bytes that were moved."""

    bytes: Count | None = None
    bandwidth: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Forwarded):
    """Which process group failed."""

    group: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped(CommonFields):
    """How a process came into a generation without a restart."""

    seconds: Durations | None = None
    source: Text | None = None
    differs: Texts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesField(Forwarded):
    """Which ranks do the same work, and which have replicas of each other's state."""

    roles: Groups | None = None
    copies: Groups | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level(CommonFields):
    """The level of integration that a script has reached, and a sentence that says what it means."""

    level: Text
    text: Text


class MessageSender(StrEnum):
    """Who sends a message to the agent."""

    WORKER = "worker"
    HOT_SPARE = "hot-spare"
    WRITER = "checkpoint writer"


@dataclass(frozen=True, slots=True)
class MessageKind:
    """One message to the agent."""

    name: str
    senders: tuple[MessageSender, ...]
    handle: Callable[..., Message | None]
    """Handles it and returns the answer, if it has one. Its parameters are the fields of the message, unless these are in *fields*."""
    fields: Callable[..., Any] | None = None
    """The checked fields of a message that is passed on: *handle* gets the message as it is."""
    gets_connection: bool = False
    """*handle* also gets the connection, as *peer*."""
    from_anybody: bool = False
    """It is answered to a process that is no worker, or speaks another protocol, too."""
    deferred: bool = False
    """It is about training, so it waits until the generation that its sender has switched to is recorded."""


_W, _BOTH, _WRITER = (MessageSender.WORKER,), (MessageSender.WORKER, MessageSender.HOT_SPARE), (MessageSender.WRITER,)
_M, _C = WorkerMessages, CheckpointWriterClient

KINDS: Final = (
    # Connections.
    MessageKind("hello", _BOTH, _M.on_hello, gets_connection=True),
    MessageKind("commit-request", _BOTH, _M.on_commit, gets_connection=True, from_anybody=True, deferred=True),
    MessageKind("register-successor", _BOTH, _M.on_register_successor, from_anybody=True),
    # Training.
    MessageKind("mark", _W, _M.on_mark, deferred=True),
    MessageKind("resumed", _W, _M.on_resumed, deferred=True),
    MessageKind("beat", _W, _M.on_beat, deferred=True),
    MessageKind("section", _W, _M.on_section, deferred=True),
    MessageKind("saved", _W, _M.on_saved, deferred=True),
    MessageKind("storage-error", _W, _M.on_storage_error, deferred=True),
    MessageKind("finished", _W, _M.on_finished, deferred=True),
    MessageKind("flush", _W, _M.on_flush),
    MessageKind("check", _W, _M.on_check),
    MessageKind("exception", _BOTH, _M.on_exception),
    # Answers to queries of the controller.
    MessageKind("status", _W, _M.on_rank_status, Timed),
    MessageKind("sums", _W, _M.on_checksums, Forwarded),
    # Managed groups, recovery and migration.
    MessageKind("level", _W, _M.forward, Level),
    MessageKind("groups", _W, _M.on_groups, Forwarded),
    MessageKind("roles", _W, _M.on_roles, RolesField),
    MessageKind("broken", _BOTH, _M.forward, Broken),
    MessageKind("recovery-failed", _BOTH, _M.forward, Forwarded),
    MessageKind("regrouped", _BOTH, _M.forward, Regrouped),
    MessageKind("coverage", _BOTH, _M.forward, Forwarded),
    MessageKind("prepared", _BOTH, _M.forward, Timed),
    MessageKind("unprepared", _BOTH, _M.forward, Forwarded),
    MessageKind("switched", _BOTH, _M.on_switched, Timed),
    MessageKind("departed", _W, _M.on_departed, Forwarded),
    MessageKind("parked", (MessageSender.HOT_SPARE,), _M.on_parked, Timed),
    # The checkpoint writer.
    MessageKind("hello", _WRITER, _C.on_hello, gets_connection=True),
    MessageKind("commit-request", _WRITER, _C.on_commit),
    MessageKind("saved", _WRITER, _C.on_saved),
    MessageKind("storage-error", _WRITER, _C.on_storage_error),
)
MESSAGES: Final[Mapping[tuple[MessageSender, str], MessageKind]] = {(sender, kind.name): kind for kind in KINDS for sender in kind.senders}
DEFERRED: Final = [kind.name for kind in KINDS if kind.deferred]
"""A hot spare that is ahead sends them too: it is the worker of a rank once its generation is recorded."""
