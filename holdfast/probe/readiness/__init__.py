"""Is a host ready for a job? What is missing on each, seen over SSH, and the cure."""

from __future__ import annotations

from holdfast.probe.readiness.finding import ReadinessFinding, ReadinessState
from holdfast.probe.readiness.inspection import Inspection, InspectionScope

__all__ = ["Inspection", "InspectionScope", "ReadinessFinding", "ReadinessState"]
