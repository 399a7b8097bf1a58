"""The agent's loop: one thread, one selector; everything that happens on the node goes through it in order."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent.commands import CommandHandler
from holdfast.agent.connection import ENOUGH, ClientConnection
from holdfast.agent.event_log import EVENT_LOG, EventLog, past
from holdfast.agent.memstore.manager import MemstoreManager
from holdfast.agent.memstore.writer_client import CheckpointWriterClient
from holdfast.agent.monitor.client import MonitorClient
from holdfast.agent.monitor.kernel_log import KERNEL_LOG, KernelLogFollower
from holdfast.agent.monitor.preemption import PreemptionClient
from holdfast.agent.node.epochs import Epochs
from holdfast.agent.node.identity import Identity
from holdfast.agent.outbox import AgentOutbox
from holdfast.agent.worker_messages import StepBatch, WorkerMessages
from holdfast.agent.workers.group import WorkerGroup
from holdfast.agent.workers.oom import OomDetector
from holdfast.agent.workers.worker import Worker
from holdfast.log import note
from holdfast.process import end_children, started_at
from holdfast.protocol import HEARTBEAT_INTERVAL, BadLine, Message, encode, listen

log = logging.getLogger("holdfast.agent")

FIRST_LEASE: Final = 60.0
"""Seconds an agent waits for the first order."""
LONGEST_NAP: Final = 3600.0
"""Seconds. The kernel takes no timeout of weeks."""
MOST_PEERS: Final = 256
"""Connections at once; a node has some ten workers and one flow."""
A_TURN: Final = 100
"""Messages of one peer that are answered before the others have their turn."""
LEAVE_SECONDS: Final = 25.0
"""How long an agent whose node is about to go waits for the flow to make use of what is there. A spot instance's notice comes two minutes
before its end, or half a minute (AWS, Google Cloud); Slurm leaves 30 s between SIGTERM and SIGKILL (KillWait)."""
SAME: Final = 2.0
"""Seconds in which a second SIGTERM is the first one, heard twice."""
PAST_AT_ONCE: Final = 100
"""Events of an agent before that are told at once."""
END_SECONDS: Final = 5.0
"""How long an ending agent waits for what its workers had forked; its guardian waits on."""
FREQUENT: Final = frozenset({"steps", "saved", "past", "storage_error", "node.fault", "node.counter-increases"})
"""Events of which a job makes any number: no milestones of the journal."""


class AgentServer:
    """A node's agent."""

    def __init__(self, me: Identity, *, kernel_log: Path = KERNEL_LOG, root: Path = Path("/")) -> None:
        """Open the journal and listen; raise ``OSError`` when that cannot be."""
        self.me = me
        self.event_log = EventLog(me.directory / EVENT_LOG)
        self.deposit = AgentOutbox(me.directory)
        self.generation_seq = 0
        """Number of the last event before the current generation."""
        self.job: str | None = None
        self.epoch = 0
        """Epoch of the newest flow that gave an order for the job."""
        self.epochs = Epochs(me.directory)
        self.ending = False
        self._parent = os.getppid()
        self._leave_at: float | None = None
        self._leave_with_ranks = False
        self._lease, self._lease_end = FIRST_LEASE, time.monotonic() + FIRST_LEASE
        self._next_beat = 0.0
        self._peers: set[ClientConnection] = set()
        self._selector = selectors.DefaultSelector()
        self.workers = WorkerGroup(me, self._selector, self.emit, OomDetector(KernelLogFollower(kernel_log)))
        self.workers.last_words = self._last_words
        self.checkpoint_writer = CheckpointWriterClient(me, self.workers, self.emit, self._send)
        self.workers.buried = self.checkpoint_writer.buried
        self.memstore = MemstoreManager(me, self._selector, self.emit, self.workers, self.checkpoint_writer)
        self.watching = MonitorClient(me, self._selector, self.emit, self.workers, kernel_log, root)
        self.workers.fell = self.watching.something_ended
        self.notices = PreemptionClient(me, self._selector, self.emit, self.workers.helpers)
        self._wipe = False
        self._steps = StepBatch(self.emit)
        self._orders, self._reports = (
            CommandHandler(self),
            WorkerMessages(self.workers, self._steps, self.emit, self.tell, self.checkpoint_writer),
        )
        self._reports.pass_by = self._pass_by
        self._server = listen(me.socket)
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._write_facts()

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self, ready: int | None = None) -> int:
        """Serve until told to end, or until no flow has spoken for as long as the lease; tell *ready* (a descriptor) when listening."""
        self._hear_signals()
        self._server.setblocking(False)  # noqa: FBT003 (its only argument)
        self._selector.register(self._server, selectors.EVENT_READ, lambda _: self._accept())
        note(log, "agent.ready", node=self.me.node, pid=os.getpid())
        if ready is not None:
            with suppress(OSError):  # whoever started us did not wait: the lease decides
                os.write(ready, encode({"ready": True, "id": self.me.id, "pid": os.getpid()}))
            os.close(ready)
        while not self._ended():
            for key, mask in self._selector.select(self._patience()):
                key.data(mask)
            self.workers.reap()
            self._tick()
        self._close()
        return 0

    def _ended(self) -> bool:
        return self.ending and not self.workers.everybody()

    def _hear_signals(self) -> None:
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)  # noqa: FBT003 (its only argument)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # not ignored: that would be handed down to the workers

        def heard(_mask: int) -> None:
            with suppress(BlockingIOError):
                while data := wake.recv(4096):
                    self.notices.signalled(data)
                    if signal.SIGTERM in data:
                        self._told_to_go()

        self._selector.register(wake, selectors.EVENT_READ, heard)
        self._waker = waker  # kept open

    def _told_to_go(self) -> None:
        """Give the flow some time, the first time: the node is about to go, and its ranks and what it has in memory with it.

        Where no flow listens, ranks are told to end and may save what they have. Without ranks there is nothing to wait for, nor when it
        was the guardian's end that told us. What belongs to us may have got the same signal: ranks may be gone already, and the guardian
        passes it on.
        """
        now = time.monotonic()
        if self._leave_at is not None:
            if now >= self._leave_at - LEAVE_SECONDS + SAME:
                self.end(wipe=False)
            return
        listened_to = any(peer.told is not None for peer in self._peers)
        at_work = self.workers.living() or (listened_to and now < self.workers.ended_at + SAME)
        if os.getppid() != self._parent or not at_work:
            self.end(wipe=False)  # of this process, not of the job: another agent may follow
            return
        self._leave_at = now + LEAVE_SECONDS
        self.emit("agent.preemption-notice", seconds=LEAVE_SECONDS)
        if not listened_to:
            self._leave_with_ranks = True
            self.workers.stop(self.workers.generation, signal.SIGTERM, LEAVE_SECONDS)

    def hold(self, job: str, epoch: int, lease: float) -> None:
        """Serve *job* from now on; raise ``OSError`` when that cannot be put on record."""
        before, self.job = self.job, job
        try:
            self._write_facts()
        except OSError:
            self.job = before
            raise
        if before != job:
            self.deposit.clear()
            self.event_log.hold(job)
            self._tell_the_past(job)
        self._lease = lease
        self.follow(job, max(epoch, self.epoch) if before else epoch)

    def follow(self, job: str, epoch: int) -> None:
        """Take orders for *job* from no flow older than that of *epoch*, here and past this agent, as long as its folder lasts."""
        self.epoch = epoch
        try:
            self.epochs.note(job, epoch)
        except OSError as error:  # a full disk: this agent knows it, and late orders past it can tell themselves by their deadline alone
            note(log, "epoch.not-kept", level=logging.WARNING, epoch=epoch, why=error)

    def _tell_the_past(self, job: str) -> None:
        """Tell what an agent that served *job* before may not have told anybody before it was killed."""
        events = past(self.me.directory / EVENT_LOG, job)
        for begin in range(0, len(events), PAST_AT_ONCE):
            self.emit("past", events=events[begin : begin + PAST_AT_ONCE])

    def _write_facts(self) -> None:
        """Leave on disk, whole or not at all, who serves this node and for which job."""
        pid = os.getpid()
        facts = {
            "id": self.me.id,
            "node": self.me.node,
            "cluster": self.me.cluster,
            "pid": pid,
            "started": started_at(pid),
            "job": self.job,
        }
        beside, path = self.me.directory / "agent.new", self.me.directory / "agent.json"
        beside.touch(0o600)
        beside.write_text(json.dumps(facts))
        beside.replace(path)

    def begin_generation(self, number: int) -> None:
        """Let the events of generation *number* begin here."""
        self._steps.flush()
        self.generation_seq = self.event_log.seq
        self.event_log.begin_generation()
        self.watching.begin_generation(number)

    def _patience(self) -> float:
        times = [
            self.workers.due(),
            self._steps.due(),
            self.memstore.due(),
            self.checkpoint_writer.due(),
            self.watching.due(),
            self.notices.due(),
            self._leave_at,
            self._next_beat if self.workers.living() else None,
        ]
        nearest = min([at for at in times if at is not None], default=self._lease_end)
        return min(LONGEST_NAP, max(0.0, min(nearest, self._lease_end) - time.monotonic()))

    def _tick(self) -> None:
        now = time.monotonic()
        self._steps.tick(now)
        self.workers.tick(now)
        self.memstore.tick(now)
        self.checkpoint_writer.tick(now)
        self.watching.tick(now)
        self.notices.tick(now)
        if now >= self._next_beat and self.workers.living():
            self._next_beat = now + (self.workers.plan.beat if self.workers.plan is not None else HEARTBEAT_INTERVAL)
            self._beat()
        if self._leave_at is not None and not self.ending and (now >= self._leave_at or self._is_left_alone()):
            self.end(wipe=False)
        if now >= self._lease_end and not self.ending:
            self.emit("lease.ended", seconds=self._lease)
            self.end()

    def _is_left_alone(self) -> bool:
        """Tell whether the ranks that were told to end, as no flow would have them do anything else, are gone."""
        return self._leave_with_ranks and not self.workers.living()

    def renew(self) -> None:
        """Let the lease begin anew: a flow has spoken."""
        self._lease_end = time.monotonic() + self._lease

    def end(self, *, wipe: bool = True) -> None:
        """Kill the workers and standbys, and leave the loop once they are gone; *wipe* what is kept in memory, as nobody needs it."""
        self.ending, self._wipe = True, self._wipe or wipe
        self.checkpoint_writer.end()
        self.watching.end()
        self.notices.end()
        self.workers.end()

    def _close(self) -> None:
        self._steps.flush()
        gone = end_children(seconds=END_SECONDS)
        self.memstore.close(wipe=self._wipe)
        if self._wipe:
            self.deposit.clear()
        self.emit("agent.ended")
        for name in ("agent.sock", "agent.json"):
            with suppress(OSError):
                (self.me.directory / name).unlink(missing_ok=True)
        note(log, "agent.ended", node=self.me.node, clean=gone)

    # -- telling ------------------------------------------------------------------------------------------------------

    def emit(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Journal an event, then send it to every attached flow."""
        failing = self.event_log.failing
        line = self.event_log.add({"event": event, "at": time.time(), **facts}, milestone=event not in FREQUENT)
        if self.event_log.failing != failing:
            note(log, "journal.failing" if self.event_log.failing else "journal.mended", why=self.event_log.failing or failing)
        for peer in [peer for peer in self._peers if peer.told is not None]:
            if peer.told == self.event_log.seq - 1 and len(peer.unsent) < ENOUGH:
                peer.told, peer.past = self.event_log.seq, None
                peer.unsent += line
                self._flush(peer)
            else:
                self._catch_up(peer)

    def _catch_up(self, peer: ClientConnection) -> None:
        """Send *peer* some of what the journal has and it does not: one that reads slowly misses nothing, and costs no memory."""
        if peer not in self._peers or not self._behind(peer):
            return
        while peer.told is not None and peer.told < self.event_log.seq and len(peer.unsent) < ENOUGH:
            peer.past = peer.past or self.event_log.since(peer.told)
            peer.told, line = next(peer.past)
            peer.unsent += line
        self._flush(peer)

    def _beat(self) -> None:
        """Tell how far every worker is."""
        ranks = {str(worker.rank): worker.view() | {"replica": self.memstore.replica(worker.rank)} for worker in self.workers.living()}
        self._pass_by("heartbeats", generation=self.workers.generation, ranks=ranks)

    def tell_of_newer(self, epoch: int) -> None:
        """Have attached flows know at once that one of *epoch* steers: an older one gives no order that could be refused for a while."""
        for peer in [peer for peer in self._peers if peer.told is not None]:
            self._send(peer, {"ok": False, "why": "a newer flow steers this job", "epoch": epoch})

    def _pass_by(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Tell attached flows what is not journaled and skips a reader that is behind: an old one is worth nothing."""
        message = {"event": event, "at": time.time(), **facts}
        for peer in [peer for peer in self._peers if peer.told == self.event_log.seq and not peer.unsent]:
            self._send(peer, message)

    def _send(self, peer: ClientConnection, message: Message) -> None:
        if peer.send(message):
            self._watch(peer)
        else:
            self._drop(peer)

    def tell(self, worker: Worker, message: Message) -> bool:
        """Say something to a worker, now or after its hello; tell whether it has a line. One that reads slowly keeps nobody waiting."""
        if worker.line is not None:
            self._send(worker.line, message)
            return worker.line is not None
        if worker.greetings:
            worker.greetings.append(message)
        return bool(worker.greetings)

    def _flush(self, peer: ClientConnection) -> None:
        if peer.drain():
            self._watch(peer)
        else:
            self._drop(peer)

    # -- hearing ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: without an answer the caller would knock for ever
            note(log, "agent.crowded", why=error)
            os.close(self._reserve)
            with suppress(OSError):
                self._server.accept()[0].close()
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        if len(self._peers) >= MOST_PEERS:
            note(log, "agent.crowded", why=f"{MOST_PEERS} connections are open")
            sock.close()
            return
        peer = ClientConnection(sock)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._serve(peer, mask))

    def _behind(self, peer: ClientConnection) -> bool:
        return peer.told is not None and peer.told < self.event_log.seq

    def _watch(self, peer: ClientConnection) -> None:
        """Wait for what *peer* needs: it is not heard while it is behind, so that answers come after the events of the past."""
        if peer in self._peers:
            busy = bool(peer.event_queue) or self._behind(peer)
            events = (selectors.EVENT_WRITE if busy or peer.unsent else 0) | (0 if busy else selectors.EVENT_READ)
            key = self._selector.get_key(peer.socket)
            if key.events != events:
                self._selector.modify(peer.socket, events, key.data)

    def _serve(self, peer: ClientConnection, mask: int) -> None:
        """Give *peer* its turn: some of what it has missed, some of what it has said."""
        if peer in self._peers and mask & selectors.EVENT_WRITE:
            self._flush(peer)
            self._catch_up(peer)
        if peer in self._peers and mask & selectors.EVENT_READ and not peer.event_queue:
            self._hear(peer)
        self._attend(peer, A_TURN)
        self._watch(peer)

    def _hear(self, peer: ClientConnection) -> None:
        """Take in a chunk of what *peer* says."""
        try:
            going = peer.read()
        except BadLine as error:
            note(log, "peer.garbage", pid=peer.pid, why=error)
            self._attend(peer)
            peer.send({"re": None, "ok": False, "why": f"{error}. This socket takes JSON objects, one a line"})
            self._drop(peer)
            return
        if not going:
            self._attend(peer)
            self._drop(peer)

    def _attend(self, peer: ClientConnection, most: int | None = None) -> None:
        """Answer what *peer* has said, *most* messages of it, as long as it is not behind."""
        for _ in range(len(peer.event_queue) if most is None else min(most, len(peer.event_queue))):
            if peer not in self._peers or self._behind(peer) or not peer.event_queue:
                return
            message = peer.event_queue.popleft()
            if "do" in message:
                self._send(peer, self._orders.take(peer, message))
                self._catch_up(peer)
            elif "t" in message:
                answer = self._reports.take(peer, message)
                if answer is not None:
                    self._send(peer, answer)

    def hear_out(self, worker: Worker) -> None:
        """Take in all that *worker* has said so far; what was held until its generation is on record counts for the one that is."""
        self.hear_all(worker)
        worker.ahead = None
        self.release(worker)

    def release(self, worker: Worker) -> None:
        """Take in what *worker* has said of a generation ahead, now that it is on record, or never will be."""
        held = list(worker.held)
        worker.held.clear()
        for peer, message in held:
            answer = self._reports.take(peer, message)
            if answer is not None:
                self._send(peer, answer)

    def _last_words(self, worker: Worker) -> None:
        """Hear out what *worker* said before it ended: its exception is in the socket still."""
        self.hear_out(worker)
        self._steps.flush()

    def hear_all(self, worker: Worker) -> None:
        """Take in all that *worker* has said so far."""
        for peer in [peer for peer in self._peers if self._reports.speaker(peer) is worker]:
            for _ in range(64):  # its children may go on talking
                self._attend(peer)
                if peer not in self._peers:
                    break
                self._hear(peer)
                if not peer.event_queue:
                    break

    def _drop(self, peer: ClientConnection) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            if peer.worker is not None and peer.worker.line is peer:
                peer.worker.line = None
            self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.past = None
