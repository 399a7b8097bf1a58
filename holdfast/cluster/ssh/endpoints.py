"""Where the nodes of a cluster are, and how one gets there: what a user wrote, with all that was left out filled in.

A user's `~/.ssh/config` has no say here, and so paramiko's `SSHConfig` no place: jump hosts, users and keys are the cluster file's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.cluster.ssh.known_hosts import name_in_file
from holdfast.spec import SshCluster, SshHop


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A machine to log in to."""

    address: str
    port: int
    user: str
    key: str | None
    passphrase: str | None = None
    """Where it is to be had."""

    @property
    def known_as(self) -> str:
        """Return its name in known_hosts."""
        return name_in_file(self.address, self.port)

    def __str__(self) -> str:
        return f"{self.address} port {self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node, and the doors on the way to it."""

    node: str
    endpoint: Endpoint
    python: str
    """Its interpreter."""
    directory: str
    """Its folder for what is ours."""
    jump_hosts: tuple[Endpoint, ...] = ()
    """Jump hosts, first to last."""


def targets_of(cluster: SshCluster, own_name: Callable[[], str]) -> list[Target]:
    """Return the nodes of *cluster* in its order; *own_name* is asked for who logs in where nobody is named."""
    found = []
    for host in cluster.machines:
        user, key, phrase = host.user or cluster.user or own_name(), host.key or cluster.key, host.passphrase or cluster.passphrase
        endpoint = Endpoint(address=host.address or host.name, port=host.port or cluster.port, user=user, key=key, passphrase=phrase)
        hops = cluster.jump if host.jump is None else host.jump
        ours = {"python": host.python or cluster.python, "directory": host.directory or cluster.directory}
        found.append(Target(node=host.name, endpoint=endpoint, **ours, jump_hosts=tuple(_door(hop, endpoint) for hop in hops)))
    return found


def _door(hop: SshHop, last: Endpoint) -> Endpoint:
    """Return the door of a jump host; what is not said of it is as at the *last* one."""
    return Endpoint(
        address=hop.address,
        port=hop.port,
        user=hop.user or last.user,
        key=hop.key or last.key,
        passphrase=hop.passphrase or last.passphrase,
    )
