"""`holdfast history` and `holdfast show`: past jobs, and one incident in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from sqlmodel import SQLModel

from holdfast.accounting.losses import downtime, losses
from holdfast.cli.changes import ALWAYS_SHOWN, in_recovery
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, echo, echo_facts, echo_json, echo_styled, echo_table, heading, hint, section
from holdfast.errors import UnknownIncident
from holdfast.history import queries
from holdfast.history.models import DecisionRecord, FaultRecord, Incident, IncidentDiagnosis, Job, Phase
from holdfast.history.store import History
from holdfast.report import cost_table
from holdfast.report import phases as known
from holdfast.report.case import hypotheses_of
from holdfast.report.memory import IN_MEMORY
from holdfast.report.notes import collapsed
from holdfast.report.phases import ROLLBACK
from holdfast.report.wording import (
    NOTHING,
    count,
    duration,
    incident_closed,
    incident_opened,
    kept_ranks,
    plural,
    rank_count,
    recovery_details,
    seat,
    share,
)

NEGLIGIBLE: Final = 0.01
"""Seconds of a downtime that may belong to no phase without being shown."""
JOBS: Final = ("JOB", "STATE", "SUBMITTED", "TOOK", "STEPS", "INCIDENTS", "DOWNTIME", "ID")
INCIDENTS: Final = ("INCIDENT", "AFTER", "OUTCOME", "ACTION", "DETECTED", "DOWN", "LOST", "KIND", "SUBJECT")


def history(job: str | None, *, limit: int, as_json: bool) -> int:
    """List all jobs, or show what happened to one."""
    with closing(History.open(create=False)) as book:
        if job is None:
            _list_jobs(book, limit, as_json=as_json)
        else:
            _show_job(book, find_job(book, job), as_json=as_json)
    return 0


def show(incident: str, job: str | None, *, as_json: bool) -> int:
    """Show one incident."""
    with closing(History.open(create=False)) as book:
        _show_incident(book, find_incident(book, incident, job), as_json=as_json)
    return 0


def find_incident(book: History, reference: str, job: str | None) -> Incident:
    """Return the incident that *reference* names, of the run that *job* names; raise `UnknownIncident` or `UnknownJob`."""
    if job is None:
        return queries.incident(book, reference)
    run = find_job(book, job)
    found = [one for one in queries.incidents(book, run.id) if reference == str(one.number) or one.id.startswith(reference.lower())]
    if len(found) != 1:
        raise UnknownIncident(f"{reference} of job {run.name}")
    return found[0]


def _list_jobs(book: History, limit: int, *, as_json: bool) -> None:
    records = [_job_record(book, job) for job in queries.jobs(book, limit=limit)]
    if as_json:
        echo_json(records)
    elif not records:
        hint("The history is empty. `holdfast run JOB_FILE` starts a job, `holdfast demo` shows one.")
    else:
        rows = [
            [
                record["job"],
                record["state"],
                clock(record["submitted"]),
                duration(record["seconds"]),
                count(record["step"]),
                str(record["incidents"]),
                duration(record["downtime_s"]),
                record["id"],
            ]
            for record in records
        ]
        echo_table(JOBS, rows, coloured=1)


def _job_record(book: History, job: Job) -> dict[str, Any]:
    state, step, incidents = queries.state_of(book, job.id), queries.last_step(book, job.id), queries.incidents(book, job.id)
    ended = state.at if state is not None and state.after in queries.TERMINAL else None
    return {
        "job": job.name,
        "id": job.id,
        "state": state.after if state else "LAUNCHING",
        "reason": state.reason if state else "",
        "submitted": job.at,
        "seconds": None if ended is None else ended - job.at,
        "step": step.step if step else None,
        "incidents": len(incidents),
        "downtime_s": downtime(book, job) if incidents else 0.0,
    }


# -- one job ----------------------------------------------------------------------------------------------------------


def _show_job(book: History, job: Job, *, as_json: bool) -> None:
    rows: dict[str, Sequence[SQLModel]] = {
        "generations": queries.generations(book, job.id),
        "transitions": queries.transitions(book, job.id),
        "incidents": queries.incidents(book, job.id),
        "decisions": queries.decisions(book, job.id),
        "checkpoints": queries.checkpoints(book, job.id),
        "job_events": queries.job_events(book, job.id),
    }
    if as_json:
        lost = losses(book, job).as_record()
        echo_json({**_job_record(book, job), "losses": lost, **{name: [row.model_dump() for row in found] for name, found in rows.items()}})
        return
    heading(f"{job.name}  submitted {clock(job.at)}  id {job.id}")
    for line in sorted(_lines(book, job), key=lambda line: (line.at, line.id)):
        echo_styled(f"{line.mark} {clock(line.at)}  {line.text}", line.style)
    if rows["incidents"]:
        echo()
        _incident_table(queries.incidents(book, job.id), job.at)
    if rows["generations"]:
        echo()
        echo_facts(list(cost_table.figures(losses(book, job))))
    if rows["incidents"]:
        echo()
        hint(f"`holdfast show N --job {job.name}` shows an incident in full.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """A line of a job's history; time and id order them."""

    at: float
    id: str
    text: str
    mark: str = " "
    """Precedes the time: `!` where an incident begins, `=` where it is closed."""
    style: str = ""


