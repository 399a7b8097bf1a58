"""The whole catalogue: whoever imports this has every kind, those of logs too. An agent and a flow do without them."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from detectors import diagnosis, logs
from detectors.catalogue import CATALOGUE, Area, FaultKind
from detectors.evidence import LogLine, Sample

__all__ = ["CATALOGUE", "by_area", "by_place", "diagnosis", "logs", "words_of"]


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
    return "\n".join(map(_said, evidence)) if isinstance(evidence, tuple) else _said(evidence)


def _said(value: object) -> str:
    """Return evidence without what says nothing: fields that are as they are unless somebody looks."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_said, value))}]"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    told = {one.name: getattr(value, one.name) for one in fields(value) if not _is_default(getattr(value, one.name), one)}
    return f"{type(value).__name__}({', '.join(f'{name}={_said(one)}' for name, one in told.items())})"


def _is_default(value: object, field: Field[Any]) -> bool:
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)
