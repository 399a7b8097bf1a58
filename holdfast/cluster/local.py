"""Run nodes as folders of this machine, each with its own agent process: the embedded default, and the test cluster.

A file named ``off`` in a node's folder is its power switch: while it exists the node is unreachable and starts no agent.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from holdfast.agent import errors
from holdfast.agent.node.directory import AgentDirectory, AgentNotStarted
from holdfast.agent.node.epochs import FencingToken
from holdfast.agent.workers import log_files
from holdfast.cluster.interface import Confirm, Logs, NodeView, Processors
from holdfast.errors import CommandRejected, NodeLost, NodeStateUnknown, Superseded
from holdfast.host import gpu_assignment
from holdfast.host.process import kill, mark_of
from holdfast.memstore import store_folders
from holdfast.paths import cluster_directory, job_directory
from holdfast.protocol import Message, connect
from holdfast.source_tree import source_tree_env

if TYPE_CHECKING:
    from holdfast.spec import LocalCluster

T = TypeVar("T")


def logs_here(job: str) -> Logs:
    """Return the logs in the folder of *job* (its name), which all nodes share that see this machine's files."""
    folder = job_directory(job) / "logs"
    return Logs(place=log_files.place_of(folder), sizes=log_files.listed(folder))


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """The nodes of a local cluster."""

    name: str
    root: Path
    count: int
    domains: Mapping[str, str] = field(default_factory=dict)
    """Node to failure domain; a node without one is its own."""

    @classmethod
    def of(cls, cluster: LocalCluster) -> Self:
        """Return the nodes that *cluster* describes."""
        root = Path(cluster.directory) if cluster.directory else cluster_directory(cluster.name)
        return cls(cluster.name, root.expanduser().absolute(), cluster.nodes, cluster.failure_domains)

    @property
    def remote(self) -> bool:
        """Return False: nodes are this machine."""
        return False

    def names(self) -> list[str]:
        """Return ``node-0``, ``node-1`` and so on."""
        return [f"node-{number}" for number in range(self.count)]

    def folder(self, node: str) -> Path:
        """Return the folder that is *node*."""
        return self.root / node

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*; by default the node itself."""
        return self.domains.get(node, node)

    def processors(self, node: str, visible: str | None) -> Processors:
        """Return the node's part of this machine's GPUs and CPUs."""
        gpus = self._gpus(node) or () if visible is None else gpu_assignment.visible_gpus({gpu_assignment.VISIBLE: visible})
        return Processors(gpus=len(gpus), cpus=max(1, len(os.sched_getaffinity(0)) // self.count))

    def node_settings(self, node: str, job: str) -> dict[str, Any]:  # noqa: ARG002 (all nodes are this machine)
        """Return nothing: all nodes are alike."""
        return {}

    def logs(self, node: str, job: str) -> Logs:  # noqa: ARG002 (the nodes of this machine share a job's folder)
        """Return the logs of the ranks of *job*, wherever they ran."""
        return logs_here(job)

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of the agent's: from byte *at*, or the last ones."""
        return log_files.read_part(self.folder(node) if name == log_files.AGENT else job_directory(job) / "logs", name, at, most)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    # -- the network --------------------------------------------------------------------------------------------------

    def address(self, node: str) -> str:  # noqa: ARG002 (all nodes are this machine)
        """Return the loopback address."""
        return "127.0.0.1"

    def interface(self, node: str) -> str | None:  # noqa: ARG002 (as above)
        """Return the loopback interface."""
        return "lo"

    def bandwidth(self, source: str, to: str, seconds: float) -> float:  # noqa: ARG002 (there is no network in between)
        """Raise `NodeStateUnknown`: between folders of one machine there is nothing to measure."""
        raise NodeStateUnknown(source, "its nodes are folders of one machine")

    def any_other_reachable(self, but: Collection[str]) -> bool:  # noqa: ARG002 (as the interface has it)
        """Return True: no network lies between folders of one machine."""
        return True

    def check_connection(self, source: str, to: str, seconds: float) -> str:  # noqa: ARG002 (as above)
        """Return nothing: no network lies between folders of one machine."""
        return ""

    # -- agents -------------------------------------------------------------------------------------------------------

    def place(self, node: str) -> AgentDirectory:
        """Return the agent directory of *node*."""
        gpus = self._gpus(node)
        visible = {} if gpus is None else {gpu_assignment.VISIBLE: ",".join(gpus)}
        return AgentDirectory(self.folder(node), node, self.name, {**source_tree_env(os.environ), **visible})

    def _gpus(self, node: str) -> tuple[str, ...] | None:
        """Return the GPUs assigned to *node*; None where this machine has none."""
        gpus = gpu_assignment.visible_gpus()
        return gpu_assignment.split(gpus, self.count)[self.names().index(node)] if gpus else None

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Start an agent that outlives this process, and wait until it listens; raise `NodeLost` when that fails."""
        if not self.is_reachable(node):
            raise NodeLost(node, "it is switched off")
        own = set(self._gpus(node) or ())
        for other in sorted(self.root.glob("node-*")) if own else ():  # started when the cluster had another number of nodes
            seen = AgentDirectory(other, other.name, self.name).running_agent()
            if other.name != node and seen is not None and (taken := own.intersection(gpu_assignment.gpus_of(seen.pid))):
                gpus = f"GPU {', '.join(sorted(taken))} is held by {other.name}"
                raise NodeLost(node, f"{gpus}, started when the cluster had another number of nodes")
        try:
            _with_token(node, "start", self.place(node).start_agent, confirm)
        except AgentNotStarted as error:
            raise NodeLost(node, str(error)) from error
        if not self.is_reachable(node):  # switched off meanwhile
            self.fence(node)
            raise NodeLost(node, "it is switched off")

    def connect(self, node: str) -> socket.socket:
        """Connect to the agent's socket."""
        if not self.is_reachable(node):
            raise ConnectionRefusedError(f"{node} is switched off")
        return connect(self.folder(node) / "agent.sock", seconds=5.0)

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """Kill every process with the node's mark, its agent included; with *job*, unless an agent of another job serves there."""
        return _with_token(node, "fence", lambda token: self.place(node).fence(job, token), confirm)

    def recent_events(self, node: str, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* in the event logs of agents on *node*."""
        return self.place(node).replayed_events(job)

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Remove the job's memory store, which an agent leaves behind when it is killed."""
        _with_token(node, "wipe", lambda token: self.place(node).wipe_memory(job, token), confirm)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def is_reachable(self, node: str) -> bool:
        """Return whether the node is switched on, as far as can be seen."""
        try:
            return not (self.folder(node) / "off").exists()
        except OSError:  # the folder is not readable: whoever uses the node gets that error
            return True

    def power_off(self, node: str) -> None:
        """Take the node away at once, as a power cut would: for chaos runs and the demo."""
        agent = self._view(node).pid
        self.folder(node).mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder(node) / "off").touch()
        if agent is not None:
            kill(agent, signal.SIGKILL)  # first, so that it cannot report the end of its workers
        self.clear(node)

    def power_on(self, node: str) -> None:
        """Make the node reachable again. It comes back empty: no agent, no worker."""
        (self.folder(node) / "off").unlink(missing_ok=True)

    def clear(self, node: str) -> None:
        """End every process of the node and remove all that it keeps in memory, of every job."""
        self.fence(node)
        for memory in store_folders.memstores_of(mark_of(self.folder(node))):
            store_folders.wipe(memory)

    def survey(self, seconds: float | None = None) -> list[NodeView]:  # noqa: ARG002 (as the interface has it)
        """Look at every node's folder and at the agent process that it names."""
        return [self._view(node) for node in self.names()]

    def _view(self, node: str) -> NodeView:
        if not self.is_reachable(node):
            return NodeView(name=node, status="off")
        seen = self.place(node).running_agent()
        if seen is None:
            return NodeView(name=node, status="idle")
        return NodeView(name=node, status="up", job=seen.job, agent="up", pid=seen.pid)


def _with_token(node: str, command: str, act: Callable[[FencingToken | None], T], confirm: Confirm | None) -> T:
    """Call *act* with the token of the controller; raise a `NodeError` where the node refuses it."""
    try:
        return act(confirm() if confirm is not None else None)
    except errors.StaleEpoch as error:
        raise Superseded(node, str(error), error.epoch) from error
    except errors.Refused as error:
        raise CommandRejected(node, str(error), command) from error