def _lines(book: History, job: Job) -> Iterator[HistoryLine]:
    incidents, generations = queries.incidents(book, job.id), queries.generations(book, job.id)
    yield from _recovery_lines(book, job, incidents)
    for one in generations:
        text = f"generation {one.number}: {rank_count(one.world_size, one.facts)} on {', '.join(one.ranks)}{kept_ranks(one.facts)}"
        yield HistoryLine(at=one.at, id=one.id, text=text, style="dim" if in_recovery(one.at, incidents) else "")
    for note in collapsed(queries.job_events(book, job.id), {node for one in generations for node in one.ranks}):
        repeated = f" ({note.repeated}, last at {clock(note.last)})" if note.repeated else ""
        yield HistoryLine(at=note.at, id=note.id, text=f"{note.text}{repeated}", style="dim")
    for saved in queries.checkpoints(book, job.id):
        if saved.problem and saved.problem not in IN_MEMORY:  # those have notes
            yield HistoryLine(at=saved.at, id=saved.id, text=f"{saved.problem}: {saved.path}: {saved.reason}")


def _recovery_lines(book: History, job: Job, incidents: Sequence[Incident]) -> Iterator[HistoryLine]:
    """Yield the job's states, decisions and incidents; the reason of a decision is not repeated with a state."""
    numbers = {one.id: one.number for one in incidents}
    decisions = queries.decisions(book, job.id)
    reasons = {decision.reason for decision in decisions}
    for transition in queries.transitions(book, job.id):
        text = transition.after if transition.reason in reasons else f"{transition.after}: {transition.reason}"
        brief = in_recovery(transition.at, incidents) and transition.after not in ALWAYS_SHOWN
        yield HistoryLine(at=transition.at, id=transition.id, text=text, style="dim" if brief else "")
    for decision in decisions:
        text = f"incident {numbers.get(decision.incident_id, '?')}: {decision.action}, because {decision.reason}"
        yield HistoryLine(at=decision.at, id=decision.id, text=text)
    for incident in incidents:
        yield HistoryLine(at=incident.detected_at, id=incident.id, text=incident_opened(incident), mark="!", style="yellow")
        if incident.closed_at is not None:
            style = "green" if incident.outcome == "recovered" else "red"
            yield HistoryLine(at=incident.closed_at, id=incident.id, text=incident_closed(incident), mark="=", style=style)


def _incident_table(incidents: Sequence[Incident], zero: float) -> None:
    rows = [
        [
            str(one.number),
            duration(max(0.0, one.fault_at - zero)),
            one.outcome or "open",
            one.action or NOTHING,
            duration(one.detected_at - one.fault_at),
            duration(one.downtime_s),
            NOTHING if one.steps_lost is None else plural(one.steps_lost, "step"),
            one.kind,
            one.target,
        ]
        for one in incidents
    ]
    echo_table(INCIDENTS, rows)


# -- one incident -----------------------------------------------------------------------------------------------------


def _show_incident(book: History, one: Incident, *, as_json: bool) -> None:
    faults, decisions = queries.faults(book, incident_id=one.id), queries.decisions(book, incident_id=one.id)
    phases, diagnoses = queries.phases(book, one.id), queries.diagnoses(book, incident_id=one.id)
    with book.session() as session:
        job = session.get(Job, one.job_id)
    name = job.name if job else one.job_id
    if as_json:
        parts: dict[str, Sequence[SQLModel]] = {"faults": faults, "diagnoses": diagnoses, "decisions": decisions, "phases": phases}
        echo_json({"job": name, **one.model_dump(), **{key: [row.model_dump() for row in rows] for key, rows in parts.items()}})
        return
    heading(f"{name}, incident {one.number}: {one.kind} on {one.target}, {one.outcome or 'open'}")
    echo_facts(list(_incident_facts(one)))
    _show_faults(faults)
    _show_hypotheses(diagnoses)
    _show_decisions(decisions)
    _show_phases(phases, one)


