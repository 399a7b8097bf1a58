"""Real memory servers on memory stores of their own, and snapshots to put into them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from holdfast.checkpoints.verify import fast_sum
from holdfast.memstore import notification, shared_memory, store_folders
from holdfast.memstore.shared_memory import SLICE_BYTES, Entry, Label, Slot, Snapshot, UnusableSnapshot, slices_of_part
from holdfast.protocol import LineBuffer, Message, encode
from tests.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
TOKEN: Final = "the job's secret"
SECONDS: Final = 60.0
TAIL: Final = 64 * 1024
"""Bytes that a draft announces for its tail."""


class MemoryNode:
    """A memory store and the process that serves it; the test is its agent."""

    def __init__(self, name: str, *, limit: int = 2**33, token: str = TOKEN) -> None:
        self.name, self.limit, self.token = name, limit, token
        self.memstore = store_folders.memstore_of(name, "job")
        store_folders.make(self.memstore)
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self.listening.getsockname()[:2]
        self.events: list[Message] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._lines = LineBuffer()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def begin(self) -> Self:
        """Start the server."""
        self.control, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self.listening.fileno()]
            command = [sys.executable, "-m", "holdfast.agent.memstore.server", *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd="/")
        facts = {"memstore": str(self.memstore), "limit": self.limit, "token": self.token, "address": "127.0.0.1"}
        self.control.sendall(encode({**facts, "node": store_folders.key_of(self.name)}))
        return self

    def replicate(self, *homes: MemoryNode, ranks: Iterable[int] = (3,), bandwidth: int | None = None) -> None:
        """Have snapshots copied to *homes*."""
        self.control.sendall(encode({"replicate": [list(home.address) for home in homes], "bandwidth": bandwidth, "ranks": list(ranks)}))

    def ring(self) -> None:
        """Ring the bell, as a worker does."""
        notification.notify(self.memstore, self._bell)

    def events_named(self, event: str) -> list[Message]:
        """Return the events of this name so far."""
        self.control.settimeout(0.01)
        with suppress(TimeoutError):
            self.events += self._lines.feed(self.control.recv(1 << 16))
        return [one for one in self.events if one["event"] == event]

    def kill(self) -> None:
        """Kill the server."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.control.close()

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process is not None and self.process.returncode is None:
            self.kill()
        self.listening.close()
        self._bell.close()
        store_folders.wipe(self.memstore)

    def copies(self) -> list[Label]:
        """Return the labels of the whole replicas here."""
        return [label for path, label in shared_memory.labels(self.memstore).items() if path.name.startswith("copy-")]

    def copied_steps(self, rank: int = 3) -> list[int]:
        """Return the steps of which there are whole replicas."""
        return sorted(label.step for label in self.copies() if label.rank == rank)

    def verify(self) -> None:
        """See that whatever looks whole is whole."""
        for path, label in shared_memory.labels(self.memstore).items():
            looks = f"{path.name} looks whole and cannot be opened"
            snapshot = wait_until(partial(self._opened, path, label), seconds=SECONDS, explain=looks)
            if isinstance(snapshot, Snapshot):
                with snapshot:
                    snapshot.verify(fast_sum)

    def _opened(self, path: Path, label: shared_memory.Label) -> Snapshot | bool:
        """Return the snapshot; True once the next one has begun in its place, False while whoever begins it has the file."""
        try:
            return Snapshot(path)
        except (OSError, UnusableSnapshot):
            return shared_memory.labels(self.memstore).get(path) != label

    def keeps(self, step: int, rank: int = 3, seconds: float = SECONDS) -> None:
        """Wait until there is a whole replica of *step*."""
        wait_until(lambda: step in self.copied_steps(rank), seconds=seconds, explain=lambda: f"{self.name}: {self.copies()}")
        self.verify()


class Writer:
    """Writes one rank's snapshots as a worker does, in three slots in turn."""

    def __init__(self, node: MemoryNode, rank: int = 3) -> None:
        self.node, self.rank = node, rank
        self.slots = [Slot(node.memstore / f"rank-{rank:05}.{number}.snap") for number in range(3)]
        self.slot = self.slots[0]
        self.busy_seen = 0

    def begin(self, step: int, data: bytes, *, lineage: int = 1) -> Label:
        """Begin a snapshot; of the slots that nobody reads the one with the oldest step is taken."""
        self.data, self.label = data, label_of(step, data, rank=self.rank, lineage=lineage)
        wait_until(self._begun, seconds=SECONDS, explain="no slot became free")
        self.node.ring()
        return self.label

    def _begun(self) -> bool:
        """Begin in a slot; a reader may come to it in the very moment between the look and the first byte."""
        free = [slot for slot in self.slots if not slot.busy()]
        self.busy_seen += len(self.slots) - len(free)
        ages = {path.name: label.step for path, label in shared_memory.labels(self.node.memstore).items()}
        for slot in sorted(free, key=lambda slot: ages.get(slot.path.name, -1)):
            with suppress(BlockingIOError):
                slot.begin(self.label)
                self.slot = slot
                return True
        return False

    def write(self, begin: int, end: int) -> None:
        """Let some bytes come to be there."""
        self.slot.data[begin:end] = self.data[begin:end]
        self.slot.progress(end)
        self.node.ring()

    def seal(self) -> Label:
        """Make it whole."""
        sealed = seal(self.slot, self.label, self.data)
        self.node.ring()
        return sealed

    def snapshot(self, step: int, data: bytes, *, lineage: int = 1) -> Label:
        """Write a whole one."""
        self.begin(step, data, lineage=lineage)
        self.write(0, len(data))
        return self.seal()

    def close(self) -> None:
        """Close the files."""
        for slot in self.slots:
            slot.close()


def label_of(step: int, data: bytes, *, rank: int = 3, lineage: int = 1, cut: int = SLICE_BYTES) -> Label:
    """Return the label of a draft."""
    facts: dict[str, Any] = {"world": 4, "shard": "p", "part": 0, "parts": 1, "size": len(data), "slice_bytes": cut, "tail": TAIL}
    return Label(step=step, lineage=lineage, rank=rank, time=time.time(), **facts)


def seal(slot: Slot, label: Label, data: bytes) -> Label:
    """Seal a snapshot of one tensor."""
    entries = [Entry("w", (len(data),), "uint8", len(data))]
    sums = [
        fast_sum(memoryview(data)[one.begin : one.begin + one.length]) for (one,) in slices_of_part([len(data)], 0, 1, label.slice_bytes)
    ]
    return slot.seal(label, sums, entries, {"rng": b"some state"})


def noise(size: int, seed: int = 0) -> bytes:
    """Return bytes that are not all alike."""
    return random.Random(seed).randbytes(size)
