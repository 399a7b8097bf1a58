"""Where nodes come from that jobs run on: folders of this machine, machines that one can log in to, or that Slurm lends. One interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.interface import Logs, NodeBackend, NodeView

if TYPE_CHECKING:
    from holdfast.spec import Cluster

__all__ = ["Logs", "NodeBackend", "NodeView", "names_of", "open_cluster"]


def open_cluster(cluster: Cluster) -> NodeBackend:
    """Return the source of nodes that *cluster* describes; raise `OperatorError` when what it takes to get there is not here."""
    if cluster.kind == "local":
        from holdfast.cluster.local import LocalNodes  # noqa: PLC0415 (each kind brings its own packages)

        return LocalNodes.of(cluster)
    if cluster.kind == "slurm":
        from holdfast.cluster.slurm.nodes import SlurmNodes  # noqa: PLC0415

        return SlurmNodes(cluster)
    from holdfast.cluster.remote import RemoteNodes  # noqa: PLC0415
    from holdfast.cluster.ssh.transport import SshTransport  # noqa: PLC0415

    return RemoteNodes(cluster, SshTransport(cluster))


def names_of(cluster: Cluster) -> list[str]:
    """Return the names of all nodes of *cluster*; those of a Slurm cluster only Slurm knows."""
    return open_cluster(cluster).names() if cluster.kind == "slurm" else cluster.names
