"""The nodes that jobs run on: folders of this machine, machines reached over SSH, or nodes allocated by Slurm, behind one interface.

Here: how to reach a node, start and fence its agent, and get nodes from a scheduler. Not here: what an agent does (`holdfast.agent`), which
node a job gets (`holdfast.control`), and probes of a node's health (`holdfast.probe`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.interface import Logs, NodeBackend, NodeView

if TYPE_CHECKING:
    from holdfast.spec import Cluster

__all__ = ["Logs", "NodeBackend", "NodeView", "names_of", "open_cluster"]


def open_cluster(cluster: Cluster) -> NodeBackend:
    """Return the backend for *cluster*; raise `OperatorError` when a key, file or program that it needs is missing."""
    if cluster.kind == "local":
        from holdfast.cluster.local import LocalNodes  # noqa: PLC0415 (each kind imports its own packages)

        return LocalNodes.of(cluster)
    if cluster.kind == "slurm":
        from holdfast.cluster.slurm.nodes import SlurmNodes  # noqa: PLC0415

        return SlurmNodes(cluster)
    from holdfast.cluster.remote import RemoteNodes  # noqa: PLC0415
    from holdfast.cluster.ssh.transport import SshTransport  # noqa: PLC0415

    return RemoteNodes(cluster, SshTransport(cluster))


def names_of(cluster: Cluster) -> list[str]:
    """Return the names of all nodes of *cluster*; for a Slurm cluster this runs `sinfo`."""
    return open_cluster(cluster).names() if cluster.kind == "slurm" else cluster.names
