"""Probe many nodes at once over open SSH connections. A node is unreachable only after several failed probes in a row."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector, Target
from holdfast.cluster.ssh.deadlines import cut_at
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.probe_result import NodeProbe, ProbeOutcome, UnansweredProbe
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.probe.readers.local import program, reading_of
from holdfast.probe.remote.program import NoAnswer, NodeUnreachable, ProbeFailed, RemoteProgram
from holdfast.probe.sweep import DEADLINE, Sweeper
from holdfast.spec import SshCluster

MAX_THREADS: Final = 128
"""Nodes that are probed at once. With 1,000 nodes that need 0.3 s for a probe, 32, 64, 128 and 256 threads took 10.4, 5.6, 3.3 and 2.9 s,
and 2.9, 2.8, 2.3 and 3.1 s of CPU (two cores, shared with the nodes' server)."""
PAUSE: Final = 1.0
"""Seconds between two rounds for the nodes that failed: a burst of load, or a switch that learns, should be over by then."""
RECONNECT_SHARE: Final = 0.5
"""Share of the time that is kept for a new connection in case the open one does not answer."""
PROBE_SHARE: Final = 0.8
"""Share of the time for the probe on the node; the rest is for the network."""


@dataclass(slots=True)
class NodeConnection:
    """The connection to one node."""

    target: Target
    connection: Connection | None = None
    collector: RemoteProgram | None = None
    misses: int = 0
    """Failed probes in a row."""
    busy: threading.Lock = field(default_factory=threading.Lock)

    def cut(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.cut()
        self.connection = self.collector = None


class SshSweeper(Sweeper):
    """Probes the nodes of an SSH cluster.

    Failed probes are counted within a sweep, in rounds with a pause between them, and on over sweeps until the node answers. So one sweep
    is enough to find an unreachable node, a short outage is not reported, and a node that stays unreachable costs one attempt a sweep.
    """

    def __init__(self, cluster: SshCluster, *, threads: int = MAX_THREADS, keep: bool = True, pause: float = PAUSE) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self.cluster = cluster
        self._keep, self._pause, self._threads = keep, pause, threads
        self._connector = Connector(cluster)
        self._nodes = {target.node: NodeConnection(target) for target in self._connector.targets}

    def close(self) -> None:
        """End all connections, and with them the collectors on the nodes."""
        for node in self._nodes.values():
            node.cut()
        self._connector.close()

    def nodes(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""
        return list(self._nodes)

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Probe each node (or each of *nodes*), in the cluster's order; one attempt takes *deadline* seconds at most."""
        chosen = [node for name, node in self._nodes.items() if nodes is None or name in nodes]
        probes: dict[str, NodeProbe] = {}
        with ThreadPoolExecutor(max(1, min(self._threads, len(chosen))), thread_name_prefix="sweep") as pool:
            missing = chosen
            while missing:
                found = list(pool.map(lambda node: self._probe(node, deadline), missing))
                probes |= {one.node: one for one in found}
                again = {
                    one.node for one in found if isinstance(one.found, UnansweredProbe) and one.found.times < self.cluster.failure_threshold
                }
                missing = [node for node in missing if node.target.node in again]
                if missing:
                    time.sleep(self._pause)
        if not self._keep:
            for node in chosen:
                node.cut()
            self._connector.jumps.close()
        return self._without_network_failures({node.target.node: probes[node.target.node] for node in chosen}, chosen)

    def _probe(self, node: NodeConnection, deadline: float) -> NodeProbe:
        """Make one attempt to probe a node."""
        begun = time.monotonic()
        with node.busy:
            try:
                found: ProbeOutcome = self._attempt(node, begun + deadline)
            except ProbeFailed as error:
                node.cut()
                found = Unknown(str(error))
            except NodeUnreachable as error:
                node.cut()
                self._connector.jumps.suspect(node.target.jump_hosts)
                found = UnansweredProbe(times=node.misses + 1, why=str(error))
            if not isinstance(found, Unknown):  # which says nothing about the node
                node.misses = found.times if isinstance(found, UnansweredProbe) else 0
        return NodeProbe(node=node.target.node, at=time.time(), seconds=time.monotonic() - begun, found=found)

    def _attempt(self, node: NodeConnection, until: float) -> NodeReading | Unknown:
        if node.connection is not None and node.connection.is_alive:
            try:
                return self._read(node, node.connection, until - RECONNECT_SHARE * (until - time.monotonic()))
            except NoAnswer:
                pass  # it may have broken long ago without notice: a new one shows whether the node answers
        node.cut()
        node.connection = self._connector.open(node.target, until)
        return self._read(node, node.connection, until)

    def _read(self, node: NodeConnection, connection: Connection, until: float) -> NodeReading | Unknown:
        with cut_at(until + 0.5, connection.cut):  # for the calls without a deadline; the others end by themselves
            if node.collector is None or not node.collector.is_alive:
                interpreter = SshInterpreter(connection, node.target.python, until)
                node.collector = RemoteProgram(interpreter, program(), until, expected="reading")
            seconds = max(0.2, PROBE_SHARE * (until - time.monotonic()))
            found = reading_of(node.collector.ask(until, node=node.target.node, seconds=seconds))
        return dataclasses.replace(found, node=node.target.node) if isinstance(found, NodeReading) else found

    def _without_network_failures(self, probes: dict[str, NodeProbe], nodes: list[NodeConnection]) -> dict[str, NodeProbe]:
        """Turn failures into `Unknown` when all nodes behind the same jump hosts fail at once: then the network between is suspect."""
        for jump_hosts in {node.target.jump_hosts for node in nodes}:
            group = [probes[node.target.node] for node in nodes if node.target.jump_hosts == jump_hosts]
            if len(group) > 1 and all(isinstance(one.found, UnansweredProbe) for one in group):
                suspect = f"the jump host {jump_hosts[-1]}" if jump_hosts else "our own network"
                for one in group:
                    assert isinstance(one.found, UnansweredProbe)
                    self._nodes[one.node].misses = 0
                    why = f"all {len(group)} nodes failed at once, so {suspect} is suspect and no node; this one: {one.found.why}"
                    probes[one.node] = dataclasses.replace(one, found=Unknown(why))
        return probes
