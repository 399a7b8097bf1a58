"""The explanations of an incident that were weighed, in words: what each is, how likely, what it leaves unexplained, its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.history.models import IncidentDiagnosis
from holdfast.report import wording

NAMED: Final = 3
"""Subjects of a symptom that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedHypothesis:
    """One explanation, ready to be shown."""

    kind: str
    subject: str
    weight: float
    """Share of one."""
    blame: str
    explains: str
    unexplained: str
    evidence: tuple[tuple[float, str, str], ...]
    """When, by whom, and what was told."""


def explanations(verdicts: Sequence[IncidentDiagnosis]) -> Iterator[WeighedHypothesis]:
    """Yield what the newest of *verdicts* weighed, the likeliest first; nothing for an incident from before it was kept."""
    for one in verdicts[-1].candidates if verdicts else ():
        yield WeighedHypothesis(
            kind=str(one.get("kind", "")),
            subject=str(one.get("subject", "")),
            weight=float(one.get("weight") or 0.0),
            blame=str(one.get("blame", "")),
            explains=_symptoms(one.get("explains") or ()),
            unexplained=_symptoms(one.get("unexplained") or ()),
            evidence=tuple((float(seen["at"]), str(seen["source"]), str(seen["quote"])) for seen in one.get("evidence") or ()),
        )


def _symptoms(told: Sequence[Mapping[str, Any]]) -> str:
    """Say which symptoms, on whom."""
    return "; ".join(_symptom(one) for one in told)


def _symptom(one: Mapping[str, Any]) -> str:
    named, count = [str(name) for name in one.get("subjects") or ()][:NAMED], int(one.get("count") or 0)
    more = count - len(named)
    where = ", ".join(named) + (f" and {wording.count(more)} more" if named and more > 0 else "")
    return f"{one.get('kind')} of {where}" if where else str(one.get("kind"))
