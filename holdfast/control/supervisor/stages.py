"""What is done in each state of an incident, from the diagnosis to the first new step, and in a migration: for tasks, and for a launcher.

Each function takes the job's controller and returns the transition that moves the job on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.control.faults.diagnosis import confirm_faults, context_faults, diagnose_faults, lost_nodes, read_last_output, recovery_case
from holdfast.control.migration.grow_restart import grow_by_restart
from holdfast.control.migration.live import grow_live, move
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.recovery import path
from holdfast.control.recovery.incident_record import bar_replace_ranks, decided, open_incident, record_decision, remember_attempt
from holdfast.control.recovery.wait import wait_for_approval, wait_for_capacity
from holdfast.control.supervisor.controller import JobController
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event, State, Transition


def detect(run: JobController) -> Transition:
    """Gather the evidence of an incident, find its root cause, and open the incident or add to it."""
    detected = time.time()
    if run.incidents.current is not None:
        run.incidents.current.lap("failed attempt", detected)
    run.policy_file.check_now()
    faults, silences = confirm_faults(run)
    if not faults and run.generations.state.all_running():
        if run.incidents.current is not None:
            # a controller that died may have completed the recovery before it could record that
            recovered = run.generations.number > run.incidents.current.row.generation_before
            run.close_incident("recovered" if recovered else "passed")
        return Transition(Event.DISMISSED, "the fault passed by itself before any action was taken")
    if run.incidents.current is not None:
        faults = faults or run.incidents.current.faults
        bar_replace_ranks(run, run.incidents.current, faults)
    diagnosis = diagnose_faults(run, [*faults, *context_faults(run), *read_last_output(run)])
    incident = open_incident(run, diagnosis, detected, faults)
    incident.lost |= lost_nodes(faults, silences)
    incident.silent_since |= {silence.node: silence.at for silence in silences}
    return Transition(Event.DIAGNOSED, diagnosis.reason)


def decide(run: JobController) -> Transition:
    """Let the job's policy choose a recovery action for the incident, and record the decision with its reasons."""
    incident = run.incidents.current
    assert incident is not None
    assert incident.diagnosis is not None
    case = recovery_case(run, incident, incident.diagnosis)
    run.read_files()
    answer = run.policy.decide(case)
    record_decision(run, incident, case, answer)
    incident.lap("diagnose", time.time())
    run.log.publish("decided", {"incident": incident})
    if answer.decision.action is RecoveryAction.FAIL:
        return Transition(Event.FAILED, answer.decision.reason)
    if answer.decision.action is RecoveryAction.REQUEST_APPROVAL:
        return Transition(Event.ASKED, answer.decision.reason)
    run.nodes.approvals.withdraw(LEAST)
    remember_attempt(run, incident, case, answer.decision.action)
    return Transition(Event.DECIDED, answer.decision.reason)


def resume(run: JobController) -> Transition:
    """Start the workers and wait for the first new step, within the deadline of the action."""
    if run.incidents.current is None:
        return Transition(Event.STARTED, "the previous controller saw the ranks training, and died before it could record that")
    return path.resume(run)


def wait(run: JobController) -> Transition:
    """Wait for an approval or for nodes, whichever the decision asks for."""
    _, decision = decided(run)
    return wait_for_approval(run) if decision.action is RecoveryAction.REQUEST_APPROVAL else wait_for_capacity(run)


def migrate(run: JobController) -> Transition:
    """Carry out the oldest requested migration, or add missing ranks, while training runs."""
    if run.requests.migrations:
        return move(run)
    return grow_by_restart(run) if run.scale_up.by_restart else grow_live(run)


RECOVERY: Final[Mapping[State, Callable[[JobController], Transition]]] = {
    State.DIAGNOSING: detect,
    State.DECIDING: decide,
    State.ISOLATING: path.isolate,
    State.RESCHEDULING: path.reschedule,
    State.RESUMING: resume,
    State.WAITING: wait,
}
"""State of a job with an incident to what is done in it."""
