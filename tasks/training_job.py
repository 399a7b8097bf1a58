"""The tasks of the training-job flow, one per state: launch, monitor, detect, decide, isolate, reschedule, resume, wait, migrate.

Each takes the job's controller and returns the transition that moves the job on.
"""

from __future__ import annotations

import time

from holdfast.control.config import gc_tuning
from holdfast.control.faults.diagnosis import confirm_faults, context_faults, diagnose_faults, lost_nodes, read_last_output, recovery_case
from holdfast.control.migration.grow_restart import grow_by_restart
from holdfast.control.migration.live import grow_live, move
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.recovery import path
from holdfast.control.recovery.incident_record import bar_replace_ranks, decided, open_incident, record_decision, remember_attempt
from holdfast.control.recovery.wait import wait_for_approval, wait_for_capacity
from holdfast.control.supervisor.controller import SLICE, JobController, ending, watch
from holdfast.control.supervisor.launch import begin
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event, Transition
from holdfast.prefect_client import run_titles
from holdfast.prefect_client.supervised_job import job_task


@job_task("launch", run_titles.launch)
def launch(run: JobController) -> Transition:
    """Start the job on fresh nodes, or continue a start that another controller began."""
    while (transition := begin(run) or ending(run)) is None:
        run.pump(0.0)  # try other nodes, or wait for more, unless this controller is to detach
    return transition


@job_task("monitor", run_titles.monitor)
def monitor(run: JobController) -> Transition:
    """Watch the job until something needs an answer: one task run, however long that takes."""
    gc_tuning.collect_and_freeze()
    while (transition := watch(run, seconds=SLICE)) is None:
        gc_tuning.collect_everything()
    return transition


@job_task("detect", run_titles.detect)
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


@job_task("decide", run_titles.decide)
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


@job_task("isolate", run_titles.isolate)
def isolate(run: JobController) -> Transition:
    """Stop all ranks, or only those that are replaced, and release the nodes that the decision drops."""
    return path.isolate(run)


@job_task("reschedule", run_titles.reschedule)
def reschedule(run: JobController) -> Transition:
    """Agree on the next membership: assign every rank to a node."""
    return path.reschedule(run)


@job_task("resume", run_titles.resume)
def resume(run: JobController) -> Transition:
    """Start the workers and wait for the first new step, within the deadline of the action."""
    if run.incidents.current is None:
        return Transition(Event.STARTED, "the previous controller saw the ranks training, and died before it could record that")
    return path.resume(run)


@job_task("wait", run_titles.wait)
def wait(run: JobController) -> Transition:
    """Wait for an approval or for nodes, whichever the decision asks for."""
    _, decision = decided(run)
    return wait_for_approval(run) if decision.action is RecoveryAction.REQUEST_APPROVAL else wait_for_capacity(run)


@job_task("migrate", run_titles.migrate)
def migrate(run: JobController) -> Transition:
    """Carry out the oldest requested migration, or add missing ranks, while training runs. If it cannot be done, training continues."""
    if run.requests.migrations:
        return move(run)
    return grow_by_restart(run) if run.scale_up.by_restart else grow_live(run)
