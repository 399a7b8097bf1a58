"""The nodes that jobs run on: folders of this machine, machines reached over SSH, or nodes allocated by Slurm, behind one interface.

Here: how to reach a node, start and fence its agent, and get nodes from a scheduler. Not here: what an agent does (`holdfast.agent`), which
node a job gets (`holdfast.control`), and probes of a node's health (`holdfast.probe`).
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from holdfast.cluster.interface import Logs, NodeBackend, NodeView
from holdfast.errors import UnknownNode

if TYPE_CHECKING:
    from holdfast.spec import Cluster

__all__ = ["Logs", "NodeBackend", "NodeView", "check_names", "names_of", "open_cluster"]


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


def check_names(nodes: Iterable[str], cluster: str, names: Sequence[str], also: Container[str] = ()) -> None:
    """Raise `UnknownNode`, with similar names, for the first of *nodes* that is neither one of the *names* of a cluster nor in *also*."""
    for node in nodes:
        if node not in names and node not in also:
            raise UnknownNode(node, cluster, tuple(difflib.get_close_matches(node, names, n=3) or names[:5]))


def names_of(cluster: Cluster) -> list[str]:
    """Return the names of all nodes of *cluster*; for a Slurm cluster this runs `sinfo`."""
    return open_cluster(cluster).names() if cluster.kind == "slurm" else cluster.names
