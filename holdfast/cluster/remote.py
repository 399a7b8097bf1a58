"""Reach nodes on other machines. Every command goes through the node's proxy, whatever transport leads there."""

from __future__ import annotations

import base64
import ipaddress
import random
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.cluster.interface import Confirm, Logs, NodeView, Processors
from holdfast.cluster.proxy_client import Pipe, ProxyClient
from holdfast.errors import NodeError, NodeLost, NodeStateUnknown, ProtocolMismatch
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.spec import SshCluster

CONNECT_SECONDS: Final = 10.0
"""Time to reach a healthy node: a login and the start of an interpreter while it is busy."""
RECHECK_SECONDS: Final = 1.5
"""Time for a silent node to accept a connection, which its kernel does however busy it is."""
LATE_SECONDS: Final = 6.0
"""Time for such a node to complete the login once it has accepted the connection."""
WITNESSES: Final = 3
"""Nodes that are tried to find out whether any is reachable."""
COMMAND_SECONDS: Final = 25.0
"""Time for a proxy to start an agent, or to end what runs on its node."""
QUICK_SECONDS: Final = 2.0
"""Time for a proxy to do what takes it no time, where a recovery waits for the answer."""
RETRY_SECONDS: Final = 5.0
"""A survey does not try an unreachable node again before this time."""
MAX_THREADS: Final = 32
"""Nodes that are reached at once."""


class Transport(Protocol):
    """Runs proxies on nodes."""

    def open(self, node: str, until: float, then: float) -> Pipe:
        """Start a proxy on *node*, which must accept a connection by *until* (monotonic) and complete the login by *then*.

        Raise `NodeLost` when it does not, and `NodeStateUnknown` when it could not be tried, which says nothing about the node.
        """
        ...

    def address(self, node: str) -> str:
        """Return the address at which *node* is reached from here, where it has one of its own."""
        ...

    def close(self) -> None:
        """Close what is shared between connections, such as jump hosts."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """The settings of a cluster whose nodes no `SshCluster` describes."""

    name: str
    directory: str
    """Holdfast's folder on each node."""
    interface: str | None = None
    """The interface for training traffic, or its network."""
    failure_domains: dict[str, str] = field(default_factory=dict)
    """Node to failure domain; by default each node is its own."""
    names: list[str] = field(default_factory=list)
    directories: dict[str, str] = field(default_factory=dict)
    """Node to its folder, where it has its own."""
    interfaces: dict[str, str] = field(default_factory=dict)
    """Node to its interface, where it has its own."""


