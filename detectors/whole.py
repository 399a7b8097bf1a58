"""The whole catalogue: whoever imports this has every kind, those of logs too. An agent and a flow do without them."""

from __future__ import annotations

from collections import Counter

from detectors import diagnosis, logs
from detectors.catalogue import CATALOGUE, Area, FaultKind
from detectors.evidence import LogLine, Sample

__all__ = ["by_area", "by_place", "diagnosis", "logs", "words_of"]


def by_place() -> list[FaultKind]:
    """Return every kind, those of one component beside each other, in the order of areas."""
    areas = list(Area)
    return sorted(CATALOGUE.values(), key=lambda one: (areas.index(one.area), one.component, one.id))


def by_area() -> dict[Area, int]:
    """Return how many kinds there are of each area."""
    found = Counter(one.area for one in CATALOGUE.values())
    return {area: found[area] for area in Area}


def words_of(sample: Sample) -> str:
    """Return a sample as a person reads it: a line of a log as it is, other evidence with its fields."""
    evidence = sample.evidence
    if isinstance(evidence, LogLine):
        return evidence.text
    return "\n".join(repr(one) for one in evidence) if isinstance(evidence, tuple) else repr(evidence)
