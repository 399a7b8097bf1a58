"""What came of looking at a node from outside: a reading, no answer, or a probe that could not be carried out."""

from __future__ import annotations

from dataclasses import dataclass

from detectors.evidence import Unknown
from detectors.readings import NodeReading


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredProbe:
    """A node gave no answer."""

    times: int
    """In a row, over looks and repetitions."""
    why: str
    """What happened instead, the last time."""


ProbeOutcome = NodeReading | UnansweredProbe | Unknown
"""`Unknown` says that the probe itself could not be carried out: that speaks against nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """One look at one node from outside."""

    node: str
    at: float
    """Seconds since 1970 on the clock of who looked."""
    seconds: float
    """What it took, repetitions included."""
    found: ProbeOutcome
