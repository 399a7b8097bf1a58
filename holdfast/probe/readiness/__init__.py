"""Is a host ready for a job? What is missing on each host, read over SSH, and the cure.

`probe` runs on the host, `inspection` drives it, `judge` says what the facts mean. Not here: the health of a node that is in service
(`holdfast.probe.health`), and the installation of Holdfast (`holdfast.bootstrap`).
"""

from __future__ import annotations

from holdfast.probe.readiness.findings import ReadinessFinding, ReadinessState
from holdfast.probe.readiness.inspection import Inspection, InspectionScope

__all__ = ["Inspection", "InspectionScope", "ReadinessFinding", "ReadinessState"]
