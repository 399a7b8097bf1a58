"""Decide: have the job's policy answer an incident."""

from __future__ import annotations

import time

from holdfast.control.faults.diagnosis import recovery_case
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.recovery.incident_record import record_decision, remember_attempt
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.case import RecoveryAction
from policies.states import Event, Transition


@job_task("decide", task_titles.decide)
def decide(run: JobController) -> Transition:
    """Have the job's policy decide what to do about the incident, and record the decision with its reasons."""
    incident = run.incidents.current
    assert incident is not None
    assert incident.diagnosis is not None
    case = recovery_case(run, incident, incident.diagnosis)
    run.read_files()
    answer = run.policy.decide(case)
    record_decision(run, incident, case, answer)
    incident.lap("diagnose", time.time())
    run.log.publish("decided", {"incident": incident})
    if answer.decision.action is RecoveryAction.GIVE_UP:
        return Transition(Event.GAVE_UP, answer.decision.reason)
    if answer.decision.action is RecoveryAction.ASK_A_PERSON:
        return Transition(Event.ASKED, answer.decision.reason)
    run.nodes.approvals.withdraw(LEAST)
    remember_attempt(run, incident, case, answer.decision.action)
    return Transition(Event.DECIDED, answer.decision.reason)
