"""The agent's end of the checkpoint writer: the process that writes snapshots to disk, started when the first one is requested."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.agent.connection import ClientConnection
from holdfast.agent.schema import Count, Seconds, Step, Text
from holdfast.host.process import kill
from holdfast.log import note
from holdfast.memstore import write_requests
from holdfast.memstore.write_requests import WriteRequest
from holdfast.protocol import Message
from holdfast.source_tree import ROOT

if TYPE_CHECKING:
    from holdfast.agent.node.identity import Identity
    from holdfast.agent.workers.group import WorkerGroup

log = logging.getLogger("holdfast.agent")

PROGRAM: Final = ROOT / "holdfast" / "runtime" / "checkpoint_writer" / "main.py"
MAX_WRITERS: Final = 10
"""Checkpoint writers that one agent starts; after that this node writes no more checkpoints out of its memory."""
PAUSE: Final = 0.5
"""Seconds before a checkpoint writer is restarted."""


class CheckpointWriterClient:
    """Runs a checkpoint writer as long as there is something to write."""

    def __init__(
        self, me: Identity, workers: WorkerGroup, emit: Callable[..., None], send: Callable[[ClientConnection, Message], None]
    ) -> None:
        self._workers, self._emit, self._send = workers, emit, send
        self._socket, self._log = me.socket, me.directory / "checkpoint-writer.log"
        self._pid: int | None = None
        self._starting = False
        self._python = ""
        self._connection: ClientConnection | None = None
        self._lost = 0
        self._ending = False
        self._last: int | None = None
        """The generation whose last snapshots are written even if it was abandoned."""
        self._restart_at: float | None = None
        self.memstore: Path | None = None
        """Where requests are."""

    def request(self, python: str) -> None:
        """Have requests carried out by a process forked from the fork server, or one of the interpreter *python*."""
        self._python = self._python or python
        if self._connection is not None:
            self._send(self._connection, {"do": "flush"})
        elif self._pid is None and not self._starting and self._restart_at is None:
            self._start()

    def write_final(self, generation: int, requests: list[WriteRequest]) -> None:
        """Carry out *requests*, the last of *generation*, even if it was abandoned; raise ``OSError`` when they cannot be stored."""
        if self.memstore is None:
            raise OSError(errno.ENOENT, "this node keeps nothing in memory")
        self._last = generation
        for request in requests:
            request.write(self.memstore)
        self.request(sys.executable)

    def _start(self) -> None:
        if self.memstore is None or self._workers.plan is None or self._ending or self._lost >= MAX_WRITERS:
            return
        self._starting = True
        variables = {
            "HOLDFAST_SOCKET": str(self._socket),
            "CUDA_VISIBLE_DEVICES": "",  # it reads host memory, and must use none of a GPU's
            "RANK": "-1",
        }
        self._workers.launch_helper((str(PROGRAM),), self._python, variables, self._log, self._spawned, self._failed)

    def _spawned(self, pid: int) -> None:
        self._pid, self._starting = pid, False

    def _failed(self, why: str) -> None:
        self._starting = False
        note(log, "checkpoint-writer.failed", why=why)
        self._count_failure()

    def _count_failure(self) -> None:
        self._lost += 1
        if self._lost < MAX_WRITERS:
            self._restart_at = time.monotonic() + PAUSE * self._lost
            return
        why = f"the process that writes checkpoints has exited {self._lost} times; see {self._log}"
        self._emit(
            "storage-error", rank=0, generation=self._workers.generation, kind="checkpoint-write-failed", step=None, path="", why=why
        )
        if self.memstore is not None:
            write_requests.close(self.memstore)

    def helper_ended(self, pid: int) -> None:
        """Note that a child of the agent has ended."""
        if pid == self._pid:
            self._pid = self._connection = None
            if not self._ending:
                note(log, "checkpoint-writer.exited", exits=self._lost + 1)
                self._count_failure()

    def due(self) -> float | None:
        """Return when another checkpoint writer is to be started (monotonic)."""
        return self._restart_at

    def tick(self, now: float) -> None:
        """Start another checkpoint writer when that is due and there is something to write."""
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            if self.memstore is not None and write_requests.pending(self.memstore):
                self._start()

    def end(self) -> None:
        """End the checkpoint writer; the next run removes what it was writing."""
        self._ending = True
        self._restart_at = None
        if self._pid is not None:
            kill(self._pid, signal.SIGKILL)

    # -- messages (see `holdfast.agent.worker_messages.MESSAGES`) ---------------------------------------------------------

    def is_sender(self, peer: ClientConnection) -> bool:
        """Return whether *peer* is the checkpoint writer."""
        if self._starting:
            self._workers.receive_pids()  # its pid may have been reported by now
        return self._pid is not None and peer.pid == self._pid

    def on_hello(self, peer: ClientConnection) -> None:
        """Keep its connection, for requests."""
        self._connection = peer

    def on_commit(self, generation: Count) -> Message:
        """Answer whether a checkpoint of that generation may be published."""
        over = generation != self._workers.generation or (generation == self._workers.abandoned and generation != self._last)
        return {"ok": not over, "why": f"generation {generation} is over" if over else ""}

    def on_saved(self, generation: Count, step: Step, path: Text, seconds: Seconds, overlapped: Seconds, size: Count) -> None:  # noqa: PLR0913, PLR0917
        """Report a complete checkpoint."""
        self._emit("saved", rank=0, generation=generation, path=path, seconds=seconds, overlapped=overlapped, step=step, size=size)

    def on_storage_error(self, kind: Text, why: Text, path: Text, rank: Count, step: Count | None) -> None:
        """Report an error with a checkpoint."""
        self._emit("storage-error", rank=rank, generation=self._workers.generation, step=step, kind=kind, why=why, path=path)
