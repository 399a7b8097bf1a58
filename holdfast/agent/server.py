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
from holdfast.agent.event_log import EVENT_LOG, AgentOutbox, EventLog, replayed_events
from holdfast.agent.memstore.manager import MemstoreManager
from holdfast.agent.memstore.writer_client import CheckpointWriterClient
from holdfast.agent.monitor.client import MonitorClient
from holdfast.agent.monitor.kernel_log import KERNEL_LOG, KernelLogFollower
from holdfast.agent.monitor.preemption import PreemptionClient
from holdfast.agent.node.epochs import Epochs
from holdfast.agent.node.identity import Identity
from holdfast.agent.worker_messages import StepBatch, WorkerMessages
from holdfast.agent.workers.group import WorkerGroup
from holdfast.agent.workers.oom import OomDetector
from holdfast.agent.workers.subreaper import PASSED_ON
from holdfast.agent.workers.worker import Worker
from holdfast.host.process import end_children, started_at
from holdfast.log import note
from holdfast.protocol import HEARTBEAT_INTERVAL, BadLine, Message, encode, listen

log = logging.getLogger("holdfast.agent")

FIRST_LEASE: Final = 60.0
"""Seconds an agent waits for the first command."""
MAX_WAIT: Final = 3600.0
"""Seconds. The kernel accepts no timeout of weeks."""
MAX_CONNECTIONS: Final = 256
"""A node has some ten workers and one controller."""
TURN_MESSAGES: Final = 100
"""Messages of one client that are answered before the others get their turn."""
PREEMPTION_SECONDS: Final = 25.0
"""How long an agent that got SIGTERM waits for the controller to save what is on its node. A spot instance's notice comes two minutes
before its end, or half a minute (AWS, Google Cloud); Slurm leaves 30 s between SIGTERM and SIGKILL (KillWait)."""
SAME_SIGNAL_SECONDS: Final = 2.0
"""Seconds in which a SIGTERM that comes the same way once more counts as the first one: Slurm signals a step, and srun signals it again."""
TERMINATED_SECONDS: Final = 2.0
"""Seconds for which an agent that gets SIGTERM takes ranks that have just ended for ranks that got it too."""
RECONNECT_SECONDS: Final = 2.0
"""How long an agent that got SIGTERM waits for a controller whose connection ended meanwhile: one that was cut off comes back at once."""
REPLAY_BATCH: Final = 100
"""Events of a previous agent that are sent at once."""
END_SECONDS: Final = 5.0
"""How long an ending agent waits for what its workers had forked; its subreaper waits on."""
FREQUENT: Final = frozenset({"steps", "saved", "replay", "storage-error", "node.fault", "node.counter-increases"})
"""Events of which a job has any number: no milestones of the event log."""


