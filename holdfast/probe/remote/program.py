"""A program of ours that runs on a node: it gets its source first, is asked by lines of JSON, and answers with such lines."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from holdfast.probe.remote.errors import NodeUnreachable, ProbeFailed, printable

MAX_BYTES: Final = 4 << 20
"""Bytes that an answer may have: a hundred times what a node with eight GPUs tells."""
SHOWN: Final = 160
NOT_FOUND: Final = 127
"""A shell's exit status for a program that is not there."""


class Interpreter(Protocol):
    """An interpreter that was started with `bundle.BOOT`, wherever it runs. Its calls raise `OSError` or `EOFError`."""

    python: str
    """Its name, as a user knows it."""

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        ...

    def settimeout(self, timeout: float | None, /) -> None:
        """Set how many seconds a call may wait."""

    def sendall(self, data: bytes, /) -> object:
        """Send all of *data* to its input."""

    def recv(self, size: int, /) -> bytes:
        """Return what has come of its output; nothing at the end."""
        ...

    def stderr(self) -> bytes:
        """Return what it wrote to its standard error, as far as that was not returned yet."""
        ...

    def exit_status(self) -> int | None:
        """Return its exit status, below zero for a signal, after waiting for a moment; nothing where that is not known."""
        ...

    def connection_error(self) -> str:
        """Say why nothing reaches it any more; nothing where something may."""
        ...

    def close(self) -> None:
        """End the interpreter, and the connection that is for it."""


class RemoteProgram:
    """A program on a node. One thread at a time may ask it, one question at a time."""

    def __init__(self, interpreter: Interpreter, source: str, until: float, *, expected: str = "answer") -> None:
        """Send *source* by *until* (monotonic); *expected* is what its answers are called when none comes. Raise `NoAnswer`."""
        self._interpreter, self._expected = interpreter, expected
        self._mark = secrets.token_hex(8)
        self._received, self._noise = bytearray(), b""
        self._asked = 0
        text = source.encode()
        self._send(f"{len(text)}\n".encode() + text, until)

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        return self._interpreter.is_alive

    def ask(self, until: float, **question: object) -> dict[str, Any]:
        """Return the object that answers *question*, by *until* (monotonic); raise `NoAnswer`."""
        answer = self.answer(self.begin(until, **question), until)
        if not isinstance(answer, dict):
            raise ProbeFailed(f"its answer makes no sense: {str(answer)[:80]!r}")
        return answer

    def begin(self, until: float, **question: object) -> str:
        """Send *question* by *until* (monotonic); return the mark under which its answers come. Raise `NoAnswer`."""
        self._asked += 1
        mark = f"{self._mark}-{self._asked}"
        self._send((json.dumps({**question, "mark": mark}) + "\n").encode(), until)
        return mark

    def answer(self, mark: str, until: float) -> Any:  # noqa: ANN401 (any JSON)
        """Return the next answer under *mark*, by *until* (monotonic); those under other marks are left out. Raise `NoAnswer`."""
        try:
            line = self._line(f"{mark} ".encode(), until)
        except (EOFError, OSError) as error:
            raise self._error(error) from error
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProbeFailed(f"its answer makes no sense: {printable(line[:SHOWN])}") from None

    def clock_offset(self, times: int, seconds: float, now: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return by how many seconds the node's clock is ahead of *now*, and by how many that may be wrong: half of the quickest way.

        It is asked so many *times*, and may take *seconds* for each. Raise `NoAnswer`.
        """
        found = []
        for _ in range(times):
            at, began = now(), time.monotonic()
            answer = self.ask(began + seconds, do="time", seconds=seconds)
            way = time.monotonic() - began
            theirs = answer.get("time")
            if not isinstance(theirs, int | float):
                raise ProbeFailed(f"its answer makes no sense: {str(answer)[:80]!r}")
            found.append((way / 2, theirs - (at + way / 2)))
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

    def _line(self, mark: bytes, until: float) -> bytes:
        """Return the rest of the line that begins with *mark*: what a login shell or an earlier question says besides is no answer."""
        seen, taken = 0, 0
        while True:
            end = self._received.find(b"\n", seen)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                seen = 0
                if line.startswith(mark):
                    return line[len(mark) :]
                self._noise = line or self._noise
                continue
            if time.monotonic() > until:  # somebody may talk all the time, and say nothing
                raise TimeoutError
            seen = len(self._received)
            self._interpreter.settimeout(_left(until))
            data = self._interpreter.recv(1 << 16)
            taken += len(data)
            if not data:
                raise EOFError
            if taken > MAX_BYTES:
                limit, end_of_it = f"{MAX_BYTES >> 20} MiB", printable(data[-SHOWN:])
                raise ProbeFailed(f"it answered with more than {limit} that is no {self._expected}, ending in {end_of_it}")
            self._received += data

    def _error(self, error: Exception) -> NodeUnreachable | ProbeFailed:
        """Return what it means that no answer came."""
        if lost := self._interpreter.connection_error():
            return NodeUnreachable(lost)
        python = self._interpreter.python
        if isinstance(error, TimeoutError):
            late = f"{python} gave no {self._expected} in time{self._last_output()}"
            return ProbeFailed(f"it let us in, and {late}: it hangs, or the node is overloaded")
        status = self._interpreter.exit_status()
        if status == NOT_FOUND:
            return ProbeFailed(f"it has no {python}{self._last_output()}. Install it, or name another interpreter in `python`")
        ended = f"ended with status {status}" if status is not None and status >= 0 else "was ended"
        return ProbeFailed(f"{python} {ended} and gave no {self._expected}{self._last_output()}")

    def _last_output(self) -> str:
        """Return the last thing that it said instead."""
        words = (bytes(self._received) + self._interpreter.stderr()).strip() or self._noise
        return f" ({printable(words.splitlines()[-1][-SHOWN:])})" if words else ""


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())
