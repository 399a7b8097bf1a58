"""What a node needs of Holdfast, brought there: one small wheel, in an environment of the node's own interpreter."""

from __future__ import annotations

from holdfast.bootstrap.hosts import Hosts, Outcome
from holdfast.bootstrap.wheel import Wheel, node_wheel

__all__ = ["Hosts", "Outcome", "Wheel", "node_wheel"]
