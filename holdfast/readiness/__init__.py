"""Is a host ready for a job? What is missing on each, seen over SSH, and the cure."""

from __future__ import annotations

from holdfast.readiness.finding import Finding, State
from holdfast.readiness.visit import Inspection, Wanted

__all__ = ["Finding", "Inspection", "State", "Wanted"]
