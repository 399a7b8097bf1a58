"""A program of ours that runs on a node over a connection: it gets its source first, is asked by lines, and answers with lines."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Final

import paramiko

from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.errors import Unanswered, Unasked, printable
from holdfast.probe.readers.bundle import BOOT

MOST: Final = 4 << 20
"""Bytes that an answer may have: a hundred times what a node with eight GPUs tells."""
SHOWN: Final = 160
NOT_FOUND: Final = 127
"""A shell's exit status for a program that is not there."""


class RemoteProgram:
    """A program on a node. One thread at a time may ask it."""

    def __init__(self, connection: Connection, python: str, source: str, until: float, *, fruit: str = "answer") -> None:
        """Start *python* with *source*; *fruit* is what its answers are called when none comes. Raise `Unanswered` or `Unasked`."""
        self._connection, self._python, self._fruit = connection, python, fruit
        self._mark = secrets.token_hex(8)
        self._heard, self._noise = bytearray(), b""
        self._asked = 0
        try:
            self._channel = connection.transport.open_session(timeout=_left(until))
            self._channel.settimeout(_left(until))
            # A shell of the node's own reads this line: the interpreter's name is of letters that no shell takes for its own (`Program`).
            self._channel.exec_command(f"exec {python} -I -c '{BOOT}'")
            text = source.encode()
            self._channel.sendall(f"{len(text)}\n".encode() + text)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._why(error) from error

    @property
    def lives(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        return self._connection.lives and not self._channel.closed and not self._channel.eof_received

    def ask(self, until: float, **question: object) -> str:
        """Return the rest of the line that answers *question*, by *until* (monotonic); raise `Unanswered` or `Unasked`."""
        self._asked += 1
        mark = f"{self._mark}-{self._asked}"
        try:
            self._channel.settimeout(_left(until))
            self._channel.sendall((json.dumps({**question, "mark": mark}) + "\n").encode())
            return self._answer(f"{mark} ".encode(), until)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._why(error) from error

    def _answer(self, mark: bytes, until: float) -> str:
        """Return the line that begins with *mark*: what a login shell or an earlier question says besides is no answer."""
        seen, taken = 0, 0
        while True:
            end = self._heard.find(b"\n", seen)
            if end >= 0:
                line = bytes(self._heard[:end])
                del self._heard[: end + 1]
                seen = 0
                if line.startswith(mark):
                    return line[len(mark) :].decode("utf-8", "replace")
                self._noise = line or self._noise
                continue
            if time.monotonic() > until:  # somebody may talk all the time, and say nothing
                raise TimeoutError
            seen = len(self._heard)
            self._channel.settimeout(_left(until))
            data = self._channel.recv(1 << 16)
            taken += len(data)
            if not data:
                raise EOFError
            if taken > MOST:
                raise Unasked(f"it answered with more than {MOST >> 20} MiB that is no {self._fruit}, ending in {printable(data[-SHOWN:])}")
            self._heard += data

    def _why(self, error: Exception) -> Unanswered | Unasked:
        """Return what it means that no answer came."""
        if not self._connection.lives:
            return Unanswered(f"the connection to {self._connection.door} ended before it answered")
        channel: Any = getattr(self, "_channel", None)
        if isinstance(error, TimeoutError):
            return Unasked(
                f"it let us in, and {self._python} gave no {self._fruit} in time{self._said(channel)}: it hangs, or the node is overloaded"
            )
        if channel is None:
            return Unasked(f"it let us in, and opened no session: {error}. See `MaxSessions` of its sshd")
        channel.status_event.wait(1.0)
        status = channel.exit_status if channel.exit_status_ready() else -1
        if status == NOT_FOUND:
            return Unasked(f"it has no {self._python}{self._said(channel)}. Install it, or name another interpreter in `python`")
        ended = f"ended with status {status}" if status >= 0 else "was ended"
        return Unasked(f"{self._python} {ended} and gave no {self._fruit}{self._said(channel)}")

    def _said(self, channel: Any) -> str:  # noqa: ANN401 (a channel, where there is one)
        """Return the last thing that it said instead."""
        said = bytearray(self._heard)
        while channel is not None and channel.recv_stderr_ready():
            said += channel.recv_stderr(1 << 16)
        words = bytes(said).strip() or self._noise
        return f" ({printable(words.splitlines()[-1][-SHOWN:])})" if words else ""


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())
