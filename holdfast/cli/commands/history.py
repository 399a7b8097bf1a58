"""`holdfast history` and `holdfast show`: what the history knows about what has been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlmodel import SQLModel

from holdfast.accounting.losses import downtime, losses
from holdfast.cli.changes import IN_FULL, in_recovery
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, heading, hint, say, say_facts, say_json, say_rows, say_styled
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

TOLD: Final = 0.01
"""Seconds of a downtime that its phases may leave open without a word."""


def history(reference: str | None, *, limit: int, as_json: bool) -> int:
    """List all jobs, or what befell one."""
    book = History.open(create=False)
    try:
        if reference is None:
            _jobs(book, limit, as_json=as_json)
        else:
            _life(book, find_job(book, reference), as_json=as_json)
    finally:
        book.close()
    return 0


def show(reference: str, job: str | None, *, as_json: bool) -> int:
    """Show one incident."""
    book = History.open(create=False)
    try:
        _incident(book, found_incident(book, reference, job), as_json=as_json)
    finally:
        book.close()
    return 0


def found_incident(book: History, reference: str, job: str | None) -> Incident:
    """Return the incident that *reference* names, of the very run that *job* names; raise `UnknownIncident` or `UnknownJob`."""
    if job is None:
        return queries.incident(book, reference)
    run = find_job(book, job)
    found = [one for one in queries.incidents(book, run.id) if reference == str(one.number) or one.id.startswith(reference.lower())]
    if len(found) != 1:
        raise UnknownIncident(f"{reference} of job {run.name}")
    return found[0]


def _jobs(book: History, limit: int, *, as_json: bool) -> None:
    records = [_job_record(book, job) for job in queries.jobs(book, limit=limit)]
    if as_json:
        say_json(records)
    elif not records:
        hint("The history is empty. `holdfast run JOB_FILE` starts a job, `holdfast demo` shows one.")
    else:
        head = ("JOB", "STATE", "SUBMITTED", "TOOK", "STEPS", "INCIDENTS", "DOWNTIME", "ID")
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
        say_rows(head, rows, coloured=1)


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


def _life(book: History, job: Job, *, as_json: bool) -> None:
    rows: dict[str, Sequence[SQLModel]] = {
        "generations": queries.generations(book, job.id),
        "moves": queries.transitions(book, job.id),
        "incidents": queries.incidents(book, job.id),
        "decisions": queries.decisions(book, job.id),
        "checkpoints": queries.checkpoints(book, job.id),
        "job_events": queries.job_events(book, job.id),
    }
    if as_json:
        lost = losses(book, job).as_record()
        say_json({**_job_record(book, job), "losses": lost, **{name: [row.model_dump() for row in found] for name, found in rows.items()}})
        return
    heading(f"{job.name}  submitted {clock(job.at)}  id {job.id}")
    for line in sorted(_lines(book, job), key=lambda line: (line.at, line.id)):
        say_styled(f"{line.mark} {clock(line.at)}  {line.text}", line.style)
    if rows["incidents"]:
        say()
        _incident_rows(queries.incidents(book, job.id), job.at)
    if rows["generations"]:
        say()
        say_facts(list(cost_table.figures(losses(book, job))))
    if rows["incidents"]:
        say()
        hint(f"`holdfast show N --job {job.name}` tells an incident in full.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """A line of a job's life; time and id order them."""

    at: float
    id: str
    text: str
    mark: str = " "
    """Stands before the time of what must not be overlooked: `!` where an incident begins, `=` where it is over."""
    style: str = ""


def _lines(book: History, job: Job) -> Iterator[HistoryLine]:
    incidents, generations = queries.incidents(book, job.id), queries.generations(book, job.id)
    yield from _recoveries(book, job, incidents)
    for one in generations:
        nodes = ", ".join(one.ranks)
        text = f"generation {one.number}: {rank_count(one.world_size, one.facts)} on {nodes}{kept_ranks(one.facts)}"
        yield HistoryLine(at=one.at, id=one.id, text=text, style="dim" if in_recovery(one.at, incidents) else "")
    for note in collapsed(queries.job_events(book, job.id), {node for one in generations for node in one.ranks}):
        again = f" ({note.repeated}, last at {clock(note.last)})" if note.repeated else ""
        yield HistoryLine(at=note.at, id=note.id, text=f"{note.text}{again}", style="dim")
    for saved in queries.checkpoints(book, job.id):
        if saved.problem and saved.problem not in IN_MEMORY:  # of those a note tells
            yield HistoryLine(at=saved.at, id=saved.id, text=f"{saved.problem}: {saved.path}: {saved.reason}")


def _recoveries(book: History, job: Job, incidents: Sequence[Incident]) -> Iterator[HistoryLine]:
    """Yield the job's states, and the incidents, which stand out among them; a reason that a decision gave is not repeated."""
    numbers = {one.id: one.number for one in incidents}
    decisions = queries.decisions(book, job.id)
    reasons = {decision.reason for decision in decisions}
    for move in queries.transitions(book, job.id):
        text = move.after if move.reason in reasons else f"{move.after}: {move.reason}"
        yield HistoryLine(
            at=move.at, id=move.id, text=text, style="dim" if in_recovery(move.at, incidents) and move.after not in IN_FULL else ""
        )
    for decision in decisions:
        text = f"incident {numbers.get(decision.incident_id, '?')}: {decision.action}, because {decision.reason}"
        yield HistoryLine(at=decision.at, id=decision.id, text=text)
    for incident in incidents:
        yield HistoryLine(at=incident.detected_at, id=incident.id, text=incident_opened(incident), mark="!", style="yellow")
        if incident.closed_at is not None:
            style = "green" if incident.outcome == "recovered" else "red"
            yield HistoryLine(at=incident.closed_at, id=incident.id, text=incident_closed(incident), mark="=", style=style)


