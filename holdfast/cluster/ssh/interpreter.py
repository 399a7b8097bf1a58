"""An interpreter on a node, over a connection to it."""

from __future__ import annotations

import time
from contextlib import suppress

import paramiko

from holdfast.cluster.ssh.connection import Connection
from holdfast.probe.remote.bundle import BOOT
from holdfast.probe.remote.errors import NodeUnreachable, ProbeFailed


class SshInterpreter:
    """An interpreter that takes a program over a channel of its own. Others may run over the same connection."""

    def __init__(self, connection: Connection, python: str, until: float) -> None:
        """Start *python* by *until* (monotonic); raise `NoAnswer`. Its calls know no deadline for starting: a watchdog has to end them."""
        self.python, self._connection = python, connection
        done = "opened no session"
        try:
            self._channel = connection.transport.open_session(timeout=max(0.01, until - time.monotonic()))
            done = f"did not start {python}"
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            # A shell of the node's own reads this line: the interpreter's name is of letters that no shell takes for its own (`Program`).
            self._channel.exec_command(f"exec {python} -I -c '{BOOT}'")
        except (paramiko.SSHException, EOFError, OSError) as error:
            if lost := self.connection_error():
                raise NodeUnreachable(lost) from error
            raise ProbeFailed(f"it let us in, and {done}: {str(error) or type(error).__name__}. See `MaxSessions` of its sshd") from error

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        return self._connection.is_alive and not self._channel.closed and not self._channel.eof_received

    def settimeout(self, timeout: float | None) -> None:
        """Set how many seconds a call may wait."""
        self._channel.settimeout(timeout)

    def sendall(self, data: bytes) -> None:
        """Send all of *data* to its input."""
        try:
            self._channel.sendall(data)
        except paramiko.SSHException as error:
            raise BrokenPipeError(str(error)) from error

    def recv(self, size: int) -> bytes:
        """Return what has come of its output; nothing at the end."""
        return self._channel.recv(size)

    def stderr(self) -> bytes:
        """Return what it wrote to its standard error, as far as that was not returned yet."""
        said = bytearray()
        while self._channel.recv_stderr_ready():
            said += self._channel.recv_stderr(1 << 16)
        return bytes(said)

    def exit_status(self) -> int | None:
        """Return its exit status after waiting for a moment; nothing where a signal ended it, or it runs."""
        self._channel.status_event.wait(1.0)
        return self._channel.exit_status if self._channel.exit_status_ready() else None

    def connection_error(self) -> str:
        """Say that the connection ended; nothing where it lives."""
        return "" if self._connection.is_alive else f"the connection to {self._connection.endpoint} ended before it answered"

    def close(self) -> None:
        """End the connection, and with it the interpreter."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._connection.cut()
