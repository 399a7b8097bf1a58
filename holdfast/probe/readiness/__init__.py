"""Is a host ready for a job? What is missing on each, seen over SSH, and the cure."""

from __future__ import annotations

from holdfast.probe.readiness.finding import Finding, State
from holdfast.probe.readiness.inspection import Inspection, Wanted

__all__ = ["Finding", "Inspection", "State", "Wanted"]
