"""What workers and standbys tell their agent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.agent import schema
from holdfast.agent.connection import ClientConnection
from holdfast.agent.memstore import snapshot_report
from holdfast.agent.memstore.writer_client import CheckpointWriterClient
from holdfast.agent.workers.group import WorkerGroup
from holdfast.agent.workers.worker import Worker
from holdfast.log import note
from holdfast.process import parent_of
from holdfast.protocol import PROTOCOL, Message

log = logging.getLogger("holdfast.agent")

FLUSH: Final = 0.02
"""Seconds that finished steps may wait for company before they are journaled: with a killed agent those that wait are lost."""
LARGEST_STEP: Final = 2**53
PASSED_ON: Final[Mapping[str, tuple[str, str]]] = {
    "broken": ("worker.broken", "standby.broken"),
    "regrouped": ("worker.regrouped", "standby.regrouped"),
    "cannot": ("worker.recovery-failed", "standby.recovery-failed"),
    "coverage": ("worker.coverage", "standby.coverage"),
    "prepared": ("worker.prepared", "standby.prepared"),
    "unprepared": ("worker.unprepared", "standby.unprepared"),
}
"""Words that are the flow's alone to understand, and the event that each becomes of a worker or a standby, with all that was said."""
HELD: Final = frozenset({"mark", "resumed", "beat", "section", "saved", "storage_error", "finished", "commit?"})
"""Words of training, which wait until the generation they belong to is on record."""
OURS: Final = frozenset({"t", "event", "seq", "at", "id", "rank", "generation", "for_generation", "standby", "self"})
"""Fields of an event that nobody else sets."""


