"""Detect: gather the evidence of an incident, find its root, and have the policy decide."""

from __future__ import annotations

import time
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from detectors.catalogue import CATALOGUE, Fault
from detectors.diagnosis import ECHOES, FOLLOWS_STEP, Before, Diagnosis, diagnose, seconds_to_settle, see
from detectors.evidence import AgentSilence, Blind, TakeOverTrouble
from detectors.groups import TAKE_OVER_FAILED
from detectors.process import START_FAILED
from holdfast.control import runs
from holdfast.control.board import limits_of
from holdfast.control.incident import IncidentInWork
from holdfast.control.run import Attempt, Run
from holdfast.errors import WorldError
from holdfast.history import models
from policies.ladder import POLICIES, Answer, Case, Rung, decide
from policies.placement import regular
from policies.states import Event
from tasks.turn import Turn

STRAGGLERS: Final = 10.0
"""Seconds that a worker may take to start after the first one failed, before the failure is judged without it."""
SLOW_STARTERS: Final = 3.0
"""Seconds that a worker which has started may take to fail at its first step the same way: ranks that start do not keep pace."""


@task(task_run_name="detect {job}", cache_policy=NO_CACHE)
def detect(job: str) -> Turn:
    """Explain what was seen and decide what to do about it."""
    run = runs.of(job)
    detected = time.time()
    if run.incident is not None:
        run.incident.lap("failed attempt", detected)
    silences = look_twice(run)
    faults, silences = settled(run, silences)
    if not faults and run.board.at_work():
        if run.incident is not None:
            moved_on = run.generation > run.incident.row.generation_before  # by a flow that died before it could say so
            run.close_incident("recovered" if moved_on else "passed")
        return Turn(Event.DISMISSED, "it passed by itself before it had to be acted on")
    if run.incident is not None:
        faults = faults or run.incident.faults
        _bar(run.incident, run, faults)
    diagnosis = diagnose(faults, tuple(run.failures_before), len(run.members))
    incident = open_incident(run, diagnosis, detected)
    incident.lost |= _lost(faults, silences)
    return choose(run, incident, diagnosis)


def look_twice(run: Run) -> list[AgentSilence]:
    """Look at the nodes whose agents do not speak, by a second way that does not need the agent."""
    missing = run.missing()
    at = {node: run.fleet.gone_at(node) for node in missing}
    answers = run.fleet.each(missing, run.fleet.second_look)
    for node in missing:
        run.held.pop(node, None)  # a new agent knows of no generation
    return [
        AgentSilence(
            node=node,
            at=at[node],
            why=missing[node],
            node_answers=Blind(str(answer)) if isinstance(answer, WorldError) else answer,
            step=run.board.step_before,
        )
        for node, answer in answers.items()
    ]


def settled(run: Run, silences: list[AgentSilence]) -> tuple[list[Fault], list[AgentSilence]]:
    """Return the faults and silences once enough is known: an echo alone waits for its cause, a shared failure for its twins."""
    begin, silence = time.monotonic(), run.spec.limits.agent_silence.total_seconds()
    while True:
        faults = run.faults() + see(silences, limits_of(run.spec.limits))
        if faults and can_be_taken_over(run, faults, silences):
            return faults, silences
        waited = time.monotonic() - begin
        if waited >= max(seconds_to_settle(faults, len(run.members), silence=silence), _seconds_for_twins(run, faults)):
            return faults, silences
        run.pump(0.02)
        if run.missing():
            silences = silences + look_twice(run)


def can_be_taken_over(run: Run, faults: list[Fault], silences: list[AgentSilence]) -> bool:
    """Tell whether a take-over answers what is known already: then nothing is gained by waiting, as what comes next is decided anew."""
    diagnosis = diagnose(faults, tuple(run.failures_before), len(run.members))
    if diagnosis.root.kind in ECHOES:
        return False
    case = a_case(run, run.incident, diagnosis, lost=frozenset(_lost(faults, silences)))
    return decide(POLICIES[run.spec.policy], case).decision.rung is Rung.TAKE_OVER


def _lost(faults: list[Fault], silences: list[AgentSilence]) -> set[str]:
    """Return the nodes that these tell to be lost."""
    lost = {silence.node for silence in silences if silence.node_answers is not True}
    return lost | {fault.node for fault in faults if fault.kind == START_FAILED.id and fault.node}


def _bar(incident: IncidentInWork, run: Run, faults: list[Fault]) -> None:
    """Try no other take-over in this incident once a worker could not carry one out, or an agent would not without a rank being lost."""
    told = [one for one in run.board.evidence if isinstance(one, TakeOverTrouble)]
    if any(one.rank is not None for one in told) or (told and all(fault.kind == TAKE_OVER_FAILED.id for fault in faults)):
        incident.barred = f"it failed in this incident: {told[0].why}"
        if Rung.TAKE_OVER not in incident.tried:
            incident.tried.append(Rung.TAKE_OVER)


