"""The health of a cluster's nodes, from outside: looks, what is thought of each node, and what changed."""

from __future__ import annotations

from holdfast.probe.health.checkup import Checkup

__all__ = ["Checkup"]
