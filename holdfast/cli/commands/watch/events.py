"""`holdfast status --events`: everything that happened to a job, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlmodel import SQLModel

from holdfast.accounting.losses import losses
from holdfast.cli.changes import ALWAYS_SHOWN, in_recovery
from holdfast.cli.commands.watch.incidents import incident_table
from holdfast.cli.commands.watch.ps import job_records
from holdfast.cli.job_view import reference_to
from holdfast.cli.output import clock, echo, echo_facts, echo_json, echo_styled, heading, hint
from holdfast.history import queries
from holdfast.history.models import Incident, Job
from holdfast.history.store import History
from holdfast.report import cost_table
from holdfast.report.memory import IN_MEMORY
from holdfast.report.notes import collapsed
from holdfast.report.text.wording import decided, incident_closed, incident_opened, kept_ranks, rank_count


def show_events(book: History, job: Job, *, as_json: bool) -> None:
    """Show everything that happened to a job, in order."""
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
        (record,) = job_records(book, [job])
        echo_json({**record, "losses": lost, **{name: [row.model_dump() for row in found] for name, found in rows.items()}})
        return
    heading(f"{job.name}  submitted {clock(job.at)}  id {job.id}")
    for line in sorted(_lines(book, job), key=lambda line: (line.at, line.id)):
        echo_styled(f"{line.mark} {clock(line.at)}  {line.text}", line.style)
    if rows["incidents"]:
        echo()
        incident_table(queries.incidents(book, job.id), job.at)
    if rows["generations"]:
        echo()
        echo_facts(list(cost_table.figures(losses(book, job))))
    if rows["incidents"]:
        echo()
        hint(f"`holdfast incidents show N --job {reference_to(book, job)}` shows an incident in full.")


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
        text = decided(numbers.get(decision.incident_id, "?"), decision.action, decision.reason)
        yield HistoryLine(at=decision.at, id=decision.id, text=text)
    for incident in incidents:
        yield HistoryLine(at=incident.detected_at, id=incident.id, text=incident_opened(incident), mark="!", style="yellow")
        if incident.closed_at is not None:
            style = "green" if incident.outcome == "recovered" else "red"
            yield HistoryLine(at=incident.closed_at, id=incident.id, text=incident_closed(incident), mark="=", style=style)
