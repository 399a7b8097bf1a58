"""Gates on nodes that one can log in to."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

import paramiko

from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector
from holdfast.errors import NodeLost, NodeStateUnknown
from holdfast.probe.remote.errors import NodeUnreachable, ProbeFailed, printable
from holdfast.protocol import PROTOCOL
from holdfast.spec import SshCluster

NOT_FOUND: Final = (126, 127)
"""A shell's exit statuses for a program that cannot be run, or is not there."""
NO_MODULE: Final = b"No module named"
CURE: Final = "`holdfast nodes bootstrap CLUSTER_FILE` puts Holdfast there"
SHOWN: Final = 200


class SshPipe:
    """A gate's standard input and output, over a connection of its own."""

    def __init__(self, connection: Connection, channel: paramiko.Channel, python: str) -> None:
        self._connection, self._channel, self._python = connection, channel, python
        self._once = threading.Lock()

    def recv(self, size: int) -> bytes:
        """Return what the gate said."""
        return self._channel.recv(size)

    def sendall(self, data: bytes) -> None:
        """Say *data* to the gate."""
        try:
            self._channel.sendall(data)
        except (paramiko.SSHException, EOFError) as error:
            raise BrokenPipeError(str(error)) from error

    def close(self) -> None:
        """End the connection."""
        if self._once.acquire(blocking=False):
            with suppress(paramiko.SSHException, EOFError, OSError):
                self._connection.cut()

    def ended(self) -> str:
        """Return why there is no gate."""
        self._channel.status_event.wait(1.0)
        said = self._channel.recv_stderr(1 << 14) if self._channel.recv_stderr_ready() else b""
        status = self._channel.exit_status if self._channel.exit_status_ready() else -1
        if status in NOT_FOUND or NO_MODULE in said:
            return f"there is no Holdfast in {self._python}: {CURE}"
        words = printable(said.strip().splitlines()[-1])[:SHOWN] if said.strip() else ""
        return f"{self._python} ended with status {status}{f' ({words})' if words else ''}"


class SshTransport:
    """Starts gates over SSH."""

    def __init__(self, cluster: SshCluster) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._ways = Connector(cluster)
        self._targets = {target.node: target for target in self._ways.targets}

    def open(self, node: str, until: float, then: float) -> SshPipe:
        """Log in to *node* and start its proxy; raise `NodeLost` when it does not answer, `NodeStateUnknown` when that is unknown."""
        target = self._targets[node]
        python = f"{target.directory}/env/bin/python"
        try:
            connection = self._ways.open(target, until, then=then)
        except NodeUnreachable as error:
            self._ways.jumps.doubt(target.jump_hosts)
            raise NodeLost(node, str(error)) from error
        except ProbeFailed as error:
            raise NodeStateUnknown(node, str(error)) from error
        try:
            with self._ways.watchdog.over(then, connection.cut):
                channel = connection.transport.open_session(timeout=max(0.01, then - time.monotonic()))
                # A shell of the node's own reads this line: the path is of letters that no shell takes for its own (`Program`).
                # The version is for a node that was given a newer Holdfast while this flow runs: the older one is there still.
                channel.exec_command(f"exec {python} -I -m holdfast.agent.node.proxy --protocol {PROTOCOL:d}")
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.cut()
            raise NodeLost(node, f"it let us in, and opened no session: {str(error) or type(error).__name__}") from error
        return SshPipe(connection, channel, python)

    def address(self, node: str) -> str:
        """Return the address by which the node is reached."""
        return self._targets[node].endpoint.address

    def close(self) -> None:
        """Let go of the jump hosts; each pipe has a connection of its own."""
        self._ways.close()
