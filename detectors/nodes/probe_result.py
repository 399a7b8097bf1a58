"""Result of probing a node from outside: a reading, no answer, or a probe that could not run."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import NodeReading


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredProbe:
    """A node did not answer."""

    times: int
    """Consecutive attempts without an answer, over all probes."""
    why: str
    """What happened at the last attempt."""


ProbeOutcome = NodeReading | UnansweredProbe | Unknown
"""`Unknown`: the probe itself could not run, which says nothing about the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """A probe of one node from outside."""

    node: str
    at: float
    """Unix time on the clock of the prober."""
    seconds: float
    """Duration, including repetitions."""
    found: ProbeOutcome
