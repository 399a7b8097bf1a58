"""`holdfast incidents`: the incidents of a job, and one in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

from sqlmodel import SQLModel

from holdfast.cli.job_view import find_job, reference_to
from holdfast.cli.output import clock, echo, echo_facts, echo_json, echo_table, heading, hint, section
from holdfast.errors import UnknownIncident
from holdfast.history import queries
from holdfast.history.models import DecisionRecord, FaultRecord, Incident, IncidentDiagnosis, Job, Phase
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report import phases as known
from holdfast.report.case import hypotheses_of
from holdfast.report.explanations import explained, explained_in_short
from holdfast.report.phases import ROLLBACK
from holdfast.report.text.incident_text import rule_text
from holdfast.report.text.wording import NOTHING, count, duration, on_target, recovery_details, seat, share, since

NEGLIGIBLE: Final = 0.01
"""Seconds of a downtime that may belong to no phase without being shown."""
HEAD: Final = ("INCIDENT", "AFTER", "OUTCOME", "ACTION", "DETECTED", "DOWN", "LOST", "KIND", "TARGET")


def list_incidents(job: str | None, *, as_json: bool) -> int:
    """List the incidents of a job."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        found, reference = queries.incidents(history, row.id), reference_to(history, row)
    if as_json:
        echo_json({"job": row.name, "id": row.id, "incidents": [one.model_dump() for one in found]})
    elif not found:
        hint(f"Job '{row.name}' has no incident.")
    else:
        incident_table(found, row.at)
        hint(f"`holdfast incidents show N --job {reference}` shows one in full.")
    return 0


def show(incident: str, job: str | None, *, as_json: bool) -> int:
    """Show one incident."""
    with closing(History.open(create=False)) as history:
        _show_incident(history, find_incident(history, incident, job), as_json=as_json)
    return 0


def find_incident(book: History, reference: str, job: str | None) -> Incident:
    """Return the incident that *reference* names, of the run that *job* names; raise `UnknownIncident` or `UnknownJob`."""
    if job is None:
        return queries.incident(book, reference)
    run = find_job(book, job)
    found = [one for one in queries.incidents(book, run.id) if reference == str(one.number) or one.id.startswith(reference.lower())]
    if len(found) != 1:
        raise UnknownIncident(reference, run.name, run.id)
    return found[0]


def incident_table(incidents: Sequence[Incident], zero: float) -> None:
    """Write a row for each incident; *zero* is when the job began."""
    rows = [
        [
            str(one.number),
            since(one.fault_at, zero),
            one.outcome or "open",
            one.action or NOTHING,
            duration(one.detected_at - one.fault_at),
            duration(one.downtime_s),
            NOTHING if one.steps_lost is None else plural(one.steps_lost, "step"),
            one.kind,
            on_target(one.target),
        ]
        for one in incidents
    ]
    echo_table(HEAD, rows)


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
    heading(f"{name}, incident {one.number}: {one.kind} on {on_target(one.target)}, {one.outcome or 'open'}")
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
    if details := recovery_details(one.facts):
        yield "in-process recovery" if "rebuilt" in (one.facts or {}) else "state", "\n".join(details)
    after = f" → {one.generation_after}" if one.generation_after is not None else ""
    yield "generation", f"{one.generation_before}{after}"
    yield "id", one.id


def _show_faults(faults: Sequence[FaultRecord]) -> None:
    if faults:
        section("Faults")
    shown: dict[str, str] = {}
    for fault in faults:
        title = f"{fault.kind} on {on_target(fault.target)}"
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
        echo(f"  {share(one.confidence):>6}  {one.kind} on {on_target(one.target)}{target}")
        for at, source, quote in one.evidence:
            echo(f"            {clock(at)}  {source}: {quote.splitlines()[0] if quote else NOTHING}")
        for name, text in explained(one) if one is found[0] else explained_in_short(one):
            echo(f"            {name}: {text}")
        for name, symptoms in (("explains", one.explains), ("leaves unexplained", one.unexplained)):
            if symptoms:
                echo(f"            {name} {symptoms}")


def _show_decisions(decisions: Sequence[DecisionRecord]) -> None:
    if decisions:
        section("Decisions")
    for decision in decisions:
        echo(f"  {clock(decision.at)}  {decision.action}: {decision.reason}")
        for one in decision.act.get("seats") or ():
            echo(f"            {seat(one)}")
        for rule, why in decision.passed_over.items():
            echo(f"            skipped {rule_text(rule)}: {why}")


def _show_phases(phases: Sequence[Phase], one: Incident) -> None:
    if not phases:
        return
    section("Phases")
    for part in known.parts(phases):
        bar = "█" * round(part.share * 30)
        echo(f"  {part.label:<24}{duration(part.seconds):>10}  {share(part.share):>6}  {bar:<30}  {part.kind.meaning}".rstrip())
    total = sum(max(0.0, phase.seconds) for phase in phases)
    down = sum(max(0.0, phase.seconds) for phase in phases if phase.name != ROLLBACK)
    if (rest := (one.downtime_s or 0.0) - down) > NEGLIGIBLE:
        total += rest
        echo(
            f"  {'unknown':<24}{duration(rest):>10}  until the first new step: the script keeps its own state, and reports no phases of it"
        )
    echo(f"  {'all':<24}{duration(total):>10}")
