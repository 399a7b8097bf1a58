"""Nodes that are other machines: everything that is asked of one goes through its gate, whatever way leads there."""

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
from typing import Any, Final, Protocol

from holdfast.cluster.interface import Confirm, Logs, NodeView
from holdfast.cluster.proxy_client import Pipe, ProxyClient
from holdfast.errors import NodeError, NodeLost, NodeStateUnknown, ProtocolMismatch
from holdfast.protocol import Message

REACH_SECONDS: Final = 10.0
"""How long the way to a node may take where nothing speaks against it: a login and the start of an interpreter on a busy one."""
DOUBT_SECONDS: Final = 1.5
"""How long a node that has fallen silent may take to take a connection, which its kernel does however busy it is."""
LATE_SECONDS: Final = 6.0
"""How long such a node may take to let us in once it has taken the connection."""
WITNESSES: Final = 3
"""Nodes that are tried to find out whether any can be reached."""
ORDER_SECONDS: Final = 25.0
"""How long a gate may take to start an agent or to end what runs on its node."""
MEETS: Final = 2.0
"""Seconds for a gate to do what takes it no time, where a recovery waits for the answer."""
AGAIN: Final = 5.0
"""Seconds for which a node that could not be reached is not tried anew when all nodes are looked at."""
HANDS: Final = 32
"""Threads that reach nodes at once."""


class Transport(Protocol):
    """A way to run gates on nodes."""

    def open(self, node: str, until: float, then: float) -> Pipe:
        """Start a gate on *node*, which has until *until* (monotonic) to give a sign of life, and until *then* to let us in.

        Raise `NodeLost` when it does not answer, `NodeStateUnknown` when it could not be asked, which says nothing of it.
        """
        ...

    def address(self, node: str) -> str:
        """Return the address by which *node* is reached from here, where that is one of its own."""
        ...

    def close(self) -> None:
        """Let go of what leads there."""
        ...


class Machines(Protocol):
    """What a user writes about a cluster of machines, as far as it concerns what is done there."""

    @property
    def name(self) -> str:
        """Return the cluster's name."""
        ...

    @property
    def directory(self) -> str:
        """Return the folder on each node for what is ours."""
        ...

    @property
    def interface(self) -> str | None:
        """Return the interface for training traffic, or its network, where one is named."""
        ...

    @property
    def directories(self) -> dict[str, str]:
        """Return that folder of each node that has its own."""
        ...

    @property
    def interfaces(self) -> dict[str, str]:
        """Return that interface of each node that has its own."""
        ...

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes."""
        ...

    @property
    def domains(self) -> dict[str, str]:
        """Return the failure domain of each node that has one."""
        ...


@dataclass(slots=True)
class KnownAgent:
    """What is known of one node."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    node_proxy: ProxyClient | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failed: tuple[float, NodeError] | None = None
    """When it last could not be reached, and why."""
    failures: int = 0
    """Attempts to reach it that failed since it was reached last."""