def _incident_facts(one: Incident) -> Iterator[tuple[str, str]]:
    yield "occurred", clock(one.fault_at)
    yield "detected", f"{duration(one.detected_at - one.fault_at)} later"
    if one.commands_sent_at is not None:
        yield "first command", f"{duration(one.commands_sent_at - one.detected_at)} after that"
    if one.action:
        yield "action", one.action
    if one.reason:
        yield "reason", one.reason
    if one.downtime_s is not None:
        until = "until all processes had started; no steps are reported" if one.until_started else "to the first new step"
        yield "downtime", f"{duration(one.downtime_s)} from the fault {until}"
    if one.step_before is not None:
        lost = f"; {plural(one.steps_lost, 'step')} lost" if one.steps_lost is not None else ""
        resumed = f", resumed after step {count(one.resumed_step)}" if one.resumed_step is not None else ""
        yield "steps", f"had reached {count(one.step_before)}{resumed}{lost}"
    if one.facts:
        yield "in-process recovery" if "rebuilt" in one.facts else "state", "\n".join(recovery_details(one.facts))
    after = f" → {one.generation_after}" if one.generation_after is not None else ""
    yield "generation", f"{one.generation_before}{after}"
    yield "id", one.id


def _show_faults(faults: Sequence[FaultRecord]) -> None:
    if faults:
        section("Faults")
    shown: dict[str, str] = {}
    for fault in faults:
        title = f"{fault.kind} on {fault.target}"
        root = " (root cause)" if fault.root else ""
        step = f" at step {count(fault.step)}" if fault.step is not None else ""
        echo(f"  {clock(fault.at)}  {title}{step}{root}: recommends {fault.recommended_action}, attributed to {fault.attributed_to}")
        for name, value in fault.evidence.items():
            if value not in (None, "", [], {}):
                text = str(value).strip()
                if "\n" in text and shown.setdefault(text, title) is not title:  # one traceback is the evidence of several faults
                    text = f"as of {shown[text]} above"
                _show_evidence("" if name == "quote" else f"{name}: ", text)


def _show_evidence(name: str, text: str) -> None:
    """Quote evidence: one line after its name, several below it."""
    if "\n" not in text:
        echo(f"            {name}{text}")
        return
    echo(f"            {name}".rstrip())
    for line in text.splitlines():
        echo(f"            │ {line}")


def _show_hypotheses(diagnoses: Sequence[IncidentDiagnosis]) -> None:
    found = list(hypotheses_of(diagnoses))
    if found:
        section("Hypotheses")
    for one in found:
        target = f", attributed to {one.attributed_to}" if one.attributed_to not in {"", "none"} else ""
        echo(f"  {share(one.confidence):>6}  {one.kind} of {one.target}{target}")
        for at, source, quote in one.evidence:
            echo(f"            {clock(at)}  {source}: {quote.splitlines()[0] if quote else NOTHING}")
        for name, symptoms in (("explains", one.explains), ("leaves unexplained", one.unexplained)):
            if symptoms:
                echo(f"            {name} {symptoms}")


def _show_decisions(decisions: Sequence[DecisionRecord]) -> None:
    if decisions:
        section("Decisions")
    for decision in decisions:
        echo(f"  {clock(decision.at)}  {decision.action} by {decision.rule}, because {decision.reason}")
        for one in decision.act.get("seats") or ():
            echo(f"            {seat(one)}")
        for rule, why in decision.passed_over.items():
            echo(f"            skipped {rule}: {why}")


def _show_phases(phases: Sequence[Phase], one: Incident) -> None:
    if not phases:
        return
    section("Phases")
    for part in known.parts(phases):
        bar = "█" * round(part.share * 30)
        term = f"({part.kind.term})" if part.kind.term else ""
        echo(f"  {part.label:<14}{term:<5}{duration(part.seconds):>10}  {share(part.share):>6}  {bar:<30}  {part.kind.meaning}".rstrip())
    total = sum(max(0.0, phase.seconds) for phase in phases)
    down = sum(max(0.0, phase.seconds) for phase in phases if phase.name != ROLLBACK)
    if (rest := (one.downtime_s or 0.0) - down) > NEGLIGIBLE:
        total += rest
        echo(
            f"  {'unknown':<19}{duration(rest):>10}  until the first new step: the script keeps its own state, and reports no phases of it"
        )
    echo(f"  {'all':<19}{duration(total):>10}")
