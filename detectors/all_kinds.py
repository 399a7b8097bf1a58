"""The complete catalogue, including the kinds of logs, which agents and flows do not load."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from holdfast.detectors import diagnosis
from holdfast.detectors.catalogue import CATALOGUE, Area, FaultKind
from holdfast.detectors.evidence import LogLine, Sample
from holdfast.detectors.log_lines import classification as logs

__all__ = ["CATALOGUE", "by_area", "by_place", "diagnosis", "logs", "words_of"]


def by_place() -> list[FaultKind]:
    """Return all kinds, ordered by area and component."""
    areas = list(Area)
    return sorted(CATALOGUE.values(), key=lambda one: (areas.index(one.area), one.component, one.id))


def by_area() -> dict[Area, int]:
    """Return the number of kinds in each area."""
    found = Counter(one.area for one in CATALOGUE.values())
    return {area: found[area] for area in Area}


def words_of(sample: Sample) -> str:
    """Format a sample: a log line as it is, other evidence with its fields."""
    evidence = sample.evidence
    if isinstance(evidence, LogLine):
        return evidence.text
    return "\n".join(map(_format, evidence)) if isinstance(evidence, tuple) else _format(evidence)


def _format(value: object) -> str:
    """Format evidence without fields that have their default."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_format, value))}]"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields_ = {one.name: getattr(value, one.name) for one in fields(value) if not _is_default(getattr(value, one.name), one)}
    return f"{type(value).__name__}({', '.join(f'{name}={_format(one)}' for name, one in fields_.items())})"


def _is_default(value: object, field: Field[Any]) -> bool:
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)
