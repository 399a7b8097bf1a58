"""Run the program of burn-in checks on nodes over SSH."""

from __future__ import annotations

import time
from typing import Final

from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.deadlines import cut_at
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.probe.burn_in.session import BurnInConnections, BurnInSession
from holdfast.probe.remote.program import NoAnswer
from holdfast.spec import SshCluster

LOGIN_SECONDS: Final = 20.0
"""Time for a login, and for starting the interpreter."""
FOLDER: Final = "/var/tmp"  # noqa: S108 (a folder with a random name is made in it)


class SshBurnInConnections(BurnInConnections):
    """The nodes of an SSH cluster; each one that is tested has its own connection."""

    concurrent = True

    def __init__(self, cluster: SshCluster) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._connector, self._folder = Connector(cluster), cluster.burn_in.directory or FOLDER
        self._nice = cluster.burn_in.nice
        self._targets = {target.node: target for target in self._connector.targets}

    def close(self) -> None:
        """Close the connections to jump hosts; each session closes its own."""
        self._connector.close()

    def names(self) -> list[str]:
        """Return the nodes' names."""
        return list(self._targets)

    def address(self, node: str) -> str:
        """Return the address at which the node is reached from here, or from its jump host; other nodes use it too."""
        return self._targets[node].endpoint.address

    def folder(self, node: str) -> str:  # noqa: ARG002 (the same on all)
        """Return the folder in which the disk check works."""
        return self._folder

    def open(self, node: str) -> BurnInSession:
        """Log in to *node* and start the program; raise `NoAnswer` when that fails."""
        target = self._targets[node]
        connection = self._connector.open(target, time.monotonic() + LOGIN_SECONDS)
        until = time.monotonic() + LOGIN_SECONDS
        try:
            with cut_at(until, connection.cut):
                interpreter = SshInterpreter(connection, target.python, until)
        except NoAnswer:
            connection.cut()
            raise
        return BurnInSession(node, interpreter, nice=self._nice)
