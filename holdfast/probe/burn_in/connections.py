"""Where orders to nodes go, whatever the cluster's kind."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, Self

from holdfast.cluster.local import LocalNodes
from holdfast.errors import AllocationRequired
from holdfast.probe.burn_in.session import BurnInSession
from holdfast.probe.remote.child import ChildInterpreter
from holdfast.probe.remote.errors import NodeUnreachable

if TYPE_CHECKING:
    from holdfast.spec import Cluster, LocalCluster


class BurnInConnections(Protocol):
    """The nodes of one cluster."""

    apart: bool
    """Whether nodes are machines of their own, so that all may work at once."""

    def names(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""
        ...

    def open(self, node: str) -> BurnInSession:
        """Start the program of checks on *node*; raise `NoAnswer` when that cannot be."""
        ...

    def address(self, node: str) -> str:
        """Return under which address other nodes reach *node*."""
        ...

    def folder(self, node: str) -> str:
        """Return the folder in which the disk of *node* is tried."""
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_burn_in_connections(cluster: Cluster) -> BurnInConnections:
    """Return where orders to the nodes of *cluster* go; raise `OperatorError` when what it takes is not there."""
    if cluster.kind == "local":
        return LocalBurnInConnections(cluster)
    if cluster.kind == "slurm":
        raise AllocationRequired("a burn-in", cluster.name)
    from holdfast.cluster.ssh import SshBurnInConnections  # noqa: PLC0415 (paramiko takes 0.1 s, and most clusters need none of it)

    return SshBurnInConnections(cluster)


class LocalBurnInConnections:
    """Nodes that are folders of this machine: each has a process of its own, and one that is switched off does not answer."""

    apart = False

    def __init__(self, cluster: LocalCluster) -> None:
        self._source = LocalNodes.of(cluster)
        self._folder, self._nice = cluster.burn_in.folder, cluster.burn_in.nice

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to let go of."""

    def names(self) -> list[str]:
        """Return the nodes' names."""
        return self._source.names()

    def address(self, node: str) -> str:
        """Return the loopback address."""
        return self._source.address(node)

    def folder(self, node: str) -> str:
        """Return the node's own folder, made where it is not there yet, unless the cluster names another one."""
        if self._folder is not None:
            return self._folder
        folder = self._source.folder(node)
        with suppress(OSError):  # who cannot make it cannot write there: the check says so
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(folder)

    def open(self, node: str) -> BurnInSession:
        """Start the program of checks."""
        if not self._source.answers(node):
            raise NodeUnreachable("it is switched off")
        return BurnInSession(node, ChildInterpreter(), nice=self._nice)
