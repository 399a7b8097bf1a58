"""The health of a cluster's nodes, from outside: sweeps, assessments, changes, and the nodes that a job could start on.

Not here: how one node is probed (`holdfast.probe.readers`), and what the evidence means (`holdfast.policies.nodes.node_health`).
"""

from __future__ import annotations

from holdfast.probe.health.checkup import Checkup

__all__ = ["Checkup"]
