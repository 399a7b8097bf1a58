"""Simulated nodes as a flow sees them: the same interface as that of any cluster, over the one socket of the process that plays them."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.simulated.host import SOCKET, names
from holdfast.cluster import NodeView
from holdfast.cluster.interface import Confirm
from holdfast.errors import NodeLost
from holdfast.protocol import LineBuffer, Message, connect, encode

SECONDS = 30.0
"""How long the process that plays all nodes may take to answer."""


@dataclass(frozen=True, slots=True)
class SimulatedNodes:
    """The nodes that one process plays."""

    name: str
    root: Path
    count: int
    _names: list[str] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        self._names.extend(names(self.count))

    def names(self) -> list[str]:
        """Return the names of all nodes."""
        return self._names

    def folder(self, node: str) -> Path:
        """Return a folder that could be the node's: a simulated agent has no files."""
        return self.root / node

    def address(self, node: str) -> str:  # noqa: ARG002 (all nodes are this machine)
        """Return the loopback address."""
        return "127.0.0.1"

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*: by itself it is one."""
        return node

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:  # noqa: ARG002 (there is one controller)
        """Start an agent."""
        if not self.ask(do="start", of=node)["ok"]:
            raise NodeLost(node, "it is switched off")

    def connect(self, node: str) -> socket.socket:
        """Connect to the agent of *node*."""
        sock = connect(self.root / SOCKET, seconds=SECONDS)
        try:
            sock.sendall(encode({"node": node}))
            served = sock.recv(4096)
        except BaseException:
            sock.close()
            raise
        if not served:
            sock.close()
            raise ConnectionRefusedError(f"no agent serves {node}")
        return sock

    @property
    def remote(self) -> bool:
        """Say that nodes are other machines: what a flow does about those is to be measured too."""
        return True

    def node_settings(self, node: str, job: str) -> dict[str, Any]:  # noqa: ARG002 (all nodes are alike)
        """Return nothing: all nodes are alike."""
        return {}

    def interface(self, node: str) -> str | None:  # noqa: ARG002 (all nodes are alike)
        """Return nothing: there is no training traffic."""
        return None

    def recent_events(self, node: str, job: str) -> list[Message]:  # noqa: ARG002 (no journal is kept)
        """Return nothing."""
        return []

    def any_other_reachable(self, but: Collection[str]) -> bool:  # noqa: ARG002 (as above)
        """Say that there is a way."""
        return True

    def check_connection(self, source: str, to: str, seconds: float) -> str:  # noqa: ARG002 (nobody is cut off)
        """Say that they do."""
        return ""

    def bandwidth(self, source: str, to: str, seconds: float) -> float:  # noqa: ARG002 (nothing is sent)
        """Refuse: there is no network between simulated nodes."""
        raise NodeLost(source, "simulated nodes send each other nothing")

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def is_reachable(self, node: str) -> bool:
        """Return whether the node has power."""
        return bool(self.ask(do="answers", of=node)["answers"])

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:  # noqa: ARG002 (as above)
        """End the agent of *node*, unless it is another job's."""
        self.ask(do="fence", of=node, job=job)
        return []

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Do nothing: simulated nodes keep nothing in memory."""

    def survey(self, seconds: float | None = None) -> list[NodeView]:  # noqa: ARG002 (as the interface has it)
        """Look at every node."""
        nodes = self.ask(do="survey")["nodes"]
        return [
            NodeView(name=node, status=status, job=job, agent="up" if status == "up" else "down") for node, (status, job) in nodes.items()
        ]

    def lose(self, nodes: list[str]) -> float:
        """Take power from *nodes*, all at once; return when (wall clock)."""
        return float(self.ask(do="lose", nodes=nodes)["at"])

    def ask(self, **order: object) -> Message:
        """Ask the process that plays the nodes."""
        with connect(self.root / SOCKET, seconds=SECONDS) as sock:
            sock.sendall(encode(order))
            lines = LineBuffer()
            while data := sock.recv(1 << 18):
                for message in lines.feed(data):
                    return message
        raise ConnectionResetError("the process that plays the nodes has ended")
