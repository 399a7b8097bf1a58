"""The way to each node of a cluster: what a user trusts and has, and the jump hosts in between. Shared by all who log in to nodes."""

from __future__ import annotations

from paramiko import PKey

from holdfast.cluster.ssh.connection import Connection, Opener
from holdfast.cluster.ssh.credentials import Keys, own_name
from holdfast.cluster.ssh.endpoints import Endpoint, Target, targets_of
from holdfast.cluster.ssh.jumps import Jumps
from holdfast.cluster.ssh.known_hosts import KnownHosts
from holdfast.cluster.ssh.watchdog import Watchdog
from holdfast.spec import SshCluster


class Connector:
    """Opens connections to the nodes of one cluster."""

    def __init__(self, cluster: SshCluster, known: KnownHosts | None = None) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self.known, keys = known or KnownHosts.read(cluster.known_hosts), Keys()
        self.targets = targets_of(cluster, own_name)
        for endpoint in (endpoint for target in self.targets for endpoint in (target.endpoint, *target.jump_hosts)):
            keys.load(endpoint.key, endpoint.passphrase)
        self.watchdog = Watchdog()
        self._opener = Opener(self.known, keys, self.watchdog)
        self.jumps = Jumps(self._opener)

    def open(self, target: Target, until: float, *, then: float | None = None) -> Connection:
        """Return a new connection to *target* by *until* (monotonic); raise `NodeUnreachable` or `ProbeFailed`.

        With *then* the node has until *until* to take a connection, and until *then* to let us in.
        """
        return self._opener.open(target.endpoint, until, via=self.jumps.to(target.jump_hosts, until), then=then)

    def key_of(self, endpoint: Endpoint, jump_hosts: tuple[Endpoint, ...], until: float) -> PKey:
        """Return the key that *endpoint*, behind *jump_hosts*, shows by *until*, trusted or not; raise `NodeUnreachable` or `ProbeFailed`."""
        return self._opener.key_of(endpoint, until, via=self.jumps.to(jump_hosts, until))

    def close(self) -> None:
        """End the connections to jump hosts, and what watches over deadlines."""
        self.jumps.close()
        self.watchdog.close()
