"""The checks' program on one node, as who gives it orders sees it: over the pipes of a child, or over a channel of an SSH connection."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from detectors.burn_in_results import Check, CheckMark
from detectors.codec import Misshapen, unpacked
from holdfast.probe.burn_in.bundle import program

START: Final = 30.0
"""Seconds that an interpreter may need to start on a busy node."""
OVERTIME: Final = 60.0
"""Seconds that an order may take beyond what it was given: at the lowest priority, beside training, and torch takes long to load."""
MOST: Final = 4 << 20
"""Bytes that one answer may have."""
PINGS: Final = 9
"""Questions about a node's clock; the quickest answer counts."""


class Silent(Exception):
    """A node did not do what it was told, for a reason that speaks against nobody yet: the order was not carried out."""


class Stream(Protocol):
    """A socket, or what behaves like one."""

    def settimeout(self, timeout: float | None, /) -> None:
        """Set how long a call may wait."""

    def sendall(self, data: bytes, /) -> Any:  # noqa: ANN401 (a socket returns nothing, a channel nothing of use)
        """Send all of *data*."""

    def recv(self, size: int, /) -> bytes:
        """Return what has come; nothing at the end."""


class BurnInSession:
    """A program on a node that carries out orders. One thread at a time may use it."""

    def __init__(self, node: str, stream: Stream, cut: Callable[[], None], *, nice: int = 0, ended: Callable[[], str] = lambda: "") -> None:
        """Send the program and wait until it is ready; raise `Silent` when it does not come up. *ended* says why a stream ended."""
        self.node = node
        self._stream, self._cut, self._ended = stream, cut, ended
        self._heard = bytearray()
        self._answers: dict[str, list[Any]] = {}
        try:
            source = program(nice).encode()
            self._send(f"{len(source)}\n".encode() + source)
            self.facts: dict[str, Any] = self.hear("ready", time.monotonic() + START)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, *, seconds: float, **facts: object) -> list[Check]:
        """Have an order carried out that works for *seconds*; where no answer comes, it is blind."""
        try:
            mark = self.begin(do, seconds=seconds, **facts)
            return self.checks(mark, time.monotonic() + seconds + 2 * OVERTIME)
        except Silent as error:
            return [Check(name=do, mark=CheckMark.SKIPPED, words=str(error))]

    def begin(self, do: str, *, seconds: float, **facts: object) -> str:
        """Give an order; return the mark under which its answers come."""
        mark = secrets.token_hex(8)
        order = {"do": do, "mark": mark, "seconds": seconds, "limit": seconds + OVERTIME, **facts}
        self._send((json.dumps(order) + "\n").encode())
        return mark

    def checks(self, mark: str, until: float) -> list[Check]:
        """Return the checks that an order ended with."""
        try:
            return [unpacked(Check, one) for one in self.hear(mark, until)]
        except (Misshapen, TypeError) as error:
            raise Silent(f"its answer makes no sense: {error}") from error

    def hear(self, mark: str, until: float) -> Any:  # noqa: ANN401 (any JSON)
        """Return the next answer under *mark*, by *until* (monotonic)."""
        while not self._answers.get(mark):
            self._read(until)
        return self._answers[mark].pop(0)

    def offset(self, now: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return by how many seconds the node's clock is ahead of *now*, and by how many that may be wrong: half of the quickest way."""
        found = []
        for _ in range(PINGS):
            at, began = now(), time.monotonic()
            mark = self.begin("time", seconds=0)
            theirs = float(self.hear(mark, time.monotonic() + START)["time"])
            way = time.monotonic() - began
            found.append((way, theirs - (at + way / 2)))
        way, off = min(found)
        return off, way / 2

    def close(self) -> None:
        """Let go of the node: the program and all that it started end."""
        self._cut()

    def _send(self, data: bytes) -> None:
        try:
            self._stream.settimeout(START)
            self._stream.sendall(data)
        except (OSError, EOFError) as error:
            raise Silent(self._why(error)) from error

    def _read(self, until: float) -> None:
        try:
            self._stream.settimeout(max(0.01, until - time.monotonic()))
            data = self._stream.recv(1 << 16)
        except TimeoutError as error:
            raise Silent("no answer came in time") from error
        except (OSError, EOFError) as error:
            raise Silent(self._why(error)) from error
        self._heard += data
        if not data or len(self._heard) > MOST:
            raise Silent(self._why(EOFError("it ended")))
        while (end := self._heard.find(b"\n")) >= 0:
            mark, _, told = bytes(self._heard[:end]).decode("utf-8", "replace").partition(" ")
            del self._heard[: end + 1]
            self._keep(mark, told)

    def _keep(self, mark: str, told: str) -> None:
        """Keep an answer; what a login shell says besides is none."""
        try:
            self._answers.setdefault(mark, []).append(json.loads(told))
        except ValueError:
            self._answers.setdefault("", []).append(f"{mark} {told}"[:200])

    def _why(self, error: Exception) -> str:
        said = (self._ended() or str(self._answers.get("", [""])[-1])).strip()
        return f"the program of checks ended or could not be reached: {said or error}"
