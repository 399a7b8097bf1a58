"""The agent's end of its node's checkpoint writer: the process that writes snapshots to disk, begun when the first one is wanted there."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.agent import schema
from holdfast.log import note
from holdfast.memstore import write_requests
from holdfast.memstore.write_requests import WriteRequest
from holdfast.process import kill
from holdfast.protocol import Message
from holdfast.source_tree import ROOT

if TYPE_CHECKING:
    from holdfast.agent.connection import ClientConnection
    from holdfast.agent.node.identity import Identity
    from holdfast.agent.workers.group import WorkerGroup

log = logging.getLogger("holdfast.agent")

PROGRAM: Final = ROOT / "holdfast" / "runtime" / "checkpoint_writer" / "main.py"
MAX_WRITERS: Final = 10
"""Checkpoint writers that one agent starts again; after that this node writes no more checkpoints out of its memory."""
PAUSE: Final = 0.5
"""Seconds before a checkpoint writer is started again."""
LARGEST_STEP: Final = 2**53


class CheckpointWriterClient:
    """Keeps a checkpoint writer at work as long as there is something to write."""

    def __init__(
        self, me: Identity, workers: WorkerGroup, emit: Callable[..., None], send: Callable[[ClientConnection, Message], None]
    ) -> None:
        self._me, self._workers, self._emit, self._send = me, workers, emit, send
        self._pid: int | None = None
        self._starting = False
        self._python = ""
        self._peer: ClientConnection | None = None
        self._lost = 0
        self._ending = False
        self._last: int | None = None
        """The generation whose last snapshots are to be written, whatever became of it."""
        self._again_at: float | None = None
        self.memstore: Path | None = None
        """Where requests lie."""

    def want(self, python: str) -> None:
        """Have what is requested written, by a process forked from the starter, or one of the interpreter *python*."""
        self._python = self._python or python
        if self._peer is not None:
            self._send(self._peer, {"do": "flush"})
        elif self._pid is None and not self._starting and self._again_at is None:
            self._start()

    def write_final(self, generation: int, requests: list[WriteRequest]) -> None:
        """Carry *requests* out, the last of *generation*, be it given up or not; raise ``OSError`` when they cannot be written down."""
        if self.memstore is None:
            raise OSError(errno.ENOENT, "this node keeps nothing in memory")
        self._last = generation
        for request in requests:
            request.write(self.memstore)
        self.want(sys.executable)

    def _start(self) -> None:
        if self.memstore is None or self._workers.plan is None or self._ending or self._lost >= MAX_WRITERS:
            return
        self._starting = True
        places = {
            "HOLDFAST_SOCKET": str(self._me.socket),
            "CUDA_VISIBLE_DEVICES": "",  # it reads host memory, and must take none of a GPU's
            "RANK": "-1",
        }
        self._workers.launch_helper(
            (str(PROGRAM),), self._python, places, self._me.directory / "checkpoint-writer.log", self._born, self._failed
        )

    def _born(self, pid: int) -> None:
        self._pid, self._starting = pid, False

    def _failed(self, why: str) -> None:
        self._starting = False
        note(log, "checkpoint-writer.failed", why=why)
        self._count()

    def _count(self) -> None:
        self._lost += 1
        if self._lost < MAX_WRITERS:
            self._again_at = time.monotonic() + PAUSE * self._lost
            return
        why = f"the process that writes checkpoints has ended {self._lost} times; see {self._me.directory / 'checkpoint-writer.log'}"
        self._emit(
            "storage_error", rank=0, generation=self._workers.generation, kind="checkpoint-write-failed", step=None, path="", why=why
        )
        if self.memstore is not None:
            write_requests.close(self.memstore)

    def buried(self, pid: int) -> None:
        """Learn that a child of the agent has ended."""
        if pid == self._pid:
            self._pid = self._peer = None
            if not self._ending:
                note(log, "checkpoint-writer.gone", lost=self._lost + 1)
                self._count()

    def due(self) -> float | None:
        """Return when another checkpoint writer is to be started (monotonic)."""
        return self._again_at

    def tick(self, now: float) -> None:
        """Start another checkpoint writer when it is time, if there is something to write."""
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            if self.memstore is not None and write_requests.pending(self.memstore):
                self._start()

    def end(self) -> None:
        """End the checkpoint writer; what it was writing is cleared away by the next run."""
        self._ending = True
        self._again_at = None
        if self._pid is not None:
            kill(self._pid, signal.SIGKILL)

    # -- hearing --------------------------------------------------------------------------------------------------------

    def speaks(self, peer: ClientConnection) -> bool:
        """Tell whether *peer* is the checkpoint writer."""
        if self._starting:
            self._workers.hear_spawner()  # it may say who that is
        return self._pid is not None and peer.pid == self._pid

    def take(self, peer: ClientConnection, message: Message) -> Message | None:
        """Take in what the checkpoint writer says, and return the answer if it asks for one."""
        word = message.get("t")
        try:
            if word == "hello":
                self._peer = peer
            elif word == "commit?":
                return {"re": message.get("id"), **self._leave(message)}
            elif word == "saved":
                self._on_saved(message)
            elif word == "storage_error":
                self._on_trouble(message)
        except schema.BadField as error:
            note(log, "checkpoint-writer.unclear", word=word, why=error)
        return None

    def _leave(self, message: Message) -> Message:
        generation = schema.whole(message, "generation")
        over = generation != self._workers.generation or (generation == self._workers.abandoned and generation != self._last)
        return {"ok": not over, "why": f"generation {generation} is over" if over else ""}

    def _on_saved(self, message: Message) -> None:
        facts: dict[str, Any] = {name: schema.seconds(message, name) for name in ("seconds", "beside")}
        facts |= {"step": schema.whole(message, "step", most=LARGEST_STEP), "size": schema.whole(message, "size")}
        self._emit("saved", rank=0, generation=schema.whole(message, "generation"), path=schema.text(message, "path"), **facts)

    def _on_trouble(self, message: Message) -> None:
        facts = {name: schema.text(message, name) for name in ("kind", "why", "path")}
        rank, step = schema.whole(message, "rank"), schema.maybe(schema.whole, message, "step")
        self._emit("storage_error", rank=rank, generation=self._workers.generation, step=step, **facts)
