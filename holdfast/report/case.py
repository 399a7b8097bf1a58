"""One incident with everything that the history has about it: evidence and hypotheses in a form to show.

It imports the standard library and the history's models only, because flows import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.history import History, queries
from holdfast.history.models import DecisionRecord, FaultRecord, Incident, IncidentDiagnosis, Phase
from holdfast.report.text import wording

LONGEST: Final = 8000
"""Characters of one piece of evidence that are shown; the history has all of it."""
MOST_TARGETS: Final = 3
"""Targets of a symptom that are named."""
_LINE: Final = 120


@dataclass(frozen=True, kw_only=True)
class IncidentCase:
    """One incident with its faults, decisions, phases and diagnoses."""

    incident: Incident
    faults: Sequence[FaultRecord]
    decisions: Sequence[DecisionRecord]
    phases: Sequence[Phase]
    diagnoses: Sequence[IncidentDiagnosis] = ()


def newest_cases(history: History, job_id: str, limit: int) -> Iterator[IncidentCase]:
    """Yield the newest incidents of a job, oldest first, with faults and decisions only."""
    for one in queries.incidents(history, job_id)[-limit:]:
        faults, decisions = queries.faults(history, incident_id=one.id), queries.decisions(history, incident_id=one.id)
        yield IncidentCase(incident=one, faults=faults, decisions=decisions, phases=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One value of a fault's evidence: its *name*, its *text*, and whether it needs a *block* of its own."""

    name: str
    text: str
    block: bool


def evidence_of(fields: Mapping[str, Any], *, longest: int = LONGEST) -> Iterator[Evidence]:
    """Yield the values of *fields* in order, without empty ones."""
    for name, value in fields.items():
        if value is None or value in ("", [], {}):
            continue
        text = wording.clipped(_text(value), longest)
        yield Evidence(name=str(name).replace("_", " "), text=text, block="\n" in text or len(text) > _LINE)


def _text(value: object) -> str:
    match value:
        case str():
            return value
        case bool():
            return "yes" if value else "no"
        case list() if all(isinstance(item, str | int) for item in value):
            return ("\n" if any(isinstance(item, str) for item in value) else ", ").join(map(str, value))
        case list() | dict():
            return json.dumps(value, indent=2, ensure_ascii=False, default=str)
        case _:
            return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One hypothesis of a diagnosis as text."""

    kind: str
    target: str
    confidence: float
    """Confidence, 0 to 1."""
    attributed_to: str
    recommended_action: str
    proof: str
    """What proves a fault that takes a node out, or why it is only shown; empty for other faults."""
    explains: str
    unexplained: str
    evidence: tuple[tuple[float, str, str], ...]
    """Time, source and quote."""


def hypotheses_of(diagnoses: Sequence[IncidentDiagnosis]) -> Iterator[Hypothesis]:
    """Yield the hypotheses of the newest of *diagnoses*, most likely first; nothing for old incidents without any."""
    for one in diagnoses[-1].candidates if diagnoses else ():
        yield Hypothesis(
            kind=str(one.get("kind", "")),
            target=str(one.get("target", "")),
            confidence=float(one.get("confidence") or 0.0),
            attributed_to=str(one.get("attributed_to", "")),
            recommended_action=str(one.get("recommended_action", "")),
            proof=str(one.get("proof") or ""),
            explains="; ".join(map(_symptom, one.get("explains") or ())),
            unexplained="; ".join(map(_symptom, one.get("unexplained") or ())),
            evidence=tuple((float(item["at"]), str(item["source"]), str(item["quote"])) for item in one.get("evidence") or ()),
        )


def _symptom(one: Mapping[str, Any]) -> str:
    """Return a symptom and its targets."""
    named, count = [wording.on_target(str(name)) for name in one.get("targets") or ()][:MOST_TARGETS], int(one.get("count") or 0)
    more = count - len(named)
    where = ", ".join(named) + (f" and {wording.count(more)} more" if named and more > 0 else "")
    return f"{one.get('kind')} of {where}" if where else str(one.get("kind"))
