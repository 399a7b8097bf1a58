"""Nodes that are folders of this machine, each with an agent process of its own: the embedded default, and the test fleet.

A file named ``off`` in a node's folder is its power switch: while it lies there the node does not answer and starts no agent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from holdfast.cluster.interface import NodeView
from holdfast.errors import NodeLost
from holdfast.places import cluster_directory
from holdfast.process import is_alive, sweep
from holdfast.wire import LineBuffer, connect

if TYPE_CHECKING:
    from holdfast.spec import LocalCluster

START_SECONDS: Final = 20.0
"""How long an agent may take to listen: some 0.2 s on an idle machine, more on one that is busy starting others."""


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """The nodes of a local cluster."""

    name: str
    root: Path
    count: int

    @classmethod
    def of(cls, cluster: LocalCluster) -> Self:
        """Return the nodes that *cluster* describes."""
        root = Path(cluster.directory) if cluster.directory else cluster_directory(cluster.name)
        return cls(cluster.name, root.expanduser().absolute(), cluster.nodes)

    def names(self) -> list[str]:
        """Return ``node-0``, ``node-1`` and so on."""
        return [f"node-{number}" for number in range(self.count)]

    def folder(self, node: str) -> Path:
        """Return the folder that is *node*."""
        return self.root / node

    def address(self, node: str) -> str:  # noqa: ARG002 (all nodes are this machine)
        """Return the loopback address."""
        return "127.0.0.1"

    def start_agent(self, node: str) -> None:
        """Start an agent that outlives this process, and wait until it listens."""
        if not self.answers(node):
            raise NodeLost(node, "it is switched off")
        folder = self.folder(node)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            told = self._spawn(node, folder)
        except OSError as error:
            raise NodeLost(node, f"no agent could be started in {folder}: {error}") from error
        if not told.get("ready"):
            raise NodeLost(node, f"its agent did not come up: {told.get('why', 'no word from it')}; see {folder / 'agent.log'}")

    def _spawn(self, node: str, folder: Path) -> dict[str, object]:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")))),
            "HOLDFAST_NODE_MARK": str(folder),
        }
        with ours, (folder / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "holdfast.agent", "--detach", "--directory", str(folder)]
            command += ["--node", node, "--cluster", self.name, "--ready-fd", str(theirs.fileno())]
            with theirs:
                starter = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], cwd="/"
                )
            starter.wait()
            ours.settimeout(START_SECONDS)
            lines = LineBuffer()
            while data := ours.recv(4096):
                for message in lines.feed(data):
                    return message
        return {}

    def connect(self, node: str) -> socket.socket:
        """Connect to the agent's socket."""
        if not self.answers(node):
            raise ConnectionRefusedError(f"{node} is switched off")
        return connect(self.folder(node) / "agent.sock", seconds=5.0)

    def answers(self, node: str) -> bool:
        """Tell whether the node is switched on."""
        return not (self.folder(node) / "off").exists()

    def fence(self, node: str) -> list[int]:
        """Kill everything that carries the node's mark, its agent included."""
        return sweep("HOLDFAST_NODE_MARK", str(self.folder(node)))

    def power_off(self, node: str) -> None:
        """Take the node away at once, as a power cut would: for chaos runs and the demo."""
        self.folder(node).mkdir(parents=True, exist_ok=True)
        (self.folder(node) / "off").touch()
        self.fence(node)

    def power_on(self, node: str) -> None:
        """Let the node answer again. It comes back empty: no agent, no worker."""
        (self.folder(node) / "off").unlink(missing_ok=True)

    def survey(self) -> list[NodeView]:
        """Look at every node's folder and at the process its agent left its name of."""
        return [self._view(node) for node in self.names()]

    def _view(self, node: str) -> NodeView:
        if not self.answers(node):
            return NodeView(name=node, standing="off")
        try:
            facts = json.loads((self.folder(node) / "agent.json").read_text())
            alive = is_alive(int(facts["pid"]), facts["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return NodeView(name=node, standing="idle")
        if not alive:
            return NodeView(name=node, standing="idle")
        return NodeView(name=node, standing="up", job=facts.get("job"), agent="up", pid=facts["pid"])
