"""Connections to jump hosts: one for all nodes behind it, chained where the way has several."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

import paramiko

from holdfast.cluster.ssh.connection import Connection, Opener
from holdfast.cluster.ssh.endpoints import Endpoint
from holdfast.probe.remote.errors import NoAnswer, ProbeFailed

AGAIN: Final = 2.0
"""Seconds for which a jump host that could not be reached is not tried anew: all nodes behind it ask for it at once."""
PROOF: Final = 3.0
"""Seconds that a jump host that is in doubt may take to answer, if that leaves two thirds of the time for another connection to it."""


class Jumps:
    """The jump hosts that are connected."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._open: dict[tuple[Endpoint, ...], Connection] = {}
        self._failed: dict[tuple[Endpoint, ...], tuple[float, str]] = {}
        self._doubted: set[tuple[Endpoint, ...]] = set()
        self._one_at_a_time: dict[tuple[Endpoint, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def to(self, way: tuple[Endpoint, ...], until: float) -> Connection | None:
        """Return a connection to the last machine of *way*, or nothing for a direct one; raise `ProbeFailed` when there is none.

        A jump host that does not answer speaks against no node behind it.
        """
        if not way:
            return None
        with self._lock:
            turn = self._one_at_a_time.setdefault(way, threading.Lock())
        if not turn.acquire(timeout=max(0.01, until - time.monotonic())):
            raise ProbeFailed(f"jump host {way[-1]} could not be reached in time")
        try:
            return self._reached(way, until)
        finally:
            turn.release()

    def _reached(self, way: tuple[Endpoint, ...], until: float) -> Connection:
        present = self._open.get(way)
        if present is not None and present.lives and (way not in self._doubted or _answers(present, until)):
            self._doubted.discard(way)
            return present
        if present is not None:
            present.cut()
        at, why = self._failed.get(way, (0.0, ""))
        if why and time.monotonic() - at < AGAIN:
            raise ProbeFailed(why)
        try:
            before = self.to(way[:-1], until)
            self._open[way] = self._opener.open(way[-1], until, via=before)
        except NoAnswer as error:
            why = str(error) if isinstance(error, ProbeFailed) else f"jump host {way[-1]} could not be reached: {error}"
            self._failed[way] = (time.monotonic(), why)
            raise ProbeFailed(why) from error
        return self._open[way]

    def doubt(self, way: tuple[Endpoint, ...]) -> None:
        """Have the last machine of *way* prove that it answers before it is used again: a node behind it did not."""
        if way:
            self._doubted.add(way)

    def forget(self) -> None:
        """Try jump hosts anew that could not be reached: what kept us from it was mended."""
        self._failed.clear()

    def close(self) -> None:
        """End all connections, the innermost first."""
        for way in sorted(self._open, key=len, reverse=True):
            self._open[way].cut()
        self._open.clear()


def _answers(present: Connection, until: float) -> bool:
    """Tell whether a jump host that is connected does anything."""
    with suppress(paramiko.SSHException, EOFError, OSError):
        present.transport.open_session(timeout=min(PROOF, max(0.01, (until - time.monotonic()) / 3))).close()
        return True
    return False
