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

    def to(self, jump_hosts: tuple[Endpoint, ...], until: float) -> Connection | None:
        """Return a connection to the last machine of *jump_hosts*, or nothing for a direct one; raise `ProbeFailed` when there is none.

        A jump host that does not answer speaks against no node behind it.
        """
        if not jump_hosts:
            return None
        with self._lock:
            turn = self._one_at_a_time.setdefault(jump_hosts, threading.Lock())
        if not turn.acquire(timeout=max(0.01, until - time.monotonic())):
            raise ProbeFailed(f"jump host {jump_hosts[-1]} could not be reached in time")
        try:
            return self._reached(jump_hosts, until)
        finally:
            turn.release()

    def _reached(self, jump_hosts: tuple[Endpoint, ...], until: float) -> Connection:
        present = self._open.get(jump_hosts)
        if present is not None and present.is_alive and (jump_hosts not in self._doubted or _answers(present, until)):
            self._doubted.discard(jump_hosts)
            return present
        if present is not None:
            present.cut()
        at, why = self._failed.get(jump_hosts, (0.0, ""))
        if why and time.monotonic() - at < AGAIN:
            raise ProbeFailed(why)
        try:
            before = self.to(jump_hosts[:-1], until)
            self._open[jump_hosts] = self._opener.open(jump_hosts[-1], until, via=before)
        except NoAnswer as error:
            why = str(error) if isinstance(error, ProbeFailed) else f"jump host {jump_hosts[-1]} could not be reached: {error}"
            self._failed[jump_hosts] = (time.monotonic(), why)
            raise ProbeFailed(why) from error
        return self._open[jump_hosts]

    def doubt(self, jump_hosts: tuple[Endpoint, ...]) -> None:
        """Have the last machine of *jump_hosts* prove that it answers before it is used again: a node behind it did not."""
        if jump_hosts:
            self._doubted.add(jump_hosts)

    def forget(self) -> None:
        """Try jump hosts anew that could not be reached: what kept us from it was mended."""
        self._failed.clear()

    def close(self) -> None:
        """End all connections, the innermost first."""
        for jump_hosts in sorted(self._open, key=len, reverse=True):
            self._open[jump_hosts].cut()
        self._open.clear()


def _answers(present: Connection, until: float) -> bool:
    """Tell whether a jump host that is connected does anything."""
    with suppress(paramiko.SSHException, EOFError, OSError):
        present.transport.open_session(timeout=min(PROOF, max(0.01, (until - time.monotonic()) / 3))).close()
        return True
    return False
