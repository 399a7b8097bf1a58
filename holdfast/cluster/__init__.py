"""Where nodes come from that jobs run on. One interface; ``local`` now, ``ssh`` and ``slurm`` behind the same one later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.interface import NodeSource, NodeView
from holdfast.errors import NoJobsThere

if TYPE_CHECKING:
    from holdfast.spec import Cluster

__all__ = ["NodeSource", "NodeView", "open_cluster"]


def open_cluster(cluster: Cluster) -> NodeSource:
    """Return the source of nodes that *cluster* describes; raise `NoJobsThere` for a kind that no job runs on yet."""
    if cluster.kind != "local":
        raise NoJobsThere(cluster.name, cluster.kind)
    from holdfast.cluster.local import LocalNodes  # noqa: PLC0415 (each kind brings its own packages)

    return LocalNodes.of(cluster)
