"""Answer the connections of other nodes and ranks: labels, complete snapshots, and replicas to accept."""

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

log = logging.getLogger("holdfast.agent.memstore")

MAX_UNAUTHENTICATED: Final = 64
"""Connections that have not authenticated yet: with one more the oldest is closed."""
MAX_CONNECTIONS: Final = 512
"""Connections that have."""
HELLO_SECONDS: Final = 2.0
"""Seconds to authenticate, and then to wait until there are fewer than `MAX_CONNECTIONS`."""
IDLE_SECONDS: Final = 60.0
"""Seconds without a byte in the middle of a transfer after which a connection is closed."""


class RequestHandler:
    """Serves the node's port."""

    def __init__(self, replica_store: ReplicaStore, token: str, send: Callable[..., None], sealed: Callable[[], None]) -> None:
        """Serve what is in *replica_store*; *send* takes events for the controller, *sealed* is called when a replica is complete."""
        self._replica_store, self._token, self._send, self._sealed = replica_store, token, send, sealed
        self._members = threading.Semaphore(MAX_CONNECTIONS)
        self._unauthenticated: dict[socket.socket, None] = {}
        """Connections that have not sent the token yet, the oldest first."""
        self._lock = threading.Lock()
        self._full: set[tuple[str, int]] = set()
        """Sources and ranks whose replicas were last rejected for want of memory: reported once."""

    def run(self, listening: socket.socket) -> None:
        """Serve for ever. Every connection is accepted at once: one that sends nothing delays no other."""
        while True:
            try:
                sock, address = listening.accept()
                with self._lock:
                    self._unauthenticated[sock] = None
                    if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                        oldest = next(iter(self._unauthenticated))
                        del self._unauthenticated[oldest]
                        with suppress(OSError):
                            oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
                threading.Thread(target=self._authenticate, args=(sock, address), name=f"{address[0]}:{address[1]}", daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, is left: unauthenticated ones end in a moment
                note(log, "memstore.accept-failed", why=error)
                threading.Event().wait(0.1)

    def _authenticate(self, sock: socket.socket, address: Any) -> None:  # noqa: ANN401 (what accept gives)
        try:
            with MemstoreConnection(sock, seconds=HELLO_SECONDS) as connection:
                connection.until = time.monotonic() + HELLO_SECONDS
                try:
                    connection.authenticate_client(self._token)
                finally:
                    with self._lock:
                        self._unauthenticated.pop(sock, None)
                connection.until = None
                if not self._members.acquire(timeout=HELLO_SECONDS):
                    raise ConnectionRefusedError(f"{MAX_CONNECTIONS} others of the job are served already")
                try:
                    self._serve(connection)
                finally:
                    self._members.release()
        except PermissionError as error:
            note(log, "memstore.authentication-failed", peer=address, why=error)
        except (OSError, UnusableSnapshot, ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
            note(log, "memstore.connection-ended", peer=address, why=error)

    def _serve(self, connection: MemstoreConnection) -> None:
        while True:
            connection.socket.settimeout(None)  # the next snapshot may be an hour away; the kernel notices when the peer has gone
            request = connection.receive()
            connection.socket.settimeout(IDLE_SECONDS)
            name = request.get("do")
            try:
                if name == "labels":
                    labels = {name: asdict(label) for name, label in self._replica_store.labels().items()}
                    connection.send({"ok": True, "labels": labels})
                elif name == "get":
                    self._send_snapshot(connection, request)
                elif name == "puts":
                    self._receive_replicas(connection, str(request["source"]), int(request["rank"]))
                else:
                    why = f"unknown request '{str(name)[:40]}': use the same Holdfast on all nodes"
                    connection.send({"ok": False, "why": why})
            except Rejected as error:
                connection.send({"ok": False, "why": error.why})

    def _send_snapshot(self, connection: MemstoreConnection, request: dict[str, Any]) -> None:
        """Send a complete file, with normal priority: a rank waits for it."""
        path = self._replica_store.path_of(str(request["name"]))
        try:
            snapshot = Snapshot(path)
        except (OSError, UnusableSnapshot) as error:
            raise Rejected(f"{path.name} cannot be sent: {error}") from error
        with snapshot, open(snapshot.fileno(), "rb", buffering=0, closefd=False) as file:
            label = snapshot.label
            if (label.step, label.lineage, label.digest) != (request["step"], request["lineage"], request["digest"]):
                raise Rejected(f"{path.name} holds step {label.step} of lineage {label.lineage} by now")
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # of this thread
            connection.send({"ok": True, "size": label.file_size})
            if connection.socket.sendfile(file, 0, label.file_size) != label.file_size:
                raise ConnectionAbortedError(f"{path.name} was cut off")
            # What is on its way are the pages of the file: it is kept from its writer until the rank has it all, and ends or asks for more.
            connection.socket.recv(1, socket.MSG_PEEK)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _receive_replicas(self, connection: MemstoreConnection, source: str, rank: int) -> None:
        """Receive replicas of one rank of one node, one after the other, until the connection ends."""
        if not is_source(source) or rank < 0:
            raise Rejected("no node has such a name")
        connection.send({"ok": True})
        self._replica_store.enter(source, rank)
        try:
            while True:
                connection.socket.settimeout(None)
                request = connection.receive()
                connection.socket.settimeout(IDLE_SECONDS)
                self._receive_replica(connection, source, rank, shared_memory.label_of(request["label"]))
        finally:
            self._replica_store.leave(source, rank)

    def _receive_replica(self, connection: MemstoreConnection, source: str, rank: int, label: Label) -> None:
        try:
            slot = self._open(source, rank, label)
        except Rejected as error:
            connection.send({"ok": False, "why": error.why, "have": error.have, "again": not (error.have or error.full)})
            return
        sealed = False
        try:
            connection.send({"ok": True})
            sealed = self._fill(connection, slot, label)
        except Rejected as error:
            self._report_full(source, rank, error.why)
            connection.send({"ok": False, "why": error.why})
        finally:
            self._replica_store.close(slot, sealed=sealed)
        if sealed:
            self._sealed()

    def _open(self, source: str, rank: int, label: Label) -> Slot:
        """Return a slot for a replica; report once when there is no memory for it."""
        try:
            slot = self._replica_store.open(source, rank, label)
        except Rejected as error:
            if error.full:
                self._report_full(source, rank, error.why)
            raise
        except BlockingIOError as error:
            raise Rejected("what would be replaced is being read") from error
        except OSError as error:
            self._report_full(source, rank, f"no memory for a replica of rank {rank}: {error}")
            raise Rejected(str(error), full=True) from error
        self._full.discard((source, rank))
        return slot

    def _report_full(self, source: str, rank: int, why: str) -> None:
        if (source, rank) not in self._full:
            self._full.add((source, rank))
            self._send("memstore.full", why=why)

    def _fill(self, connection: MemstoreConnection, slot: Slot, label: Label) -> bool:
        """Receive the bytes of a replica as they come; return whether it is complete."""
        filled = 0
        while True:
            connection.socket.settimeout(None)  # its worker may pause in the middle of a draft
            kind, length = FRAME.unpack(connection.receive_exactly(FRAME.size))
            connection.socket.settimeout(IDLE_SECONDS)
            if kind == DATA and length <= min(LONGEST_FRAME, label.size - filled):
                with slot.data[filled : filled + length] as view:
                    connection.receive_into(view)
                filled += length
                slot.progress(filled)
            elif kind == TAIL and length <= min(LONGEST_TAIL, label.tail) and filled == label.size:
                return self._finish(connection, slot, label, length)
            elif kind == ABANDON:
                return False
            else:
                state = f"{filled} of {label.size} bytes of data and an announced tail of {label.tail}"
                raise ConnectionAbortedError(f"unexpected frame {kind!r} of {length} bytes after {state}")

    def _finish(self, connection: MemstoreConnection, slot: Slot, label: Label, length: int) -> bool:
        complete, tail = shared_memory.label_of(connection.receive()), connection.receive_exactly(length)
        if replace(complete, tail=0, digest="") != replace(label, tail=0, digest=""):
            raise ConnectionAbortedError("the label that came with the tail is another snapshot's")
        try:
            self._replica_store.check(slot, complete)
            slot.seal_copy(complete, tail)
        except (UnusableSnapshot, OSError) as error:
            connection.send({"ok": False, "why": str(error)})
            return False
        with suppress(OSError):  # a source that has died just now is what the replica is kept for
            connection.send({"ok": True})
        return True
