"""What judges of readings share: a sighting is a kind of fault on a part of a node, and counters are compared between two looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from detectors.evidence import Unknown
from detectors.thresholds import Thresholds

P = TypeVar("P")

SECOND: Final = 1.0
MINUTE: Final = 60.0
HOUR: Final = 3600.0
"""Units of rates, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFinding:
    """A kind of fault seen on a part of a node."""

    kind: str
    part: str
    """A GPU, an interface, a mount: what does not change between two looks."""
    quote: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Generic[P]):
    """One part of a node now, and as it was before where that is known and still counts."""

    now: P
    before: P | None = None
    seconds: float = 0.0
    """Between the two."""
    limits: Thresholds

    def rate(self, growth: int, unit: float) -> float:
        """Return by how much a counter grew in *unit* seconds. Of a shorter time all is counted, as a few errors at once make no rate."""
        return growth * unit / max(self.seconds, unit)


def grown(before: int | Unknown | None, now: int | Unknown) -> int | None:
    """Return by how much a counter grew; None where one of both looks did not see it. One that is smaller now began anew."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return None
    return now - before if now >= before else now


def growths(before: Mapping[str, int] | Unknown | None, now: Mapping[str, int] | Unknown, names: Iterable[str]) -> dict[str, int]:
    """Return the counters of *names* that grew, and by how much."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return {}
    both = {name: grown(before[name], now[name]) for name in names if name in before and name in now}
    return {name: growth for name, growth in both.items() if growth}


def above(value: float | Unknown, limit: float) -> bool:
    """Say whether *value* is known and above *limit*."""
    return not isinstance(value, Unknown) and value > limit


def listed(counts: Mapping[str, int]) -> str:
    """Return counters in words."""
    return ", ".join(f"{name} +{growth}" for name, growth in counts.items())
