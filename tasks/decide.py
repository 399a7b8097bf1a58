"""Decide: have the job's policy answer an incident."""

from __future__ import annotations

import time

from detectors.diagnosis import Before
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.supervisor.controller import GOT_ON, JobController, RecoveryAttempt
from holdfast.control.supervisor.incident import IncidentInWork
from holdfast.history import models
from policies.case import Case, RecoveryAction
from policies.case_codec import act_of, bounded
from policies.escalation import Answer
from policies.states import Event
from tasks import titles
from tasks.detect import a_case
from tasks.turn import Transition, step


@step("decide", titles.decide)
def decide(run: JobController) -> Transition:
    """Have the job's policy decide what to do about the incident, and record the decision with its reasons."""
    incident = run.incident
    assert incident is not None
    assert incident.diagnosis is not None
    case = a_case(run, incident, incident.diagnosis)
    run.take_files()
    answer = run.policy.decide(case)
    record(run, incident, case, answer)
    incident.lap("diagnose", time.time())
    run.tell("decided", {"incident": incident})
    if answer.decision.action is RecoveryAction.GIVE_UP:
        return Transition(Event.GAVE_UP, answer.decision.reason)
    if answer.decision.action is RecoveryAction.ASK_A_PERSON:
        return Transition(Event.ASKED, answer.decision.reason)
    run.approvals.withdraw(LEAST)
    root, got_on = incident.diagnosis.root, run.got_on(case.now)
    if got_on:
        incident.row.facts = {**(incident.row.facts or {}), GOT_ON: True}
        run.recorder.amend(models.Incident, incident.row.id, facts=incident.row.facts)
    run.attempts.append(
        RecoveryAttempt(
            at=case.now,
            action=answer.decision.action,
            node=root.node,
            best=run.best,
            incident=incident.row.id,
            kind=root.kind,
            step=root.step,
            generation=run.generation,
            got_on=got_on,
        )
    )
    run.failures_before.append(
        Before(node=root.node, step=root.step, signature=root.signature, kind=root.kind, at=root.at, device=root.device)
    )
    return Transition(Event.DECIDED, answer.decision.reason)


def record(run: JobController, incident: IncidentInWork, case: Case, answer: Answer) -> None:
    """Write down what was decided, by which rule, which rules passed, and what it was made from."""
    decision = answer.decision
    incident.decision, incident.case, incident.action_at = decision, answer.case, case.now
    incident.row.action, incident.row.reason = decision.action, decision.reason
    row = models.Decision(
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
