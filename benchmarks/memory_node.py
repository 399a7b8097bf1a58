"""A node's memory for benchmarks: a memory store, and the real memory server on it, without an agent."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.driver import TOKEN, clean_environment
from benchmarks.measuring import wait_for
from holdfast.memstore import shared_memory, store_folders
from holdfast.protocol import encode


class MemoryNode:
    """A memory store, and the process that serves it to others and sends its snapshots to *homes*."""

    def __init__(self, name: str, place: Path, *, ranks: int = 1) -> None:
        self.name, self.memstore = name, place / name
        self.memstore.mkdir(mode=0o700, parents=True)
        listening = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._ranks = list(range(ranks))
        self._control, theirs = socket.socketpair()
        with theirs, listening, (place / f"{name}.log").open("wb") as log:
            fds = [theirs.fileno(), listening.fileno()]
            command = [sys.executable, "-m", "holdfast.agent.memstore.server", *map(str, fds)]
            self._process = subprocess.Popen(command, pass_fds=fds, env=clean_environment(), cwd="/", stdout=log, stderr=log)
        facts = {"memstore": str(self.memstore), "limit": 2**36, "token": TOKEN, "node": store_folders.key_of(name), "address": "127.0.0.1"}
        self._control.sendall(encode(facts))

    def replicate(self, home: MemoryNode) -> None:
        """Have this node's snapshots kept on *home* too."""
        self._control.sendall(encode({"replicate": [list(home.address)], "bandwidth": None, "ranks": self._ranks}))

    def holds(self, step: int) -> None:
        """Wait until a complete snapshot of *step* lies here."""
        wait_for(
            lambda: step in {one.step for one in shared_memory.labels(self.memstore).values()}, f"step {step} on {self.name}", every=0.05
        )

    def close(self) -> None:
        """End the server; the memory goes with its folder."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
