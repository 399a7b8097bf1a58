"""The record of an incident: opened by its faults, extended by further ones, answered by decisions."""

from __future__ import annotations

from collections import Counter
from typing import Final

from holdfast.control.faults.diagnosis import incident_faults, row_of
from holdfast.control.state.incidents import IncidentInWork, RecoveryAttempt
from holdfast.control.supervisor.controller import PROGRESSED, JobController
from holdfast.detectors.catalogue import CATALOGUE, Fault
from holdfast.detectors.diagnosis import Diagnosis, PastFailure
from holdfast.detectors.evidence import ReplaceRanksFailure
from holdfast.detectors.training.groups import REPLACE_RANKS_FAILED
from holdfast.history import models
from holdfast.policies.recovery.case import Case, Decision, RecoveryAction
from holdfast.policies.recovery.case_codec import act_of, bounded
from holdfast.policies.recovery.escalation import Answer

MAX_ALIKE: Final = 256
"""Faults of one kind that have rows in an incident: when thousands of ranks report one lost node, the diagnosis counts them."""


def decided(run: JobController) -> tuple[IncidentInWork, Decision]:
    """Return the current incident, and its decision."""
    assert run.incidents.current is not None
    assert run.incidents.current.decision is not None
    return run.incidents.current, run.incidents.current.decision


def open_incident(run: JobController, diagnosis: Diagnosis, detected: float, acting: list[Fault]) -> IncidentInWork:
    """Open the incident of the *acting* faults, or add what is new to the current one, and record it with the diagnosis."""
    root, state = diagnosis.root, run.generations.state
    incident = run.incidents.current
    if incident is None:
        run.incidents.count += 1
        row = models.Incident(
            job_id=run.job.id,
            number=run.incidents.count,
            kind=root.kind,
            target=root.target,
            fault_at=min(root.at if any(root.at == fault.at for fault in acting) else min(fault.at for fault in acting), detected),
            detected_at=detected,
            generation_before=run.generations.number,
            step_before=state.step_before if run.generations.managed else None,
            reason=diagnosis.reason,
        )
        incident = run.incidents.current = IncidentInWork(row=row, lap_at=row.fault_at, state=state)
        incident.lap("detect", detected)
        run.recorder.add(row)
        run.log.publish("opened", {"incident": incident})
    elif root.entry.weight > CATALOGUE[incident.row.kind].weight:
        incident.row.kind, incident.row.target = root.kind, root.target
        run.recorder.amend(models.Incident, incident.row.id, kind=root.kind, target=root.target)
    known, kinds = set(incident.faults), Counter(fault.kind for fault in incident.faults)
    for fault in incident_faults(diagnosis, acting):
        if fault not in known:
            known.add(fault)
            kinds[fault.kind] += 1
            incident.faults.append(fault)
            if kinds[fault.kind] <= MAX_ALIKE or fault is root:
                recorded = run.faults.record(fault, incident=incident.row.id, root=fault is root, confirmed=diagnosis.confirmed)
                incident.fault_rows.append(recorded)
    incident.diagnosis = diagnosis
    incident.diagnosis_row = row_of(diagnosis, run.job.id, incident.row.id, run.recommended_actions)
    run.recorder.add(incident.diagnosis_row)
    return incident


def bar_replace_ranks(run: JobController, incident: IncidentInWork, faults: list[Fault]) -> None:
    """Do not replace ranks again in this incident if a worker could not do it, or an agent refused although no rank was lost."""
    failed = [one for one in run.generations.state.evidence if isinstance(one, ReplaceRanksFailure)]
    if any(one.rank is not None for one in failed) or (failed and all(fault.kind == REPLACE_RANKS_FAILED.id for fault in faults)):
        incident.blocked_reason = f"it failed in this incident: {failed[0].why}"
        if RecoveryAction.REPLACE_RANKS not in incident.tried:
            incident.tried.append(RecoveryAction.REPLACE_RANKS)


def record_decision(run: JobController, incident: IncidentInWork, case: Case, answer: Answer) -> None:
    """Record the decision, its rule, the rules that passed, and the case."""
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
    run.recorder.add(models.DecidedCase(decision_id=row.id, job_id=run.job.id, record=bounded(case)))  # first: every decision has one
    run.recorder.add(row)
    run.recorder.amend(models.Incident, incident.row.id, action=decision.action, reason=decision.reason)
    incident.decisions.append(row)


def remember_attempt(run: JobController, incident: IncidentInWork, case: Case, action: RecoveryAction) -> None:
    """Remember the attempt against this root cause, for later decisions and diagnoses."""
    assert incident.diagnosis is not None
    root, progressed = incident.diagnosis.root, run.incidents.progressed(case.now)
    if progressed:
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
            progressed=progressed,
        )
    )
    run.incidents.failures_before.append(
        PastFailure(node=root.node, step=root.step, signature=root.signature, kind=root.kind, at=root.at, device=root.device)
    )
