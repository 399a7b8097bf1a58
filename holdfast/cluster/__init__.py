"""Where nodes come from. One interface; ``local`` now, ``ssh`` and ``slurm`` behind the same one later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.interface import NodeSource, NodeView

if TYPE_CHECKING:
    from holdfast.spec import Cluster

__all__ = ["NodeSource", "NodeView", "open_cluster"]


def open_cluster(cluster: Cluster) -> NodeSource:
    """Return the source of nodes that *cluster* describes."""
    from holdfast.cluster.local import LocalNodes  # noqa: PLC0415 (each kind brings its own packages)

    return LocalNodes.of(cluster)
