"""An incident on record: opened by its faults, added to by further ones, answered by decisions."""

from __future__ import annotations

from collections import Counter
from typing import Final

from detectors.catalogue import CATALOGUE, Fault
from detectors.diagnosis import Diagnosis, PastFailure
from detectors.evidence import ReplaceRanksFailure
from detectors.groups import TAKE_OVER_FAILED
from holdfast.control.faults.diagnosis_inputs import belong, row_of
from holdfast.control.state.incidents import IncidentInWork, RecoveryAttempt
from holdfast.control.supervisor.controller import PROGRESSED, JobController
from holdfast.history import models
from policies.case import Case, Decision, RecoveryAction
from policies.case_codec import act_of, bounded
from policies.escalation import Answer

MOST_ALIKE: Final = 256
"""Faults of one kind that an incident has rows of: when thousands of ranks see one node go, the verdict says how many did."""


def decided(run: JobController) -> tuple[IncidentInWork, Decision]:
    """Return the incident in work, and what was decided on it."""
    assert run.incidents.current is not None
    assert run.incidents.current.decision is not None
    return run.incidents.current, run.incidents.current.decision


def open_incident(run: JobController, diagnosis: Diagnosis, detected: float, acting: list[Fault]) -> IncidentInWork:
    """Open the incident that the *acting* faults ask for, or add what is new to the one in work, and record it with what was weighed."""
    root = diagnosis.root
    incident = run.incidents.current
    if incident is None:
        run.incidents.count += 1
        row = models.Incident(
            job_id=run.job.id,
            number=run.incidents.count,
            kind=root.kind,
            subject=root.subject,
            fault_at=min(root.at if any(root.at == fault.at for fault in acting) else min(fault.at for fault in acting), detected),
            detected_at=detected,
            generation_before=run.generations.number,
            step_before=run.generations.state.step_before if run.generations.managed else None,
            reason=diagnosis.reason,
        )
        incident = run.incidents.current = IncidentInWork(row=row, lap_at=row.fault_at, board=run.generations.state)
        incident.lap("detect", detected)
        run.recorder.add(row)
        run.log.publish("opened", {"incident": incident})
    elif root.entry.weight > CATALOGUE[incident.row.kind].weight:
        incident.row.kind, incident.row.subject = root.kind, root.subject
        run.recorder.amend(models.Incident, incident.row.id, kind=root.kind, subject=root.subject)
    known, kinds = set(incident.faults), Counter(fault.kind for fault in incident.faults)
    for fault in belong(diagnosis, acting):
        if fault not in known:
            known.add(fault)
            kinds[fault.kind] += 1
            incident.faults.append(fault)
            if kinds[fault.kind] <= MOST_ALIKE or fault is root:
                incident.fault_rows.append(run.faults.record(fault, incident=incident.row.id, root=fault is root))
    incident.diagnosis = diagnosis
    incident.verdict = row_of(diagnosis, run.job.id, incident.row.id, run.recommended_actions)
    run.recorder.add(incident.verdict)
    return incident


def bar_replace_ranks(run: JobController, incident: IncidentInWork, faults: list[Fault]) -> None:
    """Try no other take-over in this incident once a worker could not carry one out, or an agent would not without a rank being lost."""
    told = [one for one in run.generations.state.evidence if isinstance(one, ReplaceRanksFailure)]
    if any(one.rank is not None for one in told) or (told and all(fault.kind == TAKE_OVER_FAILED.id for fault in faults)):
        incident.blocked_reason = f"it failed in this incident: {told[0].why}"
        if RecoveryAction.TAKE_OVER not in incident.tried:
            incident.tried.append(RecoveryAction.TAKE_OVER)


def record_decision(run: JobController, incident: IncidentInWork, case: Case, answer: Answer) -> None:
    """Write down what was decided, by which rule, which rules passed, and what it was made from."""
    decision = answer.decision
    incident.decision, incident.case, incident.action_at = decision, answer.case, case.now
    incident.row.action, incident.row.reason = decision.action, decision.reason
    row = models.DecisionRecord(
        job_id=run.job.id,
        incident_id=incident.row.id,
        at=case.now,
        action=decision.action,
        rule=answer.rule,
        reason=decision.reason,
        act={**act_of(decision), "policy": run.policy.name, "noted": answer.noted},
        passed_over=dict(answer.passed_over),
    )
    run.recorder.add(models.DecidedCase(decision_id=row.id, job_id=run.job.id, record=bounded(case)))  # first: no decision is without
    run.recorder.add(row)
    run.recorder.amend(models.Incident, incident.row.id, action=decision.action, reason=decision.reason)
    incident.decisions.append(row)


def remember_attempt(run: JobController, incident: IncidentInWork, case: Case, action: RecoveryAction) -> None:
    """Remember what is tried against this root cause, for later decisions and diagnoses."""
    assert incident.diagnosis is not None
    root, counts_as_progress = incident.diagnosis.root, run.incidents.progressed(case.now)
    if counts_as_progress:
        incident.row.facts = {**(incident.row.facts or {}), PROGRESSED: True}
        run.recorder.amend(models.Incident, incident.row.id, facts=incident.row.facts)
    run.incidents.attempts.append(
        RecoveryAttempt(
            at=case.now,
            action=action,
            node=root.node,
            best=run.generations.best,
            incident=incident.row.id,
            kind=root.kind,
            step=root.step,
            generation=run.generations.number,
            progressed=counts_as_progress,
        )
    )
    run.incidents.failures_before.append(
        PastFailure(node=root.node, step=root.step, signature=root.signature, kind=root.kind, at=root.at, device=root.device)
    )
