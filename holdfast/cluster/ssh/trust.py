"""Collect the host keys of a cluster's machines, for an operator to check and trust."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

from paramiko import PKey

from holdfast.cluster.ssh.connection import Endpoint
from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.known_hosts import HostKeyStatus, KnownHosts
from holdfast.probe.remote.program import NoAnswer
from holdfast.spec import SshCluster

MAX_THREADS: Final = 64
"""Machines that are asked at once."""
KEY_SECONDS: Final = 15.0
"""Time for a machine to show its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node, or a jump host."""

    endpoint: Endpoint
    jump_hosts: tuple[Endpoint, ...]
    nodes: tuple[str, ...]
    """The node that it is, or those behind it."""
    is_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """The key that a machine showed, or why it showed none."""

    machine: Machine
    key: PKey | None = None
    status: HostKeyStatus | None = None
    """What is known of the key; empty where none was shown."""
    why: str = ""
    """Why it must not be trusted."""

    @property
    def name(self) -> str:
        """Return the machine's name in known_hosts."""
        return self.machine.endpoint.known_as


class Trust:
    """Reads the keys of a cluster's machines, and adds those that a person has checked to known_hosts."""

    def __init__(self, cluster: SshCluster) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self.known = KnownHosts.read(cluster.known_hosts, create=True)
        self._connector = Connector(cluster, self.known)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connector.close()

    def machines(self, nodes: Collection[str] = ()) -> list[Machine]:
        """Return the *nodes* (default: all) after the jump hosts on the way to them, in the order in which they are reached."""
        behind: dict[tuple[Endpoint, tuple[Endpoint, ...]], list[str]] = {}
        found = []
        for target in self._connector.targets:
            if not nodes or target.node in nodes:
                for place, endpoint in enumerate(target.jump_hosts):
                    behind.setdefault((endpoint, target.jump_hosts[:place]), []).append(target.node)
                found.append(Machine(endpoint=target.endpoint, jump_hosts=target.jump_hosts, nodes=(target.node,), is_node=True))
        jumps = [
            Machine(endpoint=endpoint, jump_hosts=jump_hosts, nodes=tuple(names), is_node=False)
            for (endpoint, jump_hosts), names in behind.items()
        ]
        return sorted(jumps, key=lambda one: len(one.jump_hosts)) + found

    def ask(self, machines: Iterable[Machine]) -> list[ShownKey]:
        """Return the key of each of *machines*. Those behind an untrusted jump host show none."""
        machines = list(machines)
        with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(machines))), thread_name_prefix="trust") as pool:
            return list(pool.map(self._ask, machines))

    def _ask(self, machine: Machine) -> ShownKey:
        endpoint = machine.endpoint
        try:
            key = self._connector.key_of(endpoint, machine.jump_hosts, time.monotonic() + KEY_SECONDS)
        except NoAnswer as error:
            return ShownKey(machine=machine, why=str(error))
        status = self.known.status(endpoint.known_as, key)
        is_fine = status in {HostKeyStatus.TRUSTED, HostKeyStatus.UNKNOWN}
        return ShownKey(machine=machine, key=key, status=status, why="" if is_fine else self.known.problem(status, endpoint.known_as, key))

    def add(self, shown: Iterable[ShownKey]) -> None:
        """Trust these machines' keys from now on; raise `UnusableFile` when the file cannot be written."""
        self.known.add({one.name: one.key for one in shown if one.key is not None}.items())
        self._connector.jumps.forget_failures()
