"""Robust statistics: median, noise and quantile of values with outliers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import Final

SIGMA: Final = 1.4826
"""Factor from a median absolute deviation to the standard deviation of normal noise."""


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return median and deviation of *values* (at least one), scaled to one standard deviation of normal noise."""
    center = median(values)
    return center, SIGMA * median(abs(value - center) for value in values)


def jitter(values: Sequence[float]) -> float:
    """Return the noise of *values* (at least two) around their trend, scaled to one standard deviation of normal noise."""
    return SIGMA * median(abs(later - former) for former, later in pairwise(values)) / sqrt(2)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile *share* (0 to 1) of *values* (at least one)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