class AgentServer:
    """A node's agent."""

    def __init__(self, me: Identity, *, kernel_log: Path = KERNEL_LOG, root: Path = Path("/")) -> None:
        """Open the event log and listen; raise ``OSError`` when that fails."""
        self.me, self.root = me, root
        self.event_log = EventLog(me.directory / EVENT_LOG)
        self.outbox = AgentOutbox(me.directory)
        self.generation_seq = 0
        """Number of the last event before the current generation."""
        self.job: str | None = None
        self.epoch = 0
        """Epoch of the newest controller that sent a command for the job."""
        self.epochs = Epochs(me.directory)
        self.ending = False
        self._parent = os.getppid()
        self._end_at: float | None = None
        self._end_with_ranks = False
        self._terminations, self._terminated_by = list[int](), dict[int, float]()
        """SIGTERM, and the same signal as the subreaper passes it on: those to answer still, and when each came first (monotonic)."""
        self._attached_at = float("-inf")
        """When a controller was attached last (monotonic), as far as an agent that got SIGTERM has looked."""
        self._lease, self._lease_end = FIRST_LEASE, time.monotonic() + FIRST_LEASE
        self._next_heartbeat = 0.0
        self._peers: set[ClientConnection] = set()
        self._selector = selectors.DefaultSelector()
        self.workers = WorkerGroup(me, self._selector, self.emit, OomDetector(KernelLogFollower(kernel_log)))
        self.workers.before_end = self._read_last_messages
        self.checkpoint_writer = CheckpointWriterClient(me, self.workers, self.emit, self._send)
        self.workers.helper_ended = self.checkpoint_writer.helper_ended
        self.memstore = MemstoreManager(me, self._selector, self.emit, self.workers, self.checkpoint_writer)
        self.monitor = MonitorClient(me, self._selector, self.emit, self.workers, kernel_log, root)
        self.workers.crashed = self.monitor.worker_crashed
        self.notices = PreemptionClient(me, self._selector, self.emit, self.workers.helpers)
        self._wipe = False
        self._steps = StepBatch(self.emit)
        self._parts = (self._steps, self.workers, self.memstore, self.checkpoint_writer, self.monitor, self.notices)
        self._commands = CommandHandler(self)
        self._messages = WorkerMessages(self.workers, self._steps, self.emit, self.send, self.checkpoint_writer)
        self._messages.emit_unlogged = self._emit_unlogged
        self._server = listen(me.socket)
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._write_facts()

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self, ready: int | None = None) -> int:
        """Serve until ended, or until the lease ends without a controller's command; write to *ready* (a descriptor) when listening."""
        self._catch_signals()
        self._server.setblocking(False)  # noqa: FBT003 (its only argument)
        self._selector.register(self._server, selectors.EVENT_READ, lambda _: self._accept())
        note(log, "agent.ready", node=self.me.node, pid=os.getpid())
        if ready is not None:
            with suppress(OSError):  # the starting process did not wait: the lease decides
                os.write(ready, encode({"ready": True, "id": self.me.id, "pid": os.getpid()}))
            os.close(ready)
        while not (self.ending and not self.workers.everybody()):
            self._turn()
        self._close()
        return 0

    def _turn(self) -> None:
        """Wait for what comes, or for the next thing to do; handle the one and do the other.

        A process that is stopped and continued (SIGSTOP, a frozen container) leaves ``select`` when its timeout has passed, without what
        has come meanwhile. That is handled before anything is taken for silence: a command that lies in the socket renews the lease.
        """
        self._handle_ready(self._seconds_to_wait())
        now = time.monotonic()
        self._handle_ready(0.0)
        self._answer_terminations()
        self.workers.reap()
        self._tick(now)

    def _handle_ready(self, seconds: float) -> None:
        for key, mask in self._selector.select(seconds):
            key.data(mask)

    def _catch_signals(self) -> None:
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)  # noqa: FBT003 (its only argument)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, PASSED_ON):
            signal.signal(number, lambda *_: None)  # not ignored: workers would inherit that

        def receive(_mask: int) -> None:
            with suppress(BlockingIOError):
                while data := wake.recv(4096):
                    self.notices.signalled(data)
                    self._terminations += [number for number in data if number in {signal.SIGTERM, PASSED_ON}]

        self._selector.register(wake, selectors.EVENT_READ, receive)
        self._waker = waker  # kept open

    def _answer_terminations(self) -> None:
        """Handle SIGTERM after all else that has arrived: a controller that has gone by the same moment is not waited for.

        One that comes the same way again is a second request; what the subreaper passes on is the agent's own, however late it comes.
        """
        received, self._terminations, now = self._terminations, [], time.monotonic()
        for number in received:
            if now >= self._terminated_by.setdefault(number, now) + SAME_SIGNAL_SECONDS or os.getppid() != self._parent:
                self.end(wipe=False)
        if received and self._end_at is None and not self.ending:
            self._on_sigterm()

    def _on_sigterm(self) -> None:
        """Give the controller some time: the node is about to end, and its ranks and what it has in memory with it.

        Where no controller is attached, ranks are stopped and may save what they have. There is nothing to wait for without ranks, or when
        the subreaper's end caused the signal. The agent's children may have got it too: ranks may have exited already.
        """
        now = time.monotonic()
        has_ranks = self.workers.living() or (self._is_attached() and now < self.workers.ended_at + TERMINATED_SECONDS)
        if not has_ranks:
            self.end(wipe=False)  # of this process, not of the job: another agent may follow
            return
        self._end_at = now + PREEMPTION_SECONDS
        self.emit("agent.preemption-notice", seconds=PREEMPTION_SECONDS)

    def _is_attached(self) -> bool:
        """Return whether a controller is attached."""
        return any(peer.sent_seq is not None for peer in self._peers)

    def _end_at_notice(self, now: float) -> None:
        """End when the time that SIGTERM left is over; stop the ranks, which may save, as soon as no controller is there to do it."""
        assert self._end_at is not None
        if self._is_attached():
            self._attached_at = now
        elif not self._end_with_ranks and now >= self._attached_at + RECONNECT_SECONDS:
            self._end_with_ranks = True
            self.workers.stop(self.workers.generation, signal.SIGTERM, max(0.0, self._end_at - now))
        if now >= self._end_at or (self._end_with_ranks and not self.workers.living()):
            self.end(wipe=False)

    def accept_job(self, job: str, epoch: int, lease: float) -> None:
        """Serve *job* from now on; raise ``OSError`` when that cannot be recorded."""
        before, self.job = self.job, job
        try:
            self._write_facts()
        except OSError:
            self.job = before
            raise
        if before != job:
            self.outbox.clear()
            self.event_log.begin_job(job)
            events = replayed_events(self.me.directory / EVENT_LOG, job)  # a killed agent may not have sent them to anybody
            for begin in range(0, len(events), REPLAY_BATCH):
                self.emit("replay", events=events[begin : begin + REPLAY_BATCH])
        self._lease = lease
        self.accept_epoch(job, max(epoch, self.epoch) if before else epoch)

    def accept_epoch(self, job: str, epoch: int) -> None:
        """Refuse commands for *job* of controllers older than *epoch* from now on, also those that go past this agent."""
        self.epoch = epoch
        try:
            self.epochs.record(job, epoch)
        except OSError as error:  # a full disk: commands that go past this agent are then refused by their deadline only
            note(log, "epoch.not-recorded", level=logging.WARNING, epoch=epoch, why=error)

    def _write_facts(self) -> None:
        """Write atomically to disk who serves this node and for which job."""
        pid = os.getpid()
        facts = {
            "id": self.me.id,
            "node": self.me.node,
            "cluster": self.me.cluster,
            "pid": pid,
            "started": started_at(pid),
            "job": self.job,
        }
        new, path = self.me.directory / "agent.new", self.me.directory / "agent.json"
        new.touch(0o600)
        new.write_text(json.dumps(facts))
        new.replace(path)

    def begin_generation(self, number: int) -> None:
        """Begin the events of generation *number* here."""
        self._steps.flush()
        self.generation_seq = self.event_log.seq
        self.event_log.begin_generation()
        self.monitor.begin_generation(number)

    def _seconds_to_wait(self) -> float:
        times = [part.due() for part in self._parts]
        if self._end_at is not None and not self._end_with_ranks and not self._is_attached():
            times.append(self._attached_at + RECONNECT_SECONDS)
        times += [self._end_at, self._next_heartbeat if self.workers.living() else None]
        nearest = min([at for at in times if at is not None], default=self._lease_end)
        return min(MAX_WAIT, max(0.0, min(nearest, self._lease_end) - time.monotonic()))

    def _tick(self, now: float) -> None:
        for part in self._parts:
            part.tick(now)
        if now >= self._next_heartbeat and self.workers.living():
            plan = self.workers.plan
            self._next_heartbeat = now + ((plan.beat if plan is not None else 0.0) or HEARTBEAT_INTERVAL)
            self._send_heartbeats()
        if self._end_at is not None and not self.ending:
            self._end_at_notice(now)
        if now >= self._lease_end and not self.ending:
            self.emit("lease.ended", seconds=self._lease)
            self.end()

    def renew(self) -> None:
        """Restart the lease: a controller has sent a command."""
        self._lease_end = time.monotonic() + self._lease

    def end(self, *, wipe: bool = True) -> None:
        """Kill the workers and hot spares and end the loop once they have exited; *wipe* the memory store unless it may be needed."""
        self.ending, self._wipe = True, self._wipe or wipe
        self.checkpoint_writer.end()
        self.monitor.end()
        self.notices.end()
        self.workers.end()

    def _close(self) -> None:
        self._steps.flush()
        clean = end_children(seconds=END_SECONDS)
        self.memstore.close(wipe=self._wipe)
        if self._wipe:
            self.outbox.clear()
        self.emit("agent.ended")
        for name in ("agent.sock", "agent.json"):
            with suppress(OSError):
                (self.me.directory / name).unlink(missing_ok=True)
        note(log, "agent.ended", node=self.me.node, clean=clean)

    # -- sending ------------------------------------------------------------------------------------------------------

    def emit(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Log an event, then send it to every attached controller."""
        failing = self.event_log.failing
        line = self.event_log.add({"event": event, "at": time.time(), **facts}, milestone=event not in FREQUENT)
        if self.event_log.failing != failing:
            state = "event-log.failing" if self.event_log.failing else "event-log.restored"
            note(log, state, why=self.event_log.failing or failing)
        for peer in [peer for peer in self._peers if peer.sent_seq is not None]:
            if peer.sent_seq == self.event_log.seq - 1 and len(peer.unsent) < ENOUGH:
                peer.sent_seq, peer.replay = self.event_log.seq, None
                peer.unsent += line
                self._flush(peer)
            else:
                self._catch_up(peer)

    def _catch_up(self, peer: ClientConnection) -> None:
        """Send *peer* some of the logged events that it does not have: a slow reader misses nothing, and costs no memory."""
        if peer not in self._peers or not self._is_behind(peer):
            return
        while peer.sent_seq is not None and peer.sent_seq < self.event_log.seq and len(peer.unsent) < ENOUGH:
            peer.replay = peer.replay or self.event_log.since(peer.sent_seq)
            peer.sent_seq, line = next(peer.replay)
            peer.unsent += line
        self._flush(peer)

    def _send_heartbeats(self) -> None:
        """Send the progress of every worker."""
        ranks = {str(worker.rank): worker.view() | {"replica": self.memstore.replica(worker.rank)} for worker in self.workers.living()}
        self._emit_unlogged("heartbeats", generation=self.workers.generation, ranks=ranks)

    def notify_superseded(self, epoch: int) -> None:
        """Notify attached controllers at once that one of *epoch* runs the job: an older one may send no command for a while."""
        for peer in [peer for peer in self._peers if peer.sent_seq is not None]:
            self._send(peer, {"ok": False, "why": "a newer controller runs this job", "epoch": epoch})

    def _emit_unlogged(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Send attached controllers what is worth nothing later: it is not logged, and not sent to a reader that is behind."""
        message = {"event": event, "at": time.time(), **facts}
        for peer in [peer for peer in self._peers if peer.sent_seq == self.event_log.seq and not peer.unsent]:
            self._send(peer, message)

    def _send(self, peer: ClientConnection, message: Message) -> None:
        if peer.send(message):
            self._wait_for(peer)
        else:
            self._drop(peer)

    def send(self, worker: Worker, message: Message) -> bool:
        """Send *message* to a worker, now or after its hello; return whether it is connected. A slow reader delays nobody."""
        if worker.connection is not None:
            self._send(worker.connection, message)
            return worker.connection is not None
        if worker.greetings:
            worker.greetings.append(message)
        return bool(worker.greetings)

    def _flush(self, peer: ClientConnection) -> None:
        if peer.drain():
            self._wait_for(peer)
        else:
            self._drop(peer)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: the client would wait for ever without this
            note(log, "agent.too-many-connections", why=error)
            os.close(self._reserve)
            with suppress(OSError):
                self._server.accept()[0].close()
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        if len(self._peers) >= MAX_CONNECTIONS:
            note(log, "agent.too-many-connections", why=f"{MAX_CONNECTIONS} connections are open")
            sock.close()
            return
        peer = ClientConnection(sock)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._serve(peer, mask))

    def _is_behind(self, peer: ClientConnection) -> bool:
        return peer.sent_seq is not None and peer.sent_seq < self.event_log.seq

    def _wait_for(self, peer: ClientConnection) -> None:
        """Wait for what *peer* needs: nothing is read from it while it is behind, so that answers come after earlier events."""
        if peer in self._peers:
            busy = bool(peer.received) or self._is_behind(peer)
            events = (selectors.EVENT_WRITE if busy or peer.unsent else 0) | (0 if busy else selectors.EVENT_READ)
            peer.wait_for(self._selector, events)

    def _serve(self, peer: ClientConnection, mask: int) -> None:
        """Give *peer* its turn: send some of what it has missed, handle some of what it has sent."""
        if peer in self._peers and mask & selectors.EVENT_WRITE:
            self._flush(peer)
            self._catch_up(peer)
        if peer in self._peers and mask & selectors.EVENT_READ and not peer.received:
            self._read(peer)
        self._handle(peer, TURN_MESSAGES)
        self._wait_for(peer)

    def _read(self, peer: ClientConnection) -> None:
        """Read a chunk of what *peer* sends."""
        try:
            is_open = peer.read()
        except BadLine as error:
            note(log, "client.bad-line", pid=peer.pid, why=error)
            self._handle(peer)
            peer.send({"re": None, "ok": False, "why": f"{error}. This socket takes JSON objects, one a line"})
            self._drop(peer)
            return
        if not is_open:
            self._handle(peer)
            self._drop(peer)

    def _handle(self, peer: ClientConnection, most: int | None = None) -> None:
        """Handle and answer what *peer* has sent, *most* messages of it, as long as it is not behind."""
        for _ in range(len(peer.received) if most is None else min(most, len(peer.received))):
            if peer not in self._peers or self._is_behind(peer) or not peer.received:
                return
            message = peer.received.popleft()
            if "do" in message:
                self._send(peer, self._commands.take(peer, message))
                self._catch_up(peer)
            elif "t" in message:
                self._take(peer, message)

    def _take(self, peer: ClientConnection, message: Message) -> None:
        answer = self._messages.take(peer, message)
        if answer is not None:
            self._send(peer, answer)

    def finish_reading(self, worker: Worker) -> None:
        """Handle all that *worker* has sent so far; deferred messages count for the generation that is recorded."""
        self.receive_all(worker)
        worker.ahead = None
        self.release(worker)

    def release(self, worker: Worker) -> None:
        """Handle the deferred messages of *worker*: their generation is recorded now, or never will be."""
        deferred = list(worker.deferred)
        worker.deferred.clear()
        for peer, message in deferred:
            self._take(peer, message)

    def _read_last_messages(self, worker: Worker) -> None:
        """Handle what *worker* sent before it ended: its exception is still in the socket."""
        self.finish_reading(worker)
        self._steps.flush()

    def receive_all(self, worker: Worker) -> None:
        """Read and handle all that *worker* has sent so far."""
        for peer in [peer for peer in self._peers if self._messages.sender(peer) is worker]:
            for _ in range(64):  # its children may go on sending
                self._handle(peer)
                if peer not in self._peers:
                    break
                self._read(peer)
                if not peer.received:
                    break

    def _drop(self, peer: ClientConnection) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            if peer.worker is not None and peer.worker.connection is peer:
                peer.worker.connection = None
            self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.replay = None
