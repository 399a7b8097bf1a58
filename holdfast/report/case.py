"""One incident with everything that the history keeps of it. Standard library and the history's models only: flows import it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.history import History, queries
from holdfast.history.models import DecisionRecord, FaultRecord, Incident, IncidentDiagnosis, Phase


@dataclass(frozen=True, kw_only=True)
class IncidentCase:
    """One incident with everything that hangs on it."""

    incident: Incident
    faults: Sequence[FaultRecord]
    decisions: Sequence[DecisionRecord]
    phases: Sequence[Phase]
    verdicts: Sequence[IncidentDiagnosis] = ()


def newest_cases(history: History, job_id: str, most: int) -> Iterator[IncidentCase]:
    """Yield the newest incidents of a job, oldest first, with faults and decisions only."""
    for one in queries.incidents(history, job_id)[-most:]:
        faults, decisions = queries.faults(history, incident_id=one.id), queries.decisions(history, incident_id=one.id)
        yield IncidentCase(incident=one, faults=faults, decisions=decisions, phases=[])
