"""Send a program to an interpreter on a node, and ask it questions: a line of JSON each, answered by such lines."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from holdfast.probe.remote.bundle import BOOT

MAX_BYTES: Final = 4 << 20
"""Bytes of one answer: a hundred times what a node with eight GPUs sends."""
MAX_STDERR: Final = 1 << 12
"""Bytes that are kept of the end of a child's standard error."""
MAX_SHOWN: Final = 160
"""Letters of the program's output that an error shows."""
NOT_FOUND: Final = 127
"""A shell's exit status for a program that does not exist."""


class NoAnswer(Exception):
    """A program on a node gave no answer."""


class NodeUnreachable(NoAnswer):
    """The node does not answer: a fault of the node when it happens again and again."""


class ProbeFailed(NoAnswer):
    """The probe could not be carried out: it says nothing about the node."""


def printable(text: bytes) -> str:
    """Return output of a node with unprintable letters replaced: it may contain anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.decode("utf-8", "replace"))


class Interpreter(Protocol):
    """An interpreter that was started with `bundle.BOOT`, wherever it runs. Its methods raise ``OSError`` or ``EOFError``."""

    python: str
    """Its name, as the user writes it."""

    @property
    def is_alive(self) -> bool:
        """Return whether it can be asked, as far as is known."""
        ...

    def settimeout(self, timeout: float | None, /) -> None:
        """Set how many seconds a call may wait."""

    def sendall(self, data: bytes, /) -> object:
        """Send all of *data* to its input."""

    def recv(self, size: int, /) -> bytes:
        """Return output that has arrived; nothing at the end."""
        ...

    def stderr(self) -> bytes:
        """Return what it wrote to its standard error since the last call."""
        ...

    def exit_status(self) -> int | None:
        """Return its exit status, below zero for a signal, after waiting for a moment; nothing where that is not known."""
        ...

    def connection_error(self) -> str:
        """Return why nothing can reach it any more; nothing while something can."""
        ...

    def close(self) -> None:
        """End the interpreter, and its connection."""


class ChildInterpreter:
    """An interpreter that is a child of this process, in its own session."""

    def __init__(self, python: str = sys.executable) -> None:
        """Start *python*; raise ``OSError`` where that fails."""
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
        self.settimeout, self.sendall, self.recv = self._socket.settimeout, self._socket.sendall, self._socket.recv

    @property
    def is_alive(self) -> bool:
        """Return whether it can be asked, as far as is known."""
        return self._child.poll() is None

    def stderr(self) -> bytes:
        """Return the end of what it wrote to its standard error. The child writes at the file's position, so that is not moved."""
        if self._stderr.closed:
            return b""
        return os.pread(self._stderr.fileno(), MAX_STDERR, max(0, os.fstat(self._stderr.fileno()).st_size - MAX_STDERR))

    def exit_status(self) -> int | None:
        """Return its exit status, below zero for a signal, after waiting for a moment; nothing where that is not known."""
        try:
            return self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def connection_error(self) -> str:
        """Return nothing: there is no connection in between."""
        return ""

    def close(self) -> None:
        """End the child: the program exits with its input, and ends its own children. After five seconds all are killed."""
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


