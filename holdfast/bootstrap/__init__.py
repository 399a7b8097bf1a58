"""What a node needs of Holdfast, brought there: one small wheel, in an environment of the node's own interpreter."""

from __future__ import annotations

from holdfast.bootstrap.hosts import HostOutcome, Hosts
from holdfast.bootstrap.wheel import NodeWheel, node_wheel

__all__ = ["HostOutcome", "Hosts", "NodeWheel", "node_wheel"]
