"""Install on a node what it needs of Holdfast: one small wheel, in an environment of the node's own interpreter.

Here: the wheel, the installer that runs on the node, and the hosts that it runs on. Not here: whether a host is ready for a job
(`holdfast.probe.readiness`).
"""

from __future__ import annotations

from holdfast.bootstrap.hosts import HostOutcome, Hosts
from holdfast.bootstrap.wheel import NodeWheel, node_wheel

__all__ = ["HostOutcome", "Hosts", "NodeWheel", "node_wheel"]
