"""Who knocks is let in or not, and then served: labels, whole snapshots, replicas taken in."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final

from holdfast.agent.memstore.server.replica_store import Rejected, ReplicaStore
from holdfast.log import note
from holdfast.memstore import shared_memory
from holdfast.memstore.connection import ABANDON, DATA, FRAME, LONGEST_FRAME, LONGEST_TAIL, TAIL, MemstoreConnection
from holdfast.memstore.shared_memory import Label, Slot, Snapshot, UnusableSnapshot
from holdfast.memstore.store_folders import is_source

log = logging.getLogger("holdfast.agent.workers.oom")

STRANGERS: Final = 64
"""Connections that have not proved yet who they are: with one more the oldest is hung up on."""
MOST: Final = 512
"""Connections at once of those that have."""
HELLO_SECONDS: Final = 2.0
"""Seconds for that proof, and then to wait until there are fewer than `MOST`."""
SECONDS: Final = 60.0
"""Seconds without a byte in the middle of something after which a connection is given up."""


class RequestHandler:
    """Answers on the node's port."""

    def __init__(self, replica_store: ReplicaStore, token: str, tell: Callable[..., None], sealed: Callable[[], None]) -> None:
        """Serve what is on *shelf*; *tell* takes events for the flow, *sealed* is called when a replica has become whole."""
        self._replica_store, self._token, self._tell, self._sealed = replica_store, token, tell, sealed
        self._members = threading.Semaphore(MOST)
        self._strangers: dict[socket.socket, None] = {}
        """Who has not proved yet to know the token, the oldest first."""
        self._knocking = threading.Lock()
        self._full: set[tuple[str, int]] = set()
        """Whose replicas were last refused for want of memory: told once."""

    def run(self, listening: socket.socket) -> None:
        """Serve for ever. Everybody is accepted at once: strangers that say nothing keep nobody else waiting."""
        while True:
            try:
                sock, address = listening.accept()
                self._make_room(sock)
                threading.Thread(target=self._meet, args=(sock, address), name=f"{address[0]}:{address[1]}", daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, is left: strangers are let go in a moment
                note(log, "memory.accept-failed", why=error)
                threading.Event().wait(0.1)

    def _make_room(self, sock: socket.socket) -> None:
        """Note a stranger; hang up on the oldest one when there are too many: its thread then ends."""
        with self._knocking:
            self._strangers[sock] = None
            if len(self._strangers) > STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _meet(self, sock: socket.socket, address: Any) -> None:  # noqa: ANN401 (what accept gives)
        try:
            with MemstoreConnection(sock, seconds=HELLO_SECONDS) as line:
                line.until = time.monotonic() + HELLO_SECONDS
                try:
                    line.authenticate_client(self._token)
                finally:
                    with self._knocking:
                        self._strangers.pop(sock, None)
                line.until = None
                if not self._members.acquire(timeout=HELLO_SECONDS):
                    raise ConnectionRefusedError(f"{MOST} others of the job are served already")
                try:
                    self._serve(line)
                finally:
                    self._members.release()
        except PermissionError as error:
            note(log, "memory.stranger", peer=address, why=error)
        except (OSError, UnusableSnapshot, ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
            note(log, "memory.line-ended", peer=address, why=error)

    def _serve(self, line: MemstoreConnection) -> None:
        while True:
            line.socket.settimeout(None)  # the next snapshot may be an hour away; a peer that is gone is noticed by the kernel
            order = line.receive()
            line.socket.settimeout(SECONDS)
            verb = order.get("do")
            try:
                if verb == "labels":
                    line.send({"ok": True, "labels": {name: asdict(label) for name, label in self._replica_store.labels().items()}})
                elif verb == "get":
                    self._give(line, order)
                elif verb == "puts":
                    self._take_all(line, str(order["source"]), int(order["rank"]))
                else:
                    line.send({"ok": False, "why": f"nothing is called '{str(verb)[:40]}' here: use the same Holdfast on all nodes"})
            except Rejected as error:
                line.send({"ok": False, "why": error.why})

    # -- giving -------------------------------------------------------------------------------------------------------

    def _give(self, line: MemstoreConnection, order: dict[str, Any]) -> None:
        """Send a whole file. Somebody waits for it: this is not the moment to be the last in the queue for a processor."""
        path = self._replica_store.path_of(str(order["name"]))
        try:
            snapshot = Snapshot(path)
        except (OSError, UnusableSnapshot) as error:
            raise Rejected(f"{path.name} cannot be given: {error}") from error
        with snapshot, open(snapshot.fileno(), "rb", buffering=0, closefd=False) as file:
            label = snapshot.label
            if (label.step, label.lineage, label.digest) != (order["step"], order["lineage"], order["digest"]):
                raise Rejected(f"{path.name} holds step {label.step} of lineage {label.lineage} by now")
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # of this thread
            line.send({"ok": True, "size": label.file_size})
            if line.socket.sendfile(file, 0, label.file_size) != label.file_size:
                raise ConnectionAbortedError(f"{path.name} was cut off")

    # -- taking -------------------------------------------------------------------------------------------------------

    def _take_all(self, line: MemstoreConnection, source: str, rank: int) -> None:
        """Take replicas of one rank of one node, one after the other, until the line ends."""
        if not is_source(source) or rank < 0:
            raise Rejected("no node has such a name")
        line.send({"ok": True})
        self._replica_store.enter(source, rank)
        try:
            while True:
                line.socket.settimeout(None)
                order = line.receive()
                line.socket.settimeout(SECONDS)
                self._take(line, source, rank, shared_memory.label_of(order["label"]))
        finally:
            self._replica_store.leave(source, rank)

    def _take(self, line: MemstoreConnection, source: str, rank: int, label: Label) -> None:
        try:
            slot = self._open(source, rank, label)
        except Rejected as error:
            line.send({"ok": False, "why": error.why, "have": error.have, "again": not (error.have or error.full)})
            return
        sealed = False
        try:
            line.send({"ok": True})
            sealed = self._fill(line, slot, label)
        except Rejected as error:
            self._note_full(source, rank, error.why)
            line.send({"ok": False, "why": error.why})
        finally:
            self._replica_store.close(slot, sealed=sealed)
        if sealed:
            self._sealed()

    def _open(self, source: str, rank: int, label: Label) -> Slot:
        """Return a slot for a replica; tell once when there is no memory for it."""
        try:
            slot = self._replica_store.open(source, rank, label)
        except Rejected as error:
            if error.full:
                self._note_full(source, rank, error.why)
            raise
        except BlockingIOError as error:
            raise Rejected("what would be replaced is being read") from error
        except OSError as error:
            self._note_full(source, rank, f"no memory can be had for a replica of rank {rank}: {error}")
            raise Rejected(str(error), full=True) from error
        self._full.discard((source, rank))
        return slot

    def _note_full(self, source: str, rank: int, why: str) -> None:
        if (source, rank) not in self._full:
            self._full.add((source, rank))
            self._tell("memstore.full", why=why)

    def _fill(self, line: MemstoreConnection, slot: Slot, label: Label) -> bool:
        """Take the bytes of a replica as they come; tell whether it has become whole."""
        filled = 0
        while True:
            line.socket.settimeout(None)  # it may be a draft that its worker has not gone on with
            kind, length = FRAME.unpack(line.receive_exactly(FRAME.size))
            line.socket.settimeout(SECONDS)
            if kind == DATA and length <= min(LONGEST_FRAME, label.size - filled):
                with slot.data[filled : filled + length] as view:
                    line.receive_into(view)
                filled += length
                slot.progress(filled)
            elif kind == TAIL and length <= min(LONGEST_TAIL, label.tail) and filled == label.size:
                return self._finish(line, slot, label, length)
            elif kind == ABANDON:
                return False
            else:
                told = f"{filled} of {label.size} bytes of data being here, and {label.tail} of the tail being announced"
                raise ConnectionAbortedError(f"a frame {kind!r} of {length} bytes cannot be, {told}")

    def _finish(self, line: MemstoreConnection, slot: Slot, label: Label, length: int) -> bool:
        whole, tail = shared_memory.label_of(line.receive()), line.receive_exactly(length)
        if replace(whole, tail=0, digest="") != replace(label, tail=0, digest=""):
            raise ConnectionAbortedError("the label that came with the tail is another snapshot's")
        try:
            self._replica_store.check(slot, whole)
            slot.seal_copy(whole, tail)
        except (UnusableSnapshot, OSError) as error:
            line.send({"ok": False, "why": str(error)})
            return False
        line.send({"ok": True})
        return True