class RemoteNodes:
    """The nodes of a cluster of machines."""

    remote = True

    def __init__(self, cluster: Machines, reach: Transport) -> None:
        self.name, self._cluster, self._reach = cluster.name, cluster, reach
        self._all: list[str] = []
        self._domains: dict[str, str] = {}
        self._directories, self._interfaces = dict(cluster.directories), dict(cluster.interfaces)
        self._known: dict[str, KnownAgent] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all nodes, in the cluster's order."""
        if not self._all:  # ranges are spelled out once
            self._all, self._domains = list(self._cluster.names), dict(self._cluster.domains)
        return self._all

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*: by itself it is one."""
        self.names()
        return self._domains.get(node, node)

    def folder(self, node: str) -> Path:
        """Return the folder on *node* that holds its agent's files."""
        return Path(self.facts(node)["directory"]) / "nodes" / node

    # -- gates --------------------------------------------------------------------------------------------------------

    def _of(self, node: str) -> KnownAgent:
        with self._lock:
            return self._known.setdefault(node, KnownAgent())

    def node_proxy(self, node: str, *, seconds: float = REACH_SECONDS, fresh: bool = False) -> ProxyClient:
        """Return the gate of *node*, the one that is open or a *fresh* one; raise `NodeLost` or `NodeStateUnknown`."""
        known = self._of(node)
        until, then = time.monotonic() + seconds, time.monotonic() + max(seconds, LATE_SECONDS)
        if not known.turn.acquire(timeout=seconds):
            raise NodeLost(node, f"it could not be reached within {seconds:.1f} s")
        try:
            present = known.node_proxy
            if present is not None and present.is_alive and not fresh:
                return present
            try:
                pipe = self._reach.open(node, until, then)
                opened = ProxyClient(
                    node, pipe, directory=self._directories.get(node, self._cluster.directory), cluster=self.name, until=then
                )
            except (NodeLost, NodeStateUnknown) as error:
                known.failed = time.monotonic(), error
                known.failures += 1
                if present is not None:  # nobody can tell when it would carry anything again
                    present.close()
                raise
            known.node_proxy, known.facts, known.failed, known.failures = opened, opened.facts, None, 0
        finally:
            known.turn.release()
        if present is not None:
            present.close()
        return opened

    def facts(self, node: str) -> dict[str, Any]:
        """Return what the node's gate said of it."""
        return self._of(node).facts or self.node_proxy(node).facts

    def order(self, node: str, verb: str, *, seconds: float = ORDER_SECONDS, **facts: object) -> dict[str, Any]:
        """Have the node's gate do something; raise a `NodeError` when it cannot be had, ``OSError`` when it says no."""
        return self.node_proxy(node).order(verb, seconds=seconds, **facts)

    def command(self, node: str, verb: str, confirm: Confirm | None, **facts: object) -> dict[str, Any]:
        """Have the node's gate do what no agent could refuse; who gives the order is asked once the way there is open."""
        node_proxy = self.node_proxy(node)
        if confirm is not None:
            token = confirm()
            facts |= {"job": token.job, "epoch": token.epoch, "until": token.until + node_proxy.ahead}
        return node_proxy.order(verb, seconds=ORDER_SECONDS, **facts)

    # -- agents -------------------------------------------------------------------------------------------------------

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that cannot be."""
        try:
            self.command(node, "start", confirm)
        except OSError as error:
            raise NodeLost(node, error.strerror or str(error)) from error

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*; raise ``ConnectionRefusedError`` when none serves, ``OSError`` when it is away.

        Raise `ProtocolMismatch` when its gate is of another version.
        """
        try:
            known = self._of(node)  # one that has been reached before is soon reached again, if it is there: on a busy node not so soon
            seconds = min(REACH_SECONDS, DOUBT_SECONDS * 2**known.failures) if known.facts else REACH_SECONDS
            return self.node_proxy(node, seconds=seconds).stream(seconds=REACH_SECONDS)
        except ProtocolMismatch:
            raise
        except NodeError as error:
            raise TimeoutError(str(error)) from error
        except OSError as error:  # the gate looked: nobody listens there
            raise ConnectionRefusedError(error.strerror or str(error)) from error

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of a job's plan is this node's own: its interpreter, and where its logs go."""
        facts = self.facts(node)
        environment = {}
        if (inner := self._inner(node)) is not None:
            environment = {"GLOO_SOCKET_IFNAME": inner["name"], "NCCL_SOCKET_IFNAME": f"={inner['name']}"}
        return {
            "python": facts["interpreter"],
            "log_directory": f"{facts['directory']}/jobs/{job}/logs",
            "environment": environment,
        }

    # -- nodes --------------------------------------------------------------------------------------------------------

    def answers(self, node: str) -> bool:
        """Tell whether *node* answers now, by a connection of its own; raise `NodeStateUnknown` when that could not be tried."""
        try:
            self.node_proxy(node, seconds=DOUBT_SECONDS, fresh=True)
        except NodeLost:
            return False
        return True

    def any_other_reachable(self, but: Collection[str]) -> bool:
        """Tell whether any other node than these answers now; some are tried, taken at random."""
        others = [node for node in self.names() if node not in but]
        with ThreadPoolExecutor(WITNESSES, thread_name_prefix="witnesses") as hands:
            return any(hands.map(self._answers_somehow, random.sample(others, min(WITNESSES, len(others)))))

    def _answers_somehow(self, node: str) -> bool:
        try:
            return self.answers(node)
        except NodeStateUnknown:  # whether that is its trouble or ours is not known
            return False

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed. Raise `NodeLost` when nobody answers."""
        try:
            return list(self.command(node, "fence", confirm, job=job)["killed"])
        except OSError as error:
            raise NodeLost(node, f"what runs on it could not be ended: {error.strerror or error}") from error

    def past(self, node: str, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* that agents on *node* have journaled."""
        return list(self.order(node, "past", job=job)["events"])

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Give back the memory that *job* has taken on *node* for its state; raise `NodeLost` when nobody answers."""
        try:
            self.command(node, "wipe", confirm, job=job)
        except OSError as error:
            raise NodeLost(node, f"its memory could not be given back: {error.strerror or error}") from error

    def survey(self, seconds: float | None = None) -> list[NodeView]:
        """Look at every node, all at once."""
        names, limit = self.names(), seconds or REACH_SECONDS
        with ThreadPoolExecutor(min(HANDS, max(1, len(names))), thread_name_prefix="survey") as hands:
            return list(hands.map(lambda node: self._view(node, limit), names))

    def _view(self, node: str, seconds: float) -> NodeView:
        failed = self._of(node).failed
        if failed is not None and time.monotonic() - failed[0] < AGAIN:
            return NodeView(name=node, status="off", why=failed[1].reason)
        try:
            agent = self.node_proxy(node, seconds=seconds).order("look", seconds=seconds)["agent"]
        except NodeError as error:
            return NodeView(name=node, status="off", why=error.reason)
        except OSError as error:
            return NodeView(name=node, status="off", why=error.strerror or str(error))
        if agent is None:
            return NodeView(name=node, status="idle")
        return NodeView(name=node, status="up", job=agent["job"], agent="up", pid=agent["pid"])

    def logs(self, node: str, job: str) -> Logs:
        """Return the logs of the ranks of *job* in the folder where *node* writes its own."""
        told = self.order(node, "logs", job=job)
        return Logs(place=told.get("place", ""), sizes=told["logs"])

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of the agent's, from byte *at* on or the last ones."""
        return base64.b64decode(self.order(node, "log", job=job, name=name, at=at, most=most)["data"])[:most]

    # -- the network --------------------------------------------------------------------------------------------------

    def address(self, node: str) -> str:
        """Return the address under which workers reach *node*: that of the interface for training traffic."""
        inner = self._inner(node)
        return inner["address"] if inner is not None else str(self.facts(node)["reached"] or self._reach.address(node))

    def interface(self, node: str) -> str | None:
        """Return the name of the interface for training traffic; None where the node does not say which one it has."""
        inner = self._inner(node)
        return None if inner is None else str(inner["name"])

    def _inner(self, node: str) -> dict[str, Any] | None:
        """Return the interface for training traffic: that which the cluster names, or else the one that the node was reached by."""
        facts = self.facts(node)
        found: list[dict[str, Any]] = facts["interfaces"]
        wanted = self._interfaces.get(node, self._cluster.interface)
        if wanted is None:
            reached = facts["reached"] or self._reach.address(node)
            return next((one for one in found if one["address"] == reached), None)
        for one in found:
            if wanted == one["name"] or _lies_in(one["address"], wanted):
                return one
        known = ", ".join(f"{one['name']} ({one['network']})" for one in found) or "none"
        raise NodeStateUnknown(node, f"it has no interface {wanted} for training traffic, it has {known}. Mend `interface`")

    def bandwidth(self, source: str, to: str, seconds: float) -> float:
        """Return how many bytes per second go from one node to another on the interface for training traffic; raise `NodeError`."""
        try:
            door, host = self.order(to, "listen"), self.address(to)
            port, token = door["port"], door["token"]
            told = self.order(source, "measure", host=host, port=port, token=token, during=seconds, source=self.address(source))
        except OSError as error:
            raise NodeStateUnknown(source, f"no traffic from {source} to {to}: {error.strerror or error}") from error
        return float(told["bytes"]) / max(1e-6, float(told["seconds"]))

    def check_connection(self, source: str, to: str, seconds: float) -> str:
        """Say why a connection from one node to another does not come about within *seconds*; empty when it does."""
        try:
            port = self.order(to, "listen", seconds=MEETS)["port"]
            ends = {"host": self.address(to), "port": port, "source": self.address(source)}
            told = self.order(source, "meet", seconds=seconds + MEETS, within=seconds, **ends)
        except OSError as error:
            raise NodeStateUnknown(source, f"it does not say whether it reaches {to}: {error.strerror or error}") from error
        return str(told["why"])

    def close(self) -> None:
        """Let go of all connections. Agents and what they started go on."""
        for known in list(self._known.values()):
            if known.node_proxy is not None:
                known.node_proxy.close()
        self._reach.close()


def _lies_in(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network)
    except ValueError:  # the name of an interface
        return False