class StepBatch:
    """Rank 0's finished steps on their way into the journal: a lone one goes at once, those that follow quickly go together."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._steps: list[tuple[int, float, float, float | None]] = []
        self._generation = 0
        self._last = 0.0

    def add(self, generation: int, step: tuple[int, float, float, float | None]) -> None:
        """Take a step: its number, when it ended, how long it took, its loss."""
        if generation != self._generation:
            self.flush()
            self._generation = generation
        self._steps.append(step)

    def due(self) -> float | None:
        """Return when they go into the journal (monotonic)."""
        return self._last + FLUSH if self._steps else None

    def tick(self, now: float) -> None:
        """Flush when it is time."""
        due = self.due()
        if due is not None and now >= due:
            self.flush()

    def flush(self) -> None:
        """Journal what has come since the last time."""
        if self._steps:
            steps, self._steps, self._last = self._steps, [], time.monotonic()
            self._emit("steps", generation=self._generation, steps=steps)


class WorkerMessages:
    """Takes in what workers say."""

    def __init__(
        self,
        workers: WorkerGroup,
        steps: StepBatch,
        emit: Callable[..., None],
        tell: Callable[[Worker, Message], bool],
        flushing: CheckpointWriterClient,
    ) -> None:
        self._workers, self._steps, self._send, self._tell, self._flushing = workers, steps, emit, tell, flushing
        self.pass_by: Callable[..., None] = lambda _event, **_facts: None
        """Tells attached flows what no journal keeps."""
        self._verbs: dict[str, Callable[[Worker, Message], None]] = {
            "mark": self._on_mark,
            "resumed": self._on_resumed,
            "beat": self._on_beat,
            "section": self._on_section,
            "saved": self._on_saved,
            "storage_error": self._on_storage_error,
            "flush": self._on_flush,
            "exception": self._on_exception,
            "finished": self._on_bye,
            "groups": self._on_groups,
            "roles": self._on_roles,
            "switched": self._on_switched,
            "left": self._on_left,
            "status": self._on_standing,
            "sums": self._on_sums,
            "check": self._on_check,
            **dict.fromkeys(PASSED_ON, self._pass_on),
        }
        self._verbs_of_standbys: dict[str, Callable[[Worker, Message], None]] = {
            "parked": self._on_parked,
            "exception": self._on_exception,
            "switched": self._on_switched,
            **dict.fromkeys(PASSED_ON, self._pass_on),
        }

    def take(self, peer: ClientConnection, message: Message) -> Message | None:
        """Take in *message* and return the answer, if it asks for one; what cannot be understood is noted and left."""
        if self._flushing.speaks(peer):
            return self._flushing.take(peer, message)
        word, worker = message.get("t"), self.speaker(peer)
        if worker is not None and worker.is_ahead and word in HELD:
            worker.held.append((peer, message))
            worker.advance()
            return None
        if word in ("commit?", "successor?"):
            answer = self._leave(peer, worker) if word == "commit?" else self._succeed(worker, message)
            return {"re": message.get("id"), **answer}
        if worker is None or peer.stranger is not None:
            return None
        try:
            if word == "hello":
                self._on_hello(peer, worker, message)
            else:
                self._obey(worker, word, message)
        except schema.BadField as error:
            note(log, "worker.unclear", rank=worker.rank, word=word, why=error)
        except Exception:  # what one worker says must not end all of them
            log.exception("worker.report-failed")
        return None

    def _obey(self, worker: Worker, word: object, message: Message) -> None:
        verbs = self._verbs if worker.standby is None else self._verbs_of_standbys
        if isinstance(word, str) and word in verbs:
            verbs[word](worker, message)
        else:
            note(log, "worker.unknown-word", rank=worker.rank, word=str(word)[:40])

    def speaker(self, peer: ClientConnection) -> Worker | None:
        """Return the living worker or standby that *peer* speaks for; once known it stays the same, also for a child that outlives it."""
        if peer.worker is None and not peer.nobody:
            peer.worker = self._workers.worker_of(peer.pid)
            peer.nobody = peer.worker is None
        return peer.worker if peer.worker is not None and not peer.worker.gone else None

    def _leave(self, peer: ClientConnection, worker: Worker | None) -> Message:
        """Let a checkpoint be put in place only by a worker of the current generation; its steps are on record before it."""
        self._steps.flush()
        why = peer.stranger or ""
        if worker is None or worker.standby is not None:
            why = "this process is no worker of the current generation"
        elif worker.former is not None:
            why = f"generation {worker.former} is over"
        elif (
            (self._workers.stopping and not self._workers.may_save)
            or worker.generation == self._workers.abandoned
            or worker.generation < self._workers.generation
        ):
            why = f"generation {worker.generation} is over"
        wish = {"every": self._workers.pace} if self._workers.pace and not why else {}
        return {"ok": not why, "why": why, **wish}

    def _succeed(self, worker: Worker | None, message: Message) -> Message:
        """Have another process be *worker* from now on: the one that this standby forked before its script began."""
        try:
            pid = schema.whole(message, "pid", least=2)
        except schema.BadField as error:
            return {"ok": False, "why": str(error)}
        if worker is None or pid == worker.pid or parent_of(pid) != worker.pid:
            return {"ok": False, "why": f"process {pid} is no child of a worker of this node"}
        worker.pid = pid
        worker.line, worker.greetings = None, [*worker.greetings, {"do": "go-on"}]  # what is said meanwhile waits for its hello
        worker.advance()
        if worker.standby is None:
            self._emit("worker.pid-changed", worker, pid=pid)
        return {"ok": True, "why": ""}

    def _emit(self, event: str, worker: Worker, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        self._send(event, rank=worker.rank, generation=worker.generation, **facts)

    def _on_hello(self, peer: ClientConnection, worker: Worker, message: Message) -> None:
        spoken = message.get("protocol")
        if spoken != PROTOCOL:
            peer.stranger = f"it speaks protocol {str(spoken)[:20]}, this agent {PROTOCOL}: install the same Holdfast for both"
            self._send(
                "worker.protocol-mismatch" if worker.standby is None else "standby.protocol-mismatch", **_whose(worker), why=peer.stranger
            )
            return
        worker.advance()
        worker.line = worker.line or peer
        if worker.standby is None:
            self._emit("worker.hello", worker)
        greetings, worker.greetings = worker.greetings, []
        for greeting in greetings:
            self._tell(worker, greeting)

    def _on_parked(self, worker: Worker, message: Message) -> None:
        """Note that a standby is ready to become any rank."""
        worker.parked = _said(message)
        self._send("standby.ready", id=worker.standby, **worker.parked)

    def _pass_on(self, worker: Worker, message: Message) -> None:
        of_worker, of_standby = PASSED_ON[message["t"]]
        self._send_all(of_worker if worker.standby is None else of_standby, worker, message)

    def _send_all(self, event: str, worker: Worker, message: Message) -> None:
        """Make an *event* of what was said. The generation is the worker's, or an older one that it still spoke of."""
        worker.advance()
        whose = {"id": worker.standby}
        if worker.standby is None:
            whose = {"rank": worker.rank, "generation": _meant(worker, message)}
        if message.get("generation") is not None:
            whose["for_generation"] = schema.whole(message, "generation")
        self._send(event, **_said(message), **whose)

    def _on_groups(self, worker: Worker, message: Message) -> None:
        self._send_all("worker.groups", worker, message)
        worker.grouped = True

    def _on_roles(self, worker: Worker, message: Message) -> None:
        self._send_all("worker.roles", worker, message)
        self._workers.roles = _said(message)

    def _on_switched(self, worker: Worker, message: Message) -> None:
        """Note that it has gone on into a planned generation: the flow puts that on record once all have."""
        worker.ahead = schema.whole(message, "generation")
        self._send_all("worker.switched" if worker.standby is None else "standby.switched", worker, message)

    def _on_left(self, worker: Worker, message: Message) -> None:
        """Note that its state is with another: its end is as planned, even before the flow has said so."""
        self._send_all("worker.departed", worker, message)
        worker.ordered = True

    def _on_mark(self, worker: Worker, message: Message) -> None:
        name, seconds = schema.text(message, "name"), schema.seconds(message, "seconds")
        worker.managed, worker.heartbeats = True, False
        worker.advance()
        self._send("mark", rank=worker.rank, generation=_meant(worker, message), name=name, seconds=seconds)

    def _on_resumed(self, worker: Worker, message: Message) -> None:
        step, path = schema.whole(message, "step", most=LARGEST_STEP), schema.maybe(schema.text, message, "path")
        worker.managed = True  # a hello alone is no promise of steps: the warm starter says it for any script that raises
        worker.heartbeats = False
        worker.advance()
        if _meant(worker, message) < worker.generation:
            return  # it has been kept for another one meanwhile
        worker.step, worker.former = step, None
        self._emit("resumed", worker, step=step, path=path, replica=message.get("replica") is True)

    def _on_beat(self, worker: Worker, message: Message) -> None:
        step, seconds = schema.whole(message, "step", most=LARGEST_STEP), schema.seconds(message, "seconds")
        until, loss = schema.maybe(schema.whole, message, "until"), schema.maybe(schema.number, message, "loss")
        of_snapshots = snapshot_report.said(message)
        worker.step, now = step, time.time()
        worker.managed, worker.heartbeats = True, message.get("heartbeat") is True
        worker.advance()
        generation = _meant(worker, message) if worker.former is None else worker.former  # until it has resumed it tells of the one before
        if worker.first_step is None and generation == worker.generation:
            worker.first_step = now
            self._emit("worker.stepped", worker, step=step, until=until, heartbeat=worker.heartbeats)
        if generation == worker.generation:
            worker.snapshot |= of_snapshots
            self._note_pace(worker, message, step)
            self._note_loss(worker, step, loss)
        if worker.rank == self._workers.first:
            self._steps.add(generation, (step, now, seconds, loss))

    def _note_pace(self, worker: Worker, message: Message, step: int) -> None:
        """Keep how the step's time was spent, for the beats; a step with a section in it tells nothing."""
        pace = schema.maybe(schema.mapping, message, "pace")
        if pace is not None:
            worker.paces.add(step, [schema.seconds(pace, name) for name in ("own", "talk", "data")])

    def _note_loss(self, worker: Worker, step: int, loss: float | None) -> None:
        """Tell at once of a rank's loss that is no number any more, and once until it is one again."""
        bad = loss is not None and not math.isfinite(loss)
        if bad and not worker.bad_loss:
            self._emit("worker.loss", worker, step=step, loss=loss)
        if loss is not None:
            worker.bad_loss = bad

    def _on_standing(self, worker: Worker, message: Message) -> None:
        """Pass on where a worker stands: an answer to the flow's question, worth nothing later."""
        self.pass_by("worker.rank-status", rank=worker.rank, generation=worker.generation, said=_said(message))

    def _on_sums(self, worker: Worker, message: Message) -> None:
        """Pass on what a worker found in a check, as above."""
        self.pass_by("worker.checksums", rank=worker.rank, generation=worker.generation, said=_said(message))

    def _on_check(self, worker: Worker, message: Message) -> None:
        """Keep the digest of its parameters for the beats."""
        if _meant(worker, message) == worker.generation and worker.former is None:
            worker.checks.append({
                "step": schema.whole(message, "step", most=LARGEST_STEP),
                "digest": schema.text(message, "digest")[:64],
                "shard": (schema.maybe(schema.text, message, "shard") or "")[:64],
            })  # fmt: skip

    def _on_section(self, worker: Worker, message: Message) -> None:
        """Note the section for the beats; an event for each would fill the journal."""
        name, begins, limit = schema.text(message, "name"), schema.flag(message, "begin"), schema.maybe(schema.seconds, message, "limit_s")
        worker.section, worker.section_limit = (name, limit) if begins else (None, None)
        worker.advance()

    def _on_saved(self, worker: Worker, message: Message) -> None:
        worker.advance()
        self._emit(
            "saved",
            worker,
            step=schema.whole(message, "step", most=LARGEST_STEP),
            path=schema.text(message, "path"),
            seconds=schema.seconds(message, "seconds"),
            size=schema.whole(message, "size"),
        )

    def _on_storage_error(self, worker: Worker, message: Message) -> None:
        kind, why = schema.text(message, "kind"), schema.text(message, "why")
        step, path = schema.maybe(schema.whole, message, "step"), schema.maybe(schema.text, message, "path")
        self._emit("storage_error", worker, kind=kind, step=step, path=path or "", why=why)

    def _on_flush(self, worker: Worker, message: Message) -> None:
        """Have a snapshot written to disk that this worker has just ended."""
        worker.advance()
        self._flushing.want(schema.path(message, "python"))

    def _on_exception(self, worker: Worker, message: Message) -> None:
        worker.raised = {
            "type": schema.text(message, "type"),
            "message": schema.text(message, "message"),
            "traceback": schema.maybe(schema.text, message, "traceback"),
            "step": schema.maybe(schema.whole, message, "step"),
            "errno": schema.maybe(schema.whole, message, "errno"),
            "peer_lost": message.get("peer_lost") is True,
        }
        if worker.standby is None:
            self._emit("worker.raised", worker, raised=worker.raised, step=worker.step)  # its process may take a second to end

    def _on_bye(self, worker: Worker, message: Message) -> None:
        worker.finished = True
        worker.section, worker.section_limit = "end of script", None  # no steps are expected any more
        worker.advance()
        self._emit("finished", worker, step=schema.maybe(schema.whole, message, "step"))


def _whose(worker: Worker) -> Message:
    """Return whom an event is about."""
    return {"rank": worker.rank, "generation": worker.generation} if worker.standby is None else {"id": worker.standby}


def _meant(worker: Worker, message: Message) -> int:
    """Return the generation that was spoken of: the worker's own, or an older one that it names."""
    named = schema.maybe(schema.whole, message, "generation")
    return worker.generation if named is None else min(named, worker.generation)


def _said(message: Message) -> Message:
    """Return what was said, less what only the agent can say; raise `BadField` for what a flow would stumble over."""
    said = {name: value for name, value in message.items() if name not in OURS and value is not None}
    takes: dict[str, Callable[[Message, str], object]] = {"step": schema.whole, "why": schema.text, "seconds": schema.seconds}
    if message["t"] == "regrouped":
        takes["seconds"] = schema.durations
    if "differs" in said:
        takes["differs"] = schema.words
    if message["t"] == "roles":
        takes |= {"roles": schema.groups, "copies": schema.groups}
        said.setdefault("roles", None)
    for name, take in takes.items():
        if name in said:
            said[name] = take(said, name)
    return said
