"""The checks' program on nodes that one can log in to."""

from __future__ import annotations

import time
from typing import Final, Self

from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.probe.burn_in.session import BurnInSession
from holdfast.probe.remote.errors import NoAnswer, NodeUnreachable
from holdfast.spec import SshCluster

DEADLINE: Final = 20.0
"""Seconds that logging in to a node may take."""
FOLDER: Final = "/var/tmp"  # noqa: S108 (a folder of its own is made there, with a name that nobody can know before)


class SshBurnInConnections:
    """Where orders to the nodes of a cluster go: a connection of its own for each node that is tried."""

    apart = True

    def __init__(self, cluster: SshCluster) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._ways, self._folder = Connector(cluster), cluster.burn_in.folder or FOLDER
        self._nice = cluster.burn_in.nice
        self._targets = {target.node: target for target in self._ways.targets}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the jump hosts; each post lets go of its own connection."""
        self._ways.close()

    def names(self) -> list[str]:
        """Return the nodes' names."""
        return list(self._targets)

    def address(self, node: str) -> str:
        """Return the address by which the node is reached from here, or from its jump host: other nodes are taken to reach it so too."""
        return self._targets[node].endpoint.address

    def folder(self, node: str) -> str:  # noqa: ARG002 (the same on all)
        """Return the folder in which a disk is tried."""
        return self._folder

    def open(self, node: str) -> BurnInSession:
        """Log in to *node* and start the program; raise `NoAnswer` when that cannot be."""
        target, until = self._targets[node], time.monotonic() + DEADLINE
        try:
            connection = self._ways.open(target, until)
        except NodeUnreachable:
            self._ways.jumps.doubt(target.jump_hosts)
            raise
        until = time.monotonic() + DEADLINE
        try:
            with self._ways.watchdog.over(until, connection.cut):
                interpreter = SshInterpreter(connection, target.python, until)
        except NoAnswer:
            connection.cut()
            raise
        return BurnInSession(node, interpreter, nice=self._nice)
