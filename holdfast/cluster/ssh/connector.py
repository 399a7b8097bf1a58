"""Open connections to the nodes of a cluster, through its jump hosts. Everything that logs in to nodes uses it.

A user's `~/.ssh/config` is ignored, and so paramiko's `SSHConfig` is not used: jump hosts, users and keys are the cluster file's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import paramiko
from paramiko import PKey

from holdfast.cluster.ssh.connection import Connection, Endpoint, Opener
from holdfast.cluster.ssh.credentials import Keys, own_name
from holdfast.cluster.ssh.known_hosts import KnownHosts
from holdfast.probe.remote.program import NoAnswer, NodeUnreachable, ProbeFailed
from holdfast.spec import SshCluster

RETRY_SECONDS: Final = 2.0
"""An unreachable jump host is not tried again before this time: all nodes behind it ask for it at once."""
CHECK_SECONDS: Final = 3.0
"""Time for a suspect jump host to answer, if that leaves two thirds of the time for another connection to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node, and the endpoints on the way to it."""

    node: str
    endpoint: Endpoint
    python: str
    """Its interpreter."""
    directory: str
    """Holdfast's folder there."""
    jump_hosts: tuple[Endpoint, ...] = ()
    """First to last."""


def targets_of(cluster: SshCluster, own_name: Callable[[], str]) -> list[Target]:
    """Return the nodes of *cluster* in its order; *own_name* returns the user where the cluster file names none."""
    found = []
    for host in cluster.machines:
        user, key, phrase = host.user or cluster.user or own_name(), host.key or cluster.key, host.passphrase or cluster.passphrase
        endpoint = Endpoint(address=host.address or host.name, port=host.port or cluster.port, user=user, key=key, passphrase=phrase)
        jump_hosts = tuple(
            Endpoint(
                address=hop.address,
                port=hop.port,
                user=hop.user or user,
                key=hop.key or key,
                passphrase=hop.passphrase or phrase,
            )
            for hop in (cluster.jump if host.jump is None else host.jump)
        )
        folders = {"python": host.python or cluster.python, "directory": host.directory or cluster.directory}
        found.append(Target(node=host.name, endpoint=endpoint, jump_hosts=jump_hosts, **folders))
    return found


class Jumps:
    """The connections to jump hosts: one for all nodes behind it, through other jump hosts where there are several in a row."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._open: dict[tuple[Endpoint, ...], Connection] = {}
        self._failed: dict[tuple[Endpoint, ...], tuple[float, str]] = {}
        self._suspect: set[tuple[Endpoint, ...]] = set()
        self._locks: dict[tuple[Endpoint, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def to(self, jump_hosts: tuple[Endpoint, ...], until: float) -> Connection | None:
        """Return a connection to the last of *jump_hosts*, or nothing without any; raise `ProbeFailed` when there is none.

        An unreachable jump host says nothing about the nodes behind it.
        """
        if not jump_hosts:
            return None
        with self._lock:
            lock = self._locks.setdefault(jump_hosts, threading.Lock())
        if not lock.acquire(timeout=max(0.01, until - time.monotonic())):
            raise ProbeFailed(f"jump host {jump_hosts[-1]} could not be reached in time")
        try:
            return self._connection(jump_hosts, until)
        finally:
            lock.release()

    def _connection(self, jump_hosts: tuple[Endpoint, ...], until: float) -> Connection:
        present = self._open.get(jump_hosts)
        if present is not None and present.is_alive and (jump_hosts not in self._suspect or _responds(present, until)):
            self._suspect.discard(jump_hosts)
            return present
        if present is not None:
            present.cut()
        at, why = self._failed.get(jump_hosts, (0.0, ""))
        if why and time.monotonic() - at < RETRY_SECONDS:
            raise ProbeFailed(why)
        try:
            self._open[jump_hosts] = self._opener.open(jump_hosts[-1], until, via=self.to(jump_hosts[:-1], until))
        except NoAnswer as error:
            why = str(error) if isinstance(error, ProbeFailed) else f"jump host {jump_hosts[-1]} could not be reached: {error}"
            self._failed[jump_hosts] = (time.monotonic(), why)
            raise ProbeFailed(why) from error
        return self._open[jump_hosts]

    def suspect(self, jump_hosts: tuple[Endpoint, ...]) -> None:
        """Check the last of *jump_hosts* before it is used again: a node behind it was unreachable."""
        if jump_hosts:
            self._suspect.add(jump_hosts)

    def forget_failures(self) -> None:
        """Try unreachable jump hosts again at once: the cause was fixed."""
        self._failed.clear()

    def close(self) -> None:
        """Close all connections, the innermost first."""
        for jump_hosts in sorted(self._open, key=len, reverse=True):
            self._open[jump_hosts].cut()
        self._open.clear()


def _responds(present: Connection, until: float) -> bool:
    """Return whether a connected jump host opens a session."""
    with suppress(paramiko.SSHException, EOFError, OSError):
        present.transport.open_session(timeout=min(CHECK_SECONDS, max(0.01, (until - time.monotonic()) / 3))).close()
        return True
    return False


class Connector:
    """Opens connections to the nodes of one cluster."""

    def __init__(self, cluster: SshCluster, known: KnownHosts | None = None) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self.known, keys = known or KnownHosts.read(cluster.known_hosts), Keys()
        self.targets = targets_of(cluster, own_name)
        for endpoint in (endpoint for target in self.targets for endpoint in (target.endpoint, *target.jump_hosts)):
            keys.load(endpoint.key, endpoint.passphrase)
        self._opener = Opener(self.known, keys)
        self.jumps = Jumps(self._opener)

    def open(self, target: Target, until: float, *, then: float | None = None) -> Connection:
        """Return a new connection to *target* by *until* (monotonic); raise `NodeUnreachable` or `ProbeFailed`.

        With *then* the node must accept a connection by *until*, and complete the login by *then*.
        """
        try:
            return self._opener.open(target.endpoint, until, via=self.jumps.to(target.jump_hosts, until), then=then)
        except NodeUnreachable:
            self.jumps.suspect(target.jump_hosts)
            raise

    def key_of(self, endpoint: Endpoint, jump_hosts: tuple[Endpoint, ...], until: float) -> PKey:
        """Return the key that *endpoint*, behind *jump_hosts*, shows by *until*, trusted or not; raise `NoAnswer`."""
        return self._opener.key_of(endpoint, until, via=self.jumps.to(jump_hosts, until))

    def close(self) -> None:
        """Close the connections to jump hosts."""
        self.jumps.close()
