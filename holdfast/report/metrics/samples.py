"""Samples that the families of `prometheus_client` do not add by themselves: values that may be unknown, counters at 0, histograms."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


def add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    """Add a sample; nothing for a value that is not known."""
    if value is not None:
        family.add_metric(labels, value)


def add_counts(family: CounterMetricFamily, labels: Sequence[str], found: Mapping[str, float], known: Iterable[str]) -> None:
    """Add a counter for each of the *known* values of the last label, at 0 where none was *found*, and for whatever else was found.

    `increase()` does not see the step from "no series" to 1: only a counter that exists at 0 before its first event counts it.
    """
    for value in dict.fromkeys((*known, *sorted(found))):
        family.add_metric([*labels, value], found.get(value, 0))


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], values: Sequence[float], bounds: Sequence[float]) -> None:
    """Add a histogram of *values*: how many are at most as large as each of *bounds*."""
    ordered = sorted(values)
    buckets = [(f"{bound:g}", bisect_right(ordered, bound)) for bound in bounds]
    family.add_metric(labels, [*buckets, ("+Inf", len(ordered))], math.fsum(ordered))