def _incident_rows(incidents: Sequence[Incident], zero: float) -> None:
    head = ("INCIDENT", "AFTER", "OUTCOME", "ANSWER", "DETECTED", "DOWN", "LOST", "KIND", "SUBJECT")
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
            one.subject,
        ]
        for one in incidents
    ]
    say_rows(head, rows)


def _incident(book: History, one: Incident, *, as_json: bool) -> None:
    faults, decisions = queries.faults(book, incident_id=one.id), queries.decisions(book, incident_id=one.id)
    phases, verdicts = queries.phases(book, one.id), queries.diagnoses(book, incident_id=one.id)
    with book.session() as session:
        job = session.get(Job, one.job_id)
    name = job.name if job else one.job_id
    if as_json:
        parts: dict[str, Sequence[SQLModel]] = {"faults": faults, "verdicts": verdicts, "decisions": decisions, "phases": phases}
        say_json({"job": name, **one.model_dump(), **{key: [row.model_dump() for row in rows] for key, rows in parts.items()}})
        return
    heading(f"{name}, incident {one.number}: {one.kind} on {one.subject}, {one.outcome or 'open'}")
    say_facts(list(_incident_facts(one)))
    _faults(faults)
    _weighed(verdicts)
    _decisions(decisions)
    _phases(phases, one)


def _title(text: str) -> None:
    say()
    heading(text)


def _incident_facts(one: Incident) -> Iterator[tuple[str, str]]:
    yield "happened", clock(one.fault_at)
    yield "detected", f"{duration(one.detected_at - one.fault_at)} later"
    if one.commands_sent_at is not None:
        yield "first order", f"{duration(one.commands_sent_at - one.detected_at)} after that"
    if one.action:
        yield "answer", one.action
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
        yield "take-over" if "rebuilt" in one.facts else "state", "\n".join(recovery_details(one.facts))
    after = f" → {one.generation_after}" if one.generation_after is not None else ""
    yield "generation", f"{one.generation_before}{after}"
    yield "id", one.id


def _faults(faults: Sequence[FaultRecord]) -> None:
    if faults:
        _title("Seen")
    shown: dict[str, str] = {}
    for fault in faults:
        root = " (the root)" if fault.root else ""
        step = f" at step {count(fault.step)}" if fault.step is not None else ""
        say(f"  {clock(fault.at)}  {fault.kind} on {fault.subject}{step}{root}: asks for {fault.recommended_action}, blames {fault.blame}")
        for name, value in fault.evidence.items():
            if value not in (None, "", [], {}):
                _evidence("" if name == "quote" else f"{name}: ", _once(str(value).strip(), f"{fault.kind} on {fault.subject}", shown))


def _once(text: str, told_of: str, shown: dict[str, str]) -> str:
    """Return *text*, or where it already stands: a traceback comes with every fault that it speaks for."""
    if "\n" not in text:
        return text
    before = shown.setdefault(text, told_of)
    if before is told_of:
        return text
    return f"as of {before} above"


def _evidence(name: str, text: str) -> None:
    """Quote evidence: short on its line, long below."""
    if "\n" not in text:
        say(f"            {name}{text}")
        return
    say(f"            {name}".rstrip())
    for line in text.splitlines():
        say(f"            │ {line}")


def _weighed(verdicts: Sequence[IncidentDiagnosis]) -> None:
    found = list(hypotheses_of(verdicts))
    if found:
        _title("Explained by")
    for one in found:
        blames = f", blames {one.blame}" if one.blame not in {"", "none"} else ""
        say(f"  {share(one.weight):>6}  {one.kind} of {one.subject}{blames}")
        for at, source, quote in one.evidence:
            say(f"            {clock(at)}  {source}: {quote.splitlines()[0] if quote else NOTHING}")
        for name, symptoms in (("explains", one.explains), ("leaves unexplained", one.unexplained)):
            if symptoms:
                say(f"            {name} {symptoms}")


def _decisions(decisions: Sequence[DecisionRecord]) -> None:
    if decisions:
        _title("Decided")
    for decision in decisions:
        say(f"  {clock(decision.at)}  {decision.action} by {decision.rule}, because {decision.reason}")
        for one in decision.act.get("seats") or ():
            say(f"            {seat(one)}")
        for rule, why in decision.passed_over.items():
            say(f"            passed over {rule}: {why}")


def _phases(phases: Sequence[Phase], one: Incident) -> None:
    if not phases:
        return
    _title("Phases")
    for part in known.parts(phases):
        bar = "█" * round(part.share * 30)
        term = f"({part.kind.term})" if part.kind.term else ""
        say(f"  {part.label:<14}{term:<5}{duration(part.seconds):>10}  {share(part.share):>6}  {bar:<30}  {part.kind.meaning}".rstrip())
    told = sum(max(0.0, phase.seconds) for phase in phases)
    down = sum(max(0.0, phase.seconds) for phase in phases if phase.name != ROLLBACK)
    if (rest := (one.downtime_s or 0.0) - down) > TOLD:
        say(
            f"  {'not known':<19}{duration(rest):>10}  until the first new step: the script keeps its own state, and reports no parts of it"
        )
    say(f"  {'all':<19}{duration(told + (rest if rest > TOLD else 0.0)):>10}")
