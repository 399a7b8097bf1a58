"""Statistics that a few odd values do not move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import Final

SIGMA: Final = 1.4826
"""What a median absolute deviation is to be multiplied with to stand for a standard deviation of normal noise."""


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of *values* (at least one) and their deviation from it, as one standard deviation of normal noise."""
    center = median(values)
    return center, SIGMA * median(abs(value - center) for value in values)


def jitter(values: Sequence[float]) -> float:
    """Return the noise of *values* (at least two) around whatever way they go, as one standard deviation of normal noise."""
    return SIGMA * median(abs(later - former) for former, later in pairwise(values)) / sqrt(2)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that *share* of *values* (at least one) are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
