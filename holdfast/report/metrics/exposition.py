"""Prometheus' text format, version 0.0.4: families of samples in, text out."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One line: what the family's name ends in (of a histogram), labels, value."""

    suffix: str
    labels: Labels
    value: float


@dataclass(slots=True)
class MetricFamily:
    """One metric: its name, what it is, and its samples."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    samples: list[MetricSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        """See that the name is one, and that a counter is called as such."""
        assert _NAME.fullmatch(self.name)
        assert (self.kind == "counter") == self.name.endswith("_total")

    def add(self, value: float | None, **labels: str) -> None:
        """Add a sample; nothing for a value that is not known."""
        if value is not None:
            self.samples.append(MetricSample("", labels, float(value)))

    def count(self, found: Mapping[str, float], known: Iterable[str], label: str, **labels: str) -> None:
        """Add a counter for each of the *known* values of *label*, at 0 where none was *found*, and for whatever else was found.

        `increase()` does not see the step from "no series" to 1: only a counter that exists at 0 before its first event counts it.
        """
        for value in dict.fromkeys((*known, *sorted(found))):
            self.add(found.get(value, 0), **labels, **{label: value})

    def observe(self, values: Sequence[float], buckets: Sequence[float], **labels: str) -> None:
        """Add a histogram of *values*: how many are at most as large as each of *buckets*."""
        ordered = sorted(values)
        for bound in (*buckets, math.inf):
            until = bisect_left(ordered, math.nextafter(bound, math.inf)) if bound < math.inf else len(ordered)
            self.samples.append(MetricSample("_bucket", {**labels, "le": number(bound)}, until))
        self.summarize(values, **labels)

    def summarize(self, values: Sequence[float], **labels: str) -> None:
        """Add the sum and the number of *values*."""
        self.samples.append(MetricSample("_sum", labels, math.fsum(values)))
        self.samples.append(MetricSample("_count", labels, len(values)))


def number(value: float) -> str:
    """Return *value* as Prometheus reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def text(families: Iterable[MetricFamily]) -> str:
    """Return *families* as text; one without samples says what it is all the same."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{one.suffix}{_labels(one.labels)} {number(one.value)}" for one in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    assert all(_LABEL.fullmatch(name) for name in labels)
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(words: str) -> str:
    return words.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(value: str) -> str:
    """Return a label's value: whatever a user calls a job cannot end the line, nor be what cannot be encoded."""
    return _escaped(value.encode("utf-8", "replace").decode()).replace('"', r"\"")
