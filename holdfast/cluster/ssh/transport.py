"""Run node proxies over SSH."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

import paramiko

from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.deadlines import cut_at
from holdfast.errors import NodeLost, NodeStateUnknown
from holdfast.probe.remote.program import NodeUnreachable, ProbeFailed, printable
from holdfast.protocol import PROTOCOL
from holdfast.spec import SshCluster

NOT_FOUND: Final = (126, 127)
"""A shell's exit statuses for a program that cannot be run, or does not exist."""
CURE: Final = "`holdfast node bootstrap --cluster CLUSTER_FILE` installs it"
MAX_SHOWN: Final = 200
"""Letters of an error message that are shown."""


class SshPipe:
    """The standard input and output of a proxy, over its own connection."""

    def __init__(self, connection: Connection, channel: paramiko.Channel, python: str) -> None:
        self._connection, self._channel, self._python = connection, channel, python
        self._once = threading.Lock()

    def recv(self, size: int) -> bytes:
        """Return output of the proxy."""
        return self._channel.recv(size)

    def sendall(self, data: bytes) -> None:
        """Send *data* to the proxy."""
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
        """Return why there is no proxy."""
        self._channel.status_event.wait(1.0)
        stderr = self._channel.recv_stderr(1 << 14) if self._channel.recv_stderr_ready() else b""
        status = self._channel.exit_status if self._channel.exit_status_ready() else -1
        if status in NOT_FOUND or b"No module named" in stderr:
            return f"there is no Holdfast in {self._python}: {CURE}"
        last = printable(stderr.strip().splitlines()[-1])[:MAX_SHOWN] if stderr.strip() else ""
        return f"{self._python} exited with status {status}{f' ({last})' if last else ''}"


class SshTransport:
    """Starts proxies over SSH."""

    def __init__(self, cluster: SshCluster) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._connector = Connector(cluster)
        self._targets = {target.node: target for target in self._connector.targets}

    def open(self, node: str, until: float, then: float) -> SshPipe:
        """Log in to *node* and start its proxy; raise `NodeLost` when it is unreachable, `NodeStateUnknown` when that is unknown."""
        target = self._targets[node]
        python = f"{target.directory}/env/bin/python"
        try:
            connection = self._connector.open(target, until, then=then)
        except NodeUnreachable as error:
            raise NodeLost(node, str(error)) from error
        except ProbeFailed as error:
            raise NodeStateUnknown(node, str(error)) from error
        try:
            with cut_at(then, connection.cut):
                channel = connection.transport.open_session(timeout=max(0.01, then - time.monotonic()))
                # The node's shell reads this line: the path has no letter that is special to a shell (`Program`).
                # The protocol is for a node that got a newer Holdfast while this controller runs: the older one is still there.
                channel.exec_command(f"exec {python} -I -m holdfast.agent.node.proxy --protocol {PROTOCOL:d}")
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.cut()
            raise NodeLost(node, f"login succeeded, but no session could be opened: {str(error) or type(error).__name__}") from error
        return SshPipe(connection, channel, python)

    def address(self, node: str) -> str:
        """Return the address at which the node is reached."""
        return self._targets[node].endpoint.address

    def close(self) -> None:
        """Close the connections to jump hosts; each pipe has its own."""
        self._connector.close()