class RemoteProgram:
    """A program on a node. One thread at a time may use it, with one question at a time."""

    def __init__(self, interpreter: Interpreter, source: str, until: float, *, expected: str = "answer") -> None:
        """Send *source* by *until* (monotonic); *expected* names its answers in error messages. Raise `NoAnswer`."""
        self._interpreter, self._expected = interpreter, expected
        self._prefix = secrets.token_hex(8)
        self._received, self._other_output = bytearray(), b""
        self._questions = 0
        text = source.encode()
        self._send(f"{len(text)}\n".encode() + text, until)

    @property
    def is_alive(self) -> bool:
        """Return whether it can be asked, as far as is known."""
        return self._interpreter.is_alive

    def ask(self, until: float, **question: object) -> dict[str, Any]:
        """Return the object that answers *question*, by *until* (monotonic); raise `NoAnswer`."""
        answer = self.answer(self.begin(until, **question), until)
        if not isinstance(answer, dict):
            raise ProbeFailed(f"its answer is malformed: {str(answer)[:80]!r}")
        return answer

    def begin(self, until: float, **question: object) -> str:
        """Send *question* by *until* (monotonic); return the mark that its answers carry. Raise `NoAnswer`."""
        self._questions += 1
        mark = f"{self._prefix}-{self._questions}"
        self._send((json.dumps({**question, "mark": mark}) + "\n").encode(), until)
        return mark

    def answer(self, mark: str, until: float) -> Any:  # noqa: ANN401 (any JSON)
        """Return the next answer with *mark*, by *until* (monotonic); answers with another mark are dropped. Raise `NoAnswer`."""
        try:
            line = self._line(f"{mark} ".encode(), until)
        except (EOFError, OSError) as error:
            raise self._error(error) from error
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProbeFailed(f"its answer is malformed: {printable(line[:MAX_SHOWN])}") from None

    def clock_offset(self, times: int, seconds: float, now: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return by how many seconds the node's clock is ahead of *now*, and the error of that: half of the shortest round trip.

        It is asked *times* times, with *seconds* for each. Raise `NoAnswer`.
        """
        found = []
        for _ in range(times):
            at, began = now(), time.monotonic()
            answer = self.ask(began + seconds, do="time", seconds=seconds)
            round_trip = time.monotonic() - began
            theirs = answer.get("time")
            if not isinstance(theirs, int | float):
                raise ProbeFailed(f"its answer is malformed: {str(answer)[:80]!r}")
            found.append((round_trip / 2, theirs - (at + round_trip / 2)))
        uncertain, ahead = min(found)
        return ahead, uncertain

    def close(self) -> None:
        """End the program, and all that it started."""
        self._interpreter.close()

    def _send(self, data: bytes, until: float) -> None:
        try:
            self._interpreter.settimeout(_left(until))
            self._interpreter.sendall(data)
        except (EOFError, OSError) as error:
            raise self._error(error) from error

    def _line(self, prefix: bytes, until: float) -> bytes:
        """Return the rest of the line that begins with *prefix*; output of a login shell and late answers are skipped."""
        searched, taken = 0, 0
        while True:
            end = self._received.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                searched = 0
                if line.startswith(prefix):
                    return line[len(prefix) :]
                self._other_output = line or self._other_output
                continue
            if time.monotonic() > until:  # other output may go on for ever
                raise TimeoutError
            searched = len(self._received)
            self._interpreter.settimeout(_left(until))
            data = self._interpreter.recv(1 << 16)
            taken += len(data)
            if not data:
                raise EOFError
            if taken > MAX_BYTES:
                limit, end_of_it = f"{MAX_BYTES >> 20} MiB", printable(data[-MAX_SHOWN:])
                raise ProbeFailed(f"it sent more than {limit} without a valid {self._expected}, ending in {end_of_it}")
            self._received += data

    def _error(self, error: Exception) -> NodeUnreachable | ProbeFailed:
        """Return what it means that no answer came."""
        if lost := self._interpreter.connection_error():
            return NodeUnreachable(lost)
        output = (bytes(self._received) + self._interpreter.stderr()).strip() or self._other_output
        last = f" ({printable(output.splitlines()[-1][-MAX_SHOWN:])})" if output else ""
        python = self._interpreter.python
        if isinstance(error, TimeoutError):
            return ProbeFailed(f"login succeeded, but {python} gave no {self._expected} in time{last}: it hangs, or the node is overloaded")
        status = self._interpreter.exit_status()
        if status == NOT_FOUND:
            return ProbeFailed(f"it has no {python}{last}. Install it, or name another interpreter in `python`")
        ended = f"exited with status {status}" if status is not None and status >= 0 else "was killed"
        return ProbeFailed(f"{python} {ended} and gave no {self._expected}{last}")


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())
