"""An interpreter of this machine that runs a program as a node's would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Final

from holdfast.probe.remote.bundle import BOOT

SHOWN: Final = 1 << 12
"""Bytes of its last words that are kept."""


class ChildInterpreter:
    """A child of this process, in a session of its own."""

    def __init__(self, python: str = sys.executable) -> None:
        """Start *python*; raise `OSError` where that cannot be."""
        self.python = python
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [python, "-I", "-c", BOOT],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._stderr,
                    cwd="/",
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            self._stderr.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        return self._child.poll() is None

    def settimeout(self, timeout: float | None) -> None:
        """Set how many seconds a call may wait."""
        self._socket.settimeout(timeout)

    def sendall(self, data: bytes) -> None:
        """Send all of *data* to its input."""
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """Return what has come of its output; nothing at the end."""
        return self._socket.recv(size)

    def stderr(self) -> bytes:
        """Return the end of what it wrote to its standard error. The child writes where the file stands, so that is left as it is."""
        if self._stderr.closed:
            return b""
        return os.pread(self._stderr.fileno(), SHOWN, max(0, os.fstat(self._stderr.fileno()).st_size - SHOWN))

    def exit_status(self) -> int | None:
        """Return its exit status, below zero for a signal, after waiting for a moment; nothing where that is not known."""
        try:
            return self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def connection_error(self) -> str:
        """Say nothing: no connection lies in between."""
        return ""

    def close(self) -> None:
        """End the child. The program ends by itself with its input, and takes its children with it: it is not waited for longer than so."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for an answer
        self._socket.close()
        try:
            self._child.wait(5.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._stderr.close()
