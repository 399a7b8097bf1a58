"""Run a Python interpreter on a node over an SSH connection."""

from __future__ import annotations

import time
from contextlib import suppress

import paramiko

from holdfast.cluster.ssh.connection import Connection
from holdfast.probe.remote.bundle import BOOT
from holdfast.probe.remote.program import NodeUnreachable, ProbeFailed


class SshInterpreter:
    """An interpreter that takes a program over its own channel. Others may run over the same connection."""

    def __init__(self, connection: Connection, python: str, until: float) -> None:
        """Start *python* by *until* (monotonic); raise `NoAnswer`. Starting may hang: the caller needs `cut_at`."""
        self.python, self._connection = python, connection
        failed = "could not open a session"
        try:
            self._channel = connection.transport.open_session(timeout=max(0.01, until - time.monotonic()))
            failed = f"could not start {python}"
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            # The node's shell reads this line: the interpreter's name has no letter that is special to a shell (`Program`).
            self._channel.exec_command(f"exec {python} -I -c '{BOOT}'")
        except (paramiko.SSHException, EOFError, OSError) as error:
            if lost := self.connection_error():
                raise NodeUnreachable(lost) from error
            why = str(error) or type(error).__name__
            raise ProbeFailed(f"login succeeded, but {failed}: {why}. See `MaxSessions` of its sshd") from error

    @property
    def is_alive(self) -> bool:
        """Return whether it can be asked, as far as is known."""
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
        """Return output that has arrived; nothing at the end."""
        return self._channel.recv(size)

    def stderr(self) -> bytes:
        """Return what it wrote to its standard error since the last call."""
        received = bytearray()
        while self._channel.recv_stderr_ready():
            received += self._channel.recv_stderr(1 << 16)
        return bytes(received)

    def exit_status(self) -> int | None:
        """Return its exit status after waiting for a moment; nothing where a signal ended it, or it runs."""
        self._channel.status_event.wait(1.0)
        return self._channel.exit_status if self._channel.exit_status_ready() else None

    def connection_error(self) -> str:
        """Return that the connection has ended; nothing while it is alive."""
        return "" if self._connection.is_alive else f"the connection to {self._connection.endpoint} ended before it answered"

    def close(self) -> None:
        """End the connection, and with it the interpreter."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._connection.cut()