@dataclass(slots=True)
class ProxyState:
    """The connection to one node, and what its proxy reported."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    node_proxy: ProxyClient | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failed: tuple[float, NodeError] | None = None
    """When the last attempt to reach it failed, and why; empty after a success."""
    failures: int = 0
    """Failed attempts in a row."""


class RemoteNodes:
    """The nodes of a cluster of machines."""

    remote = True

    def __init__(self, cluster: RemoteCluster | SshCluster, transport: Transport) -> None:
        self.name, self._cluster, self._transport = cluster.name, cluster, transport
        self._names: list[str] = []
        self._domains: dict[str, str] = {}
        self._directories, self._interfaces = dict(cluster.directories), dict(cluster.interfaces)
        self._known: dict[str, ProxyState] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all nodes, in the cluster's order."""
        if not self._names:  # ranges are expanded once
            self._names, self._domains = list(self._cluster.names), dict(self._cluster.failure_domains)
        return self._names

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*; by default the node itself."""
        self.names()
        return self._domains.get(node, node)

    def folder(self, node: str) -> Path:
        """Return the folder on *node* that holds its agent's files."""
        return Path(self.facts(node)["directory"]) / "nodes" / node

    # -- proxies ------------------------------------------------------------------------------------------------------

    def _state(self, node: str) -> ProxyState:
        with self._lock:
            return self._known.setdefault(node, ProxyState())

    def node_proxy(self, node: str, *, seconds: float = CONNECT_SECONDS, fresh: bool = False) -> ProxyClient:
        """Return a connection to the proxy of *node*, the open one or a *fresh* one; raise `NodeLost` or `NodeStateUnknown`."""
        state = self._state(node)
        until, then = time.monotonic() + seconds, time.monotonic() + max(seconds, LATE_SECONDS)
        if not state.lock.acquire(timeout=seconds):
            raise NodeLost(node, f"it could not be reached within {seconds:.1f} s")
        try:
            before = state.node_proxy
            if before is not None and before.is_alive and not fresh:
                return before
            try:
                pipe = self._transport.open(node, until, then)
                directory = self._directories.get(node, self._cluster.directory)
                opened = ProxyClient(node, pipe, directory=directory, cluster=self.name, until=then)
            except (NodeLost, NodeStateUnknown) as error:
                state.failed = time.monotonic(), error
                state.failures += 1
                if before is not None:  # it may never carry anything again
                    before.close()
                raise
            state.node_proxy, state.facts, state.failed, state.failures = opened, opened.facts, None, 0
        finally:
            state.lock.release()
        if before is not None:
            before.close()
        return opened

    def facts(self, node: str) -> dict[str, Any]:
        """Return what the node's proxy reported when it was reached last."""
        return self._state(node).facts or self.node_proxy(node).facts

    def command(self, node: str, command: str, /, *, seconds: float = COMMAND_SECONDS, **facts: object) -> dict[str, Any]:
        """Send a command to the node's proxy; raise a `NodeError` when it is unreachable, ``OSError`` when it refuses."""
        return self.node_proxy(node).command(command, seconds=seconds, **facts)

    def fenced_command(self, node: str, command: str, confirm: Confirm | None, **facts: object) -> dict[str, Any]:
        """Send a command that bypasses the agent, with the controller's token; *confirm* is called once the connection is open."""
        node_proxy = self.node_proxy(node)
        if confirm is not None:
            token = confirm()
            facts |= {"job": token.job, "epoch": token.epoch, "until": token.until + node_proxy.clock_ahead}
        return node_proxy.command(command, seconds=COMMAND_SECONDS, **facts)

    # -- agents -------------------------------------------------------------------------------------------------------

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that fails."""
        try:
            self.fenced_command(node, "start", confirm)
        except OSError as error:
            raise NodeLost(node, error.strerror or str(error)) from error

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*.

        Raise ``ConnectionRefusedError`` when no agent serves there, ``TimeoutError`` when the node is unreachable, `ProtocolMismatch`.
        """
        try:
            state = self._state(node)  # a node that was reached before is reached soon if it is up; a busy one gets more time with each try
            seconds = min(CONNECT_SECONDS, RECHECK_SECONDS * 2**state.failures) if state.facts else CONNECT_SECONDS
            return self.node_proxy(node, seconds=seconds).stream(seconds=CONNECT_SECONDS)
        except ProtocolMismatch:
            raise
        except NodeError as error:
            raise TimeoutError(str(error)) from error
        except OSError as error:  # the proxy answered: no agent listens there
            raise ConnectionRefusedError(error.strerror or str(error)) from error

    def processors(self, node: str, visible: str | None) -> Processors:
        """Return how many GPUs and CPUs a process that is started on *node* may use."""
        answer = self.command(node, "processors", visible=visible)
        return Processors(gpus=answer["gpus"], cpus=answer["cpus"])

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of a job's plan is this node's own: its interpreter, its log folder, and the interface for training traffic."""
        facts, environment = self.facts(node), {}
        if (interface := self._training_interface(node)) is not None:
            environment = {"GLOO_SOCKET_IFNAME": interface["name"], "NCCL_SOCKET_IFNAME": f"={interface['name']}"}
        return {
            "python": facts["interpreter"],
            "log_directory": f"{facts['directory']}/jobs/{job}/logs",
            "environment": environment,
        }

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed. Raise `NodeLost` when that fails."""
        try:
            return list(self.fenced_command(node, "fence", confirm, job=job)["killed"])
        except OSError as error:
            raise NodeLost(node, f"its processes could not be ended: {error.strerror or error}") from error

    def recent_events(self, node: str, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* in the event logs of agents on *node*."""
        return list(self.command(node, "replay", job=job)["events"])

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Free the memory on *node* that holds the state of *job*; raise `NodeLost` when the node is unreachable."""
        try:
            self.fenced_command(node, "wipe", confirm, job=job)
        except OSError as error:
            raise NodeLost(node, f"its memory could not be freed: {error.strerror or error}") from error

    def logs(self, node: str, job: str) -> Logs:
        """List the logs of the ranks of *job* in the log folder of *node*."""
        answer = self.command(node, "logs", job=job)
        return Logs(place=answer.get("place", ""), sizes=answer["logs"])

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of the agent's: from byte *at*, or the last ones."""
        return base64.b64decode(self.command(node, "log", job=job, name=name, at=at, most=most)["data"])[:most]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def is_reachable(self, node: str) -> bool:
        """Return whether *node* is reachable now, by a new connection; raise `NodeStateUnknown` when that could not be tried."""
        try:
            self.node_proxy(node, seconds=RECHECK_SECONDS, fresh=True)
        except NodeLost:
            return False
        return True

    def any_other_reachable(self, but: Collection[str]) -> bool:
        """Return whether any node except these is reachable now; a few are tried, chosen at random."""

        def reachable(node: str) -> bool:
            try:
                return self.is_reachable(node)
            except NodeStateUnknown:  # its problem or ours: unknown
                return False

        others = [node for node in self.names() if node not in but]
        with ThreadPoolExecutor(WITNESSES, thread_name_prefix="witnesses") as pool:
            return any(pool.map(reachable, random.sample(others, min(WITNESSES, len(others)))))

    def survey(self, seconds: float | None = None) -> list[NodeView]:
        """Look at every node, all at once."""
        names, limit = self.names(), seconds or CONNECT_SECONDS
        with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(names))), thread_name_prefix="survey") as pool:
            return list(pool.map(lambda node: self._view(node, limit), names))

    def _view(self, node: str, seconds: float) -> NodeView:
        failed = self._state(node).failed
        if failed is not None and time.monotonic() - failed[0] < RETRY_SECONDS:
            return NodeView(name=node, status="off", why=failed[1].reason)
        try:
            agent = self.node_proxy(node, seconds=seconds).command("agent", seconds=seconds)["agent"]
        except NodeError as error:
            return NodeView(name=node, status="off", why=error.reason)
        except OSError as error:
            return NodeView(name=node, status="off", why=error.strerror or str(error))
        if agent is None:
            return NodeView(name=node, status="idle")
        return NodeView(name=node, status="up", job=agent["job"], agent="up", pid=agent["pid"])

    # -- the network --------------------------------------------------------------------------------------------------

    def address(self, node: str) -> str:
        """Return the address at which workers reach *node*: that of the interface for training traffic."""
        interface = self._training_interface(node)
        return interface["address"] if interface is not None else self._reached_at(node)

    def interface(self, node: str) -> str | None:
        """Return the name of the interface for training traffic; None where the node does not report which one it is."""
        interface = self._training_interface(node)
        return None if interface is None else str(interface["name"])

    def _reached_at(self, node: str) -> str:
        return str(self.facts(node)["reached"] or self._transport.address(node))

    def _training_interface(self, node: str) -> dict[str, Any] | None:
        """Return the interface that the cluster file names, or else the one that the node was reached at."""
        found: list[dict[str, Any]] = self.facts(node)["interfaces"]
        wanted = self._interfaces.get(node, self._cluster.interface)
        if wanted is None:
            return next((one for one in found if one["address"] == self._reached_at(node)), None)
        for one in found:
            if wanted == one["name"] or _is_in_network(one["address"], wanted):
                return one
        known = ", ".join(f"{one['name']} ({one['network']})" for one in found) or "none"
        raise NodeStateUnknown(node, f"it has no interface {wanted} for training traffic, it has {known}. Correct `interface`")

    def bandwidth(self, source: str, to: str, seconds: float) -> float:
        """Send from one node to another on the interface for training traffic; return bytes per second, or raise a `NodeError`."""
        try:
            listener, host = self.command(to, "listen"), self.address(to)
            ends = {"host": host, "port": listener["port"], "token": listener["token"], "source": self.address(source)}
            sent = self.command(source, "measure", during=seconds, **ends)
        except OSError as error:
            raise NodeStateUnknown(source, f"no traffic from {source} to {to}: {error.strerror or error}") from error
        return float(sent["bytes"]) / max(1e-6, float(sent["seconds"]))

    def check_connection(self, source: str, to: str, seconds: float) -> str:
        """Return why one node cannot connect to another within *seconds*; empty when it can."""
        try:
            port = self.command(to, "listen", seconds=QUICK_SECONDS)["port"]
            ends = {"host": self.address(to), "port": port, "source": self.address(source)}
            answer = self.command(source, "connect", seconds=seconds + QUICK_SECONDS, within=seconds, **ends)
        except OSError as error:
            raise NodeStateUnknown(source, f"it does not report whether it reaches {to}: {error.strerror or error}") from error
        return str(answer["why"])

    def close(self) -> None:
        """Close all connections. Agents and their workers go on."""
        for state in list(self._known.values()):
            if state.node_proxy is not None:
                state.node_proxy.close()
        self._transport.close()


def _is_in_network(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network)
    except ValueError:  # the name of an interface
        return False
