"""Detect: gather the evidence of an incident, and find its root cause."""

from __future__ import annotations

import time

from holdfast.control.faults.confirmation import confirm_faults
from holdfast.control.faults.diagnosis import context_faults, diagnose_faults, lost_nodes, read_last_output
from holdfast.control.recovery.incident_record import bar_replace_ranks, open_incident
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Event, Transition


@job_task("detect", task_titles.detect)
def detect(run: JobController) -> Transition:
    """Explain what was seen, and open the incident, or add to it."""
    detected = time.time()
    if run.incidents.current is not None:
        run.incidents.current.lap("failed attempt", detected)
    run.policy_file.check_now()
    faults, silences = confirm_faults(run)
    if not faults and run.generations.state.all_running():
        if run.incidents.current is not None:
            moved_on = run.generations.number > run.incidents.current.row.generation_before  # by a flow that died before it could say so
            run.close_incident("recovered" if moved_on else "passed")
        return Transition(Event.DISMISSED, "it passed by itself before it had to be acted on")
    if run.incidents.current is not None:
        faults = faults or run.incidents.current.faults
        bar_replace_ranks(run, run.incidents.current, faults)
    diagnosis = diagnose_faults(run, [*faults, *context_faults(run), *read_last_output(run)])
    incident = open_incident(run, diagnosis, detected, faults)
    incident.lost |= lost_nodes(faults, silences)
    incident.silent_since |= {silence.node: silence.at for silence in silences}
    return Transition(Event.DIAGNOSED, diagnosis.reason)
