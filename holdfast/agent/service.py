"""The agent's loop: one thread, one selector; everything that happens on the node goes through it in order."""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent.journal import Journal, write_json
from holdfast.agent.memory import OutOfMemory
from holdfast.agent.orders import Orders
from holdfast.agent.starter import WarmStarter
from holdfast.agent.worker import Worker
from holdfast.log import note
from holdfast.process import children_of, kill, kill_group, started_at
from holdfast.wire import BadLine, LineBuffer, Message, encode, listen

log = logging.getLogger("holdfast.agent")

BEAT: Final = 0.25
"""Seconds between two beats to the flow while workers run."""
FLUSH: Final = 0.2
"""Seconds that finished steps may wait for company before they are journaled."""
MOST_UNSENT: Final = 8 * 1024 * 1024
"""Bytes a stalled reader may fall behind before it is cut off; it attaches again and is told from the journal."""


class Peer:
    """One connection: a flow or a worker, as its first message tells."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.lines, self.unsent = sock, LineBuffer(), bytearray()
        self.follows: int | None = None
        """After which event it wants to be told, once it has asked."""
        self.attached = False
        self.pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]

    def send(self, message: Message) -> bool:
        """Send or keep *message* without ever blocking; False when the reader is gone or too far behind."""
        self.unsent += encode(message)
        return self.drain() and len(self.unsent) < MOST_UNSENT

    def drain(self) -> bool:
        """Send what can be sent now; False when the reader is gone."""
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self.unsent[:sent]
        return True


class Service:
    """A node's agent."""

    def __init__(self, directory: Path, node: str, cluster: str) -> None:
        self.directory, self.node, self.cluster = directory, node, cluster
        self.id = secrets.token_hex(6)
        self.journal = Journal(directory / "journal.jsonl")
        self.memory = OutOfMemory()
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.generation_seq = 0
        """Sequence number of the last event before the current generation."""
        self.membership: dict[str, list[int]] = {}
        self.job: str | None = None
        self.epoch = 0
        self.lease = 60.0
        self.starter: WarmStarter | None = None
        self.peers: dict[int, Peer] = {}
        self.steps: list[list[Any]] = []
        self._orders = Orders(self)
        self._selector = selectors.DefaultSelector()
        self._deadlines: list[tuple[float, int]] = []
        self._early: dict[int, os.waitid_result] = {}
        self._lease_end = time.monotonic() + self.lease
        self._next_beat = self._next_flush = 0.0
        self._stopping: int | None = None
        self.ending = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self, ready: int | None = None) -> int:
        """Serve until told to end, or until no flow has spoken for as long as the lease; tell *ready* (a descriptor) when listening."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        server = listen(self.directory / "agent.sock")
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, lambda _: self._accept(server))
        self._selector.register(wake, selectors.EVENT_READ, lambda _: self._signals(wake))
        self.write_facts()
        note(log, "agent.ready", node=self.node, pid=os.getpid())
        if ready is not None:
            os.write(ready, encode({"ready": True, "id": self.id, "pid": os.getpid()}))
            os.close(ready)
        while not (self.ending and not self._living()):
            for key, mask in self._selector.select(self._patience()):
                key.data(mask)
            self._reap()
            self._tick()
        self._close()
        return 0

    def write_facts(self) -> None:
        """Leave on disk who serves this node and for which job."""
        write_json(
            self.directory / "agent.json",
            {"id": self.id, "node": self.node, "cluster": self.cluster, "pid": os.getpid(), "started": started_at(os.getpid()), "job": self.job},
        )

    def _patience(self) -> float:
        now = time.monotonic()
        nearest = [self._lease_end, *(at for at, _ in self._deadlines)]
        if self._living():
            nearest.append(self._next_beat)
        if self.steps:
            nearest.append(self._next_flush)
        return max(0.0, min(nearest) - now)

    def _tick(self) -> None:
        now = time.monotonic()
        if self.steps and now >= self._next_flush:
            self.flush_steps()
        if self._living() and now >= self._next_beat:
            self._beat()
            self._next_beat = now + BEAT
        for at, generation in list(self._deadlines):
            if now >= at:
                self._deadlines.remove((at, generation))
                self._signal_workers(generation, signal.SIGKILL)
        if now >= self._lease_end and not self.ending:
            self.emit("lease.ended", seconds=self.lease)
            self.end()

    def renew(self) -> None:
        """A flow spoke: the lease starts anew."""
        self._lease_end = time.monotonic() + self.lease

    def end(self) -> None:
        """Kill the workers and leave the loop once they are gone."""
        self.ending = True
        self.stop(self.generation, signal.SIGKILL, 0.0)

    def _close(self) -> None:
        self.flush_steps()
        self.emit("agent.ended")
        if self.starter:
            self.starter.close()
        for name in ("agent.sock", "agent.json"):
            (self.directory / name).unlink(missing_ok=True)
        note(log, "agent.ended", node=self.node)

    # -- telling ------------------------------------------------------------------------------------------------------

    def emit(self, event: str, **facts: Any) -> None:
        """Journal an event, then send it to every attached flow."""
        message = self.journal.add({"event": event, "at": time.time(), **facts})
        self._broadcast(message)

    def _broadcast(self, message: Message) -> None:
        for peer in [peer for peer in self.peers.values() if peer.attached]:
            self.send(peer, message)

    def send(self, peer: Peer, message: Message) -> None:
        """Send to one peer; cut it off when it is gone or too far behind."""
        if not peer.send(message):
            self._drop(peer)
            return
        self._watch_peer(peer)

    def _beat(self) -> None:
        """Tell how far every worker is. Beats are not journaled: an old one is worth nothing."""
        ranks = {str(worker.rank): worker.view() for worker in self._living()}
        self._broadcast({"event": "beats", "at": time.time(), "generation": self.generation, "ranks": ranks})

    def flush_soon(self) -> None:
        """Journal finished steps at once if none were lately, else together with those that follow."""
        now = time.monotonic()
        if len(self.steps) == 1 and now >= self._next_flush + FLUSH:
            self._next_flush = now
        elif len(self.steps) == 1:
            self._next_flush = max(self._next_flush, now) + FLUSH

    def is_stopping(self) -> bool:
        """Tell whether the workers have been told to stop."""
        return self._stopping is not None

    def flush_steps(self) -> None:
        """Journal the steps that rank 0 has finished since the last time."""
        if self.steps:
            self.emit("steps", generation=self.generation, steps=self.steps)
            self.steps = []

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        with suppress(BlockingIOError):
            sock, _ = server.accept()
            sock.setblocking(False)
            peer = Peer(sock)
            self.peers[sock.fileno()] = peer
            self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._serve(peer, mask))

    def _watch_peer(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        with suppress(KeyError, ValueError):
            key = self._selector.get_key(peer.socket)
            if key.events != events:
                self._selector.modify(peer.socket, events, key.data)

    def _serve(self, peer: Peer, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not peer.drain():
            self._drop(peer)
            return
        self._watch_peer(peer)
        if mask & selectors.EVENT_READ:
            self.hear(peer)

    def hear(self, peer: Peer) -> None:
        """Take everything *peer* has said so far."""
        while True:
            try:
                data = peer.socket.recv(262144)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(peer)
                return
            try:
                for message in peer.lines.feed(data):
                    self._take(peer, message)
            except BadLine as error:
                note(log, "peer.garbage", pid=peer.pid, why=error)
                self._drop(peer)
                return

    def _take(self, peer: Peer, message: Message) -> None:
        if "do" in message:
            self.renew()
            self._orders.take(peer, message)
        elif "t" in message:
            self._orders.hear_worker(peer, message)

    def _drop(self, peer: Peer) -> None:
        if self.peers.pop(peer.socket.fileno(), None) is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    # -- workers ------------------------------------------------------------------------------------------------------

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.gone]

    def living(self) -> list[Worker]:
        """Return the workers whose processes have not ended."""
        return self._living()

    def worker_of(self, pid: int) -> Worker | None:
        """Return the worker whose process is *pid*."""
        return next((worker for worker in self.workers.values() if worker.pid == pid and not worker.gone), None)

    def use_starter(self, starter: WarmStarter) -> None:
        """Take *starter* in place of the one before."""
        self.drop_starter()
        self.starter = starter
        self._selector.register(starter.socket, selectors.EVENT_READ, lambda _: self._hear_starter())

    def drop_starter(self) -> None:
        """End the warm starter, if there is one."""
        if self.starter:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self.starter.socket)
            self.starter.close()
            self.starter = None

    def _hear_starter(self) -> None:
        assert self.starter is not None
        messages = self.starter.read()
        if messages is None:
            self.drop_starter()
            self._orders.starter_gone()
            return
        for message in messages:
            self._orders.hear_starter(message)

    def registered(self, worker: Worker, pid: int) -> None:
        """A worker's process is known by its pid from now on."""
        worker.pid, worker.started = pid, time.time()
        worker.advance()
        self.emit("worker.started", rank=worker.rank, pid=pid, generation=worker.generation)
        early = self._early.pop(pid, None)
        if early is not None:
            self._ended(worker, early)
        elif self._stopping is not None and worker.generation <= self._stopping:
            kill_group(pid, signal.SIGKILL)
            kill(pid, signal.SIGKILL)

    def stop(self, generation: int, number: int, grace: float) -> None:
        """Signal all workers up to *generation*; kill what is left after *grace* seconds."""
        self._stopping = max(generation, self._stopping or 0)
        self._signal_workers(generation, number)
        if number != signal.SIGKILL:
            self._deadlines.append((time.monotonic() + grace, generation))
        self._say_when_gone()

    def _signal_workers(self, generation: int, number: int) -> None:
        for worker in self._living():
            if worker.generation <= generation and worker.pid:
                kill_group(worker.pid, number)
                kill(worker.pid, number)  # before its setsid it leads no group yet
                if number != signal.SIGKILL:
                    kill_group(worker.pid, signal.SIGCONT)

    def _signals(self, wake: socket.socket) -> None:
        with suppress(BlockingIOError):
            while data := wake.recv(4096):
                if signal.SIGTERM in data:
                    self.end()

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            self._changed(found)

    def _changed(self, found: os.waitid_result) -> None:
        worker = self.worker_of(found.si_pid)
        if found.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            if worker:
                self._ended(worker, found)
            elif not (self.starter and self.starter.pid == found.si_pid):
                self._early[found.si_pid] = found
                while len(self._early) > 1024:  # noqa: PLR2004 (orphans of workers that end later than these)
                    self._early.pop(next(iter(self._early)))
        elif worker and found.si_code == os.CLD_STOPPED:
            worker.stopped = (found.si_status, time.monotonic())
            self.emit("worker.stopped", rank=worker.rank, signal=found.si_status, generation=worker.generation, step=worker.step)
        elif worker and found.si_code == os.CLD_CONTINUED:
            worker.stopped = None
            self.emit("worker.continued", rank=worker.rank, generation=worker.generation)

    def _ended(self, worker: Worker, found: os.waitid_result) -> None:
        at = time.time()
        self._last_words(worker)
        worker.gone = True
        kill_group(found.si_pid, signal.SIGKILL)  # what it forked goes with it
        by_signal = found.si_code != os.CLD_EXITED
        killed = by_signal and found.si_status == signal.SIGKILL
        self.flush_steps()
        self.emit(
            "worker.exited",
            rank=worker.rank,
            generation=worker.generation,
            pid=found.si_pid,
            ended=at,
            code=None if by_signal else found.si_status,
            signal=found.si_status if by_signal else None,
            oom=self.memory.killed(found.si_pid) if killed else None,
            oom_blind=self.memory.blind if killed else None,
            raised=worker.raised,
            finished=worker.finished or not worker.managed,
            step=worker.step,
            ordered=self._stopping is not None and worker.generation <= self._stopping,
            output=worker.tail() if by_signal or found.si_status or not worker.finished else "",
        )
        self._say_when_gone()

    def _last_words(self, worker: Worker) -> None:
        """Hear out what the worker said before it ended: its exception is in the socket still."""
        for peer in [peer for peer in self.peers.values() if peer.pid == worker.pid]:
            self.hear(peer)

    def _say_when_gone(self) -> None:
        if self._stopping is None or any(worker.generation <= self._stopping for worker in self._living()):
            return
        if any(worker.pid is None and not worker.gone for worker in self.workers.values()):
            return
        self._end_strays()
        self.emit("workers.gone", generation=self._stopping)
        self._stopping = None
        self._deadlines.clear()

    def _end_strays(self) -> None:
        """Kill what workers forked into sessions of their own: as orphans they are our children now."""
        known = {worker.pid for worker in self._living()} | ({self.starter.pid} if self.starter else set())
        for pid in children_of(os.getpid()):
            if pid not in known:
                kill(pid, signal.SIGKILL)
