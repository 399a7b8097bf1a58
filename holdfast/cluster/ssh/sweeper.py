"""Look at many nodes at once, over connections that stay open. A node counts as silent only after several misses in a row."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

from detectors.evidence import Unknown
from detectors.probe_result import NodeProbe, ProbeOutcome, UnansweredProbe
from detectors.readings import NodeReading
from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.endpoints import Target
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.probe.readers.bundle import program
from holdfast.probe.readers.local import reading_of
from holdfast.probe.remote.errors import NoAnswer, NodeUnreachable, ProbeFailed
from holdfast.probe.remote.program import RemoteProgram
from holdfast.spec import SshCluster

DEADLINE: Final = 10.0
"""Seconds that one attempt to look at one node may take, from its begin to the answer."""
HANDS: Final = 128
"""Nodes that are looked at at once. With 1,000 nodes that need 0.3 s for a look, 32, 64, 128 and 256 hands took 10.4, 5.6, 3.3 and 2.9 s,
and 2.9, 2.8, 2.3 and 3.1 s of CPU (two cores, the nodes' server among those who wanted them)."""
PAUSE: Final = 1.0
"""Seconds between two rounds for the nodes that missed: a burst of load, or a switch that learns, should be over by then."""
KEPT: Final = 0.5
"""Of the time that is left stays for a new connection when the one that is there gives no answer."""
SHARE: Final = 0.8
"""Of the time that is left the node may take for the look itself; the rest is the way."""


@dataclass(slots=True)
class NodeConnection:
    """The way to one node, as long as it lasts."""

    target: Target
    connection: Connection | None = None
    collector: RemoteProgram | None = None
    misses: int = 0
    """In a row."""
    busy: threading.Lock = field(default_factory=threading.Lock)

    def cut(self) -> None:
        """Let go of the connection."""
        if self.connection is not None:
            self.connection.cut()
        self.connection = self.collector = None


class SshSweeper:
    """Looks at the nodes of a cluster.

    Misses are counted within a sweep, in rounds with a pause between them, and go on counting over sweeps until the node answers. So one
    sweep is enough to know that a node is silent, a moment's trouble is no silence, and a node that stays silent costs one attempt a sweep.
    """

    def __init__(self, cluster: SshCluster, *, hands: int = HANDS, keep: bool = True, pause: float = PAUSE) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self.cluster = cluster
        self._keep, self._pause, self._hands = keep, pause, hands
        self._ways = Connector(cluster)
        self._lines = {target.node: NodeConnection(target) for target in self._ways.targets}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, and with them the collectors on the nodes."""
        for line in self._lines.values():
            line.cut()
        self._ways.close()

    def nodes(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""
        return list(self._lines)

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Return a look at each node (or each of *nodes*), in the cluster's order; one attempt takes *deadline* seconds at most."""
        lines = [line for name, line in self._lines.items() if nodes is None or name in nodes]
        looks: dict[str, NodeProbe] = {}
        with ThreadPoolExecutor(max(1, min(self._hands, len(lines))), thread_name_prefix="sweep") as hands:
            missing = lines
            while missing:
                found = list(hands.map(lambda line: self._look(line, deadline), missing))
                looks |= {look.node: look for look in found}
                again = {look.node for look in found if isinstance(look.found, UnansweredProbe) and look.found.times < self.cluster.misses}
                missing = [line for line in missing if line.target.node in again]
                if missing:
                    time.sleep(self._pause)
        if not self._keep:
            self._let_go(lines)
        return self._without_ours({line.target.node: looks[line.target.node] for line in lines}, lines)

    def _let_go(self, lines: Iterable[NodeConnection]) -> None:
        for line in lines:
            line.cut()
        self._ways.jumps.close()

    def _look(self, line: NodeConnection, deadline: float) -> NodeProbe:
        """Make one attempt to look at a node, and return what came of it."""
        begun = time.monotonic()
        with line.busy:
            try:
                found: ProbeOutcome = self._attempt(line, begun + deadline)
            except ProbeFailed as error:
                line.cut()
                found = Unknown(str(error))
            except NodeUnreachable as error:
                line.cut()
                self._ways.jumps.doubt(line.target.jump_hosts)
                found = UnansweredProbe(times=line.misses + 1, why=str(error))
            if not isinstance(found, Unknown):  # which says nothing of the node, and so ends no row of misses
                line.misses = found.times if isinstance(found, UnansweredProbe) else 0
        return NodeProbe(node=line.target.node, at=time.time(), seconds=time.monotonic() - begun, found=found)

    def _attempt(self, line: NodeConnection, until: float) -> NodeReading | Unknown:
        if line.connection is not None and line.connection.is_alive:
            try:
                return self._asked(line, line.connection, until - KEPT * (until - time.monotonic()))
            except NoAnswer:
                pass  # it may have broken long ago, without our being told: whether the node answers a new one tells
        line.cut()
        line.connection = self._ways.open(line.target, until)
        return self._asked(line, line.connection, until)

    def _asked(self, line: NodeConnection, connection: Connection, until: float) -> NodeReading | Unknown:
        with self._ways.watchdog.over(until + 0.5, connection.cut):  # for the calls that know no deadline; the others end by themselves
            if line.collector is None or not line.collector.is_alive:
                interpreter = SshInterpreter(connection, line.target.python, until)
                line.collector = RemoteProgram(interpreter, program(), until, expected="look")
            seconds = max(0.2, SHARE * (until - time.monotonic()))
            found = reading_of(line.collector.ask(until, node=line.target.node, seconds=seconds))
        return dataclasses.replace(found, node=line.target.node) if isinstance(found, NodeReading) else found

    def _without_ours(self, looks: dict[str, NodeProbe], lines: list[NodeConnection]) -> dict[str, NodeProbe]:
        """Return *looks* without the misses that are ours: when all nodes that are reached one way miss at once, it is the way."""
        for jump_hosts in {line.target.jump_hosts for line in lines}:
            group = [looks[line.target.node] for line in lines if line.target.jump_hosts == jump_hosts]
            if len(group) > 1 and all(isinstance(look.found, UnansweredProbe) for look in group):
                whose = f"the way through {jump_hosts[-1]}" if jump_hosts else "our own network"
                for look in group:
                    assert isinstance(look.found, UnansweredProbe)
                    self._lines[look.node].misses = 0
                    why = f"all {len(group)} nodes missed at once, so {whose} is suspected and no node; this one: {look.found.why}"
                    looks[look.node] = dataclasses.replace(look, found=Unknown(why))
        return looks