def _seconds_for_twins(run: Run, faults: list[Fault]) -> float:
    """Return how long to wait for the other nodes when a script fails before its first step: they may be about to fail the same way."""
    told = {fault.node for fault in faults}
    if not faults or run.board.any_stepped() or told >= set(run.members) or any(fault.kind not in FOLLOWS_STEP for fault in faults):
        return 0.0
    return SLOW_STARTERS if run.board.all_started() else STRAGGLERS


def open_incident(run: Run, diagnosis: Diagnosis, detected: float) -> IncidentInWork:
    """Open the incident, or add what is new to the one in work, and record it."""
    root = diagnosis.root
    faults = [root, *(fault for fault in diagnosis.echoes if fault is not root)]
    incident = run.incident
    if incident is None:
        run.incidents += 1
        row = models.Incident(
            job_id=run.job.id,
            number=run.incidents,
            kind=root.kind,
            subject=root.subject,
            fault_at=min(root.at, detected),
            detected_at=detected,
            generation_before=run.generation,
            step_before=run.board.step_before if run.managed else None,
            because=diagnosis.because,
        )
        incident = run.incident = IncidentInWork(row=row, lap_at=row.fault_at, board=run.board)
        incident.lap("detect", detected)
        run.recorder.add(row)
    elif root.entry.weight > CATALOGUE[incident.row.kind].weight:
        incident.row.kind, incident.row.subject = root.kind, root.subject
        run.recorder.amend(models.Incident, incident.row.id, kind=root.kind, subject=root.subject)
    for fault in faults:
        if fault not in incident.faults:
            incident.faults.append(fault)
            incident.fault_rows.append(run.record_fault(fault, incident=incident.row.id, root=fault is root))
    incident.diagnosis = diagnosis
    return incident


def a_case(run: Run, incident: IncidentInWork | None, diagnosis: Diagnosis, lost: frozenset[str] = frozenset()) -> Case:
    """Return all that the policy may know."""
    now = time.time()
    lost |= frozenset(incident.lost if incident is not None else ()) & set(run.members)
    members = regular(run.board.membership, run.spec.nodes.ranks, lost)
    beside = tuple(node for node in run.members if node not in members and node not in lost)
    return Case(
        now=now,
        diagnosis=diagnosis,
        members=members,
        lost=lost,
        spares=run.spares() + beside,
        least=run.spec.nodes.fewest,
        past=run.past(now),
        tried=tuple(incident.tried) if incident is not None else (),
        budget=run.budget(),
        barred=(incident.barred if incident is not None else "") or run.why_not_kept(),
        ranks={node: tuple(ranks) for node, ranks in run.board.membership.items()},
        dead=run.board.dead(),
        standbys=run.pool.ready(len(run.board.ranks)),
        roles=run.roles,
        takeovers=incident.takeovers if incident is not None else 0,
    )


def choose(run: Run, incident: IncidentInWork, diagnosis: Diagnosis) -> Turn:
    """Have the job's policy decide, and record the decision with its reasons."""
    now = time.time()
    case = a_case(run, incident, diagnosis)
    answer = decide(POLICIES[run.spec.policy], case)
    record(run, incident, answer, now)
    incident.lap("diagnose", time.time())
    if answer.decision.rung is Rung.GIVE_UP:
        return Turn(Event.GAVE_UP, answer.decision.because)
    root = diagnosis.root
    run.attempts.append(Attempt(at=now, rung=answer.decision.rung, node=root.node, best=run.best, incident=incident.row.id))
    run.failures_before.append(Before(node=root.node, step=root.step, signature=root.signature))
    return Turn(Event.DECIDED, answer.decision.because)


def record(run: Run, incident: IncidentInWork, answer: Answer, now: float) -> None:
    """Write down what was decided, by which rule, and which rules passed."""
    decision = answer.decision
    incident.decision, incident.rung_at = decision, now
    incident.row.rung, incident.row.because = decision.rung, decision.because
    row = models.Decision(
        job_id=run.job.id,
        incident_id=incident.row.id,
        at=now,
        rung=decision.rung,
        rule=answer.rule,
        because=decision.because,
        act={
            "drop": list(decision.drop),
            "add": list(decision.add),
            "need": decision.need,
            "rotate": decision.rotate,
            "seats": [{"rank": seat.rank, "node": seat.node, "standby": seat.standby} for seat in decision.seats],
        },
        passed_over=dict(answer.passed_over),
    )
    run.recorder.add(row)
    run.recorder.amend(models.Incident, incident.row.id, rung=decision.rung, because=decision.because)
    incident.decisions.append(row)
