"""The report page of a job: its history and plots put into the template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from markupsafe import Markup

import holdfast.detectors.all_kinds  # noqa: F401 (registers every kind in the catalogue)
from holdfast.detectors import catalogue
from holdfast.detectors.catalogue import FaultKind
from holdfast.history.models import Checkpoint, FaultRecord, Generation, NodeStatusChange
from holdfast.plurals import plural
from holdfast.report import cost_table, memory, phases
from holdfast.report.case import LONGEST, IncidentCase, evidence_of, hypotheses_of
from holdfast.report.explanations import explained, explained_in_short
from holdfast.report.next_steps import logs_command, next_steps
from holdfast.report.notes import collapsed
from holdfast.report.pages import cost_page, recoveries
from holdfast.report.pages.charts import loss, throughput, timeline
from holdfast.report.pages.charts.drawing import DrawingBox, style
from holdfast.report.pages.configuration import configuration
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.pages.template_env import Tile, render
from holdfast.report.text import incident_text, wording

STATE_LOOK: Final = {"COMPLETED": "good", "FAILED": "bad", "CANCELLED": "plain", "RUNNING": "live", "LAUNCHING": "live"}
"""CSS class of each state; every other state is a recovery under way."""
MOST_CLOSE_UPS: Final = 16
MOST_ROWS: Final = 200
"""Rows of any other table; the newest are shown, and how many are not."""
_LONG_REASON: Final = 20
"""A reason of so many characters stands once on the page, elsewhere there is a link."""
FIRST_NODES: Final = 8
"""Nodes of a generation that are shown at once, new ones among them."""
MOST_GENERATIONS: Final = 100
MOST_MEMBERS: Final = 2000
"""Nodes that are named in all generations together, those of the newest first."""
FIRST_CHECKPOINTS: Final = 8
"""Checkpoints that are shown at once."""
NEWEST_CHECKPOINTS: Final = 30
"""Checkpoints that are shown, besides those with problems."""
MOST_TARGETS: Final = 4
"""Targets of a fault that are named in one row."""
EVIDENCE_CHARACTERS: Final = 250_000
"""Limit for the evidence of all faults together, so that the page stays small."""

_WIDE: Final = {
    "time": DrawingBox(width=1000, height=345, left=84, right=24, top=46, bottom=58),
    "throughput": DrawingBox(width=1000, height=250, left=84, right=24, top=46, bottom=58),
    "steps": DrawingBox(width=1000, height=345, left=84, right=24, top=46, bottom=43),
    "lanes": DrawingBox(width=1000, height=0, left=84, right=24, top=46, bottom=58),
    "bars": DrawingBox(width=1000, height=0, left=230, right=90, top=6, bottom=43),
}
_NARROW: Final = {
    "time": DrawingBox(width=350, height=300, left=60, right=16, top=46, bottom=58),
    "throughput": DrawingBox(width=350, height=240, left=60, right=16, top=46, bottom=58),
    "steps": DrawingBox(width=350, height=290, left=60, right=16, top=46, bottom=43),
    "lanes": DrawingBox(width=350, height=0, left=76, right=16, top=46, bottom=58),
    "bars": DrawingBox(width=350, height=0, left=2, right=72, top=0, bottom=43),
}
_CLOSE_UP: Final = DrawingBox(width=440, height=210, left=64, right=14, top=10, bottom=43)


def page(history: JobHistory) -> str:
    """Return the report as HTML."""
    shown = history.shown_cases
    decided = _decided(history)
    rates = throughput.rate_changes(history)
    spans = timeline.job_spans(history)
    longest = max(400, min(LONGEST, EVIDENCE_CHARACTERS // max(1, sum(len(case.faults) for case in shown))))
    drawn = recoveries.bars(history.cases)
    return render(
        "report.html.j2",
        history=history,
        job=history.job,
        cases=shown,
        gaps=history.steps.with_loss and len(history.steps) > np.count_nonzero(np.isfinite(history.steps.loss)),
        tiles=list(tiles(history)),
        sentence=_sentence(history),
        configuration=configuration(history.job, history.gpus),
        goodput={"categories": cost_page.goodput_rows(history.bill), "unit": history.bill.unit},
        rates=rates,
        rate_rows=list(throughput.rows(history, rates, MOST_ROWS)),
        rate=wording.per_second,
        rate_unit=throughput.unit(history.steps),
        signed=throughput.signed,
        next_steps=next_steps(history.job, history.bill, history.cases, {one.node: one for one in history.status_changes}),
        logs=lambda case: logs_command(history.job.name, case),
        log_files=lambda case: _log_files(history, case),
        incident_of=lambda reason, generation=None: _incident_of(decided, reason, generation),
        fault_kinds=_fault_kinds(history),
        rule_text=incident_text.rule_text,
        sum_of_terms=phases.SUM,
        look=STATE_LOOK.get(history.state, "warning"),
        last_transition=history.transitions[-1] if history.transitions else None,
        states=[(color.variable, state) for color, state in timeline.states(spans)],
        drawings=_drawings(history, drawn, rates, spans),
        close_ups=_close_ups(history, shown),
        bar_count=len(drawn),
        bars_left_out=sum(bool(case.phases) for case in history.cases) - len(drawn),
        kinds=recoveries.kinds(drawn),
        phase_colors={kind: color.variable for kind, color in recoveries.COLORS.items()},
        generations=_memberships(history),
        nodes=_node_statuses(history),
        checkpoints=_checkpoints(history),
        loose_faults=_loose_faults(history),
        notes=collapsed(history.job_events, {node for one in history.generations for node in one.ranks}),
        memory=_memory(history),
        most_rows=MOST_ROWS,
        titles={kind: entry.title for kind, entry in catalogue.CATALOGUE.items()},
        decision_fields=lambda act: list(evidence_of(wording.act(act), longest=longest)),
        evidence=lambda fields: list(evidence_of(fields, longest=longest)),
        parts=phases.parts,
        hypotheses=lambda diagnoses: list(hypotheses_of(diagnoses)),
        explained=explained,
        explained_in_short=explained_in_short,
        recovery_details=wording.recovery_details,
        source=wording.source,
        open_case=_open_case(history),
    )


# -- the headline ---------------------------------------------------------------------------------------------------------


def _sentence(history: JobHistory) -> str:
    """Return the result of the job in one sentence."""
    wall, last = wording.duration(history.wall_seconds), _last_step(history)
    steps = "" if last is None else plural(last, "step")
    match history.state:
        case "COMPLETED":
            head = f"Completed {steps} in {wall}" if steps else f"Completed after {wall}"
        case "FAILED" | "CANCELLED":
            head = f"{'Failed' if history.state == 'FAILED' else 'Was cancelled'} after {f'{steps} and ' if steps else ''}{wall}"
        case _:
            is_counted = steps or not history.transitions
            head = f"Has completed {steps or 'no step'} in {wall} so far" if is_counted else f"Has run for {wall} so far"
    if not history.cases:
        return f"{head}, with no incident."
    met = "with" if history.state == "FAILED" else "through"
    return f"{head}, {met} {plural(len(history.cases), 'incident')}: {cost_table.sentence(history.losses)}."


def tiles(history: JobHistory) -> Iterator[Tile]:
    """Yield the headline numbers."""
    costs = history.losses
    until = f"ended {wording.moment(history.end)}" if history.ended else "so far"
    yield Tile(label="Wall time", value=wording.duration(history.wall_seconds), note=until)
    yield Tile(label="ETTR", value=wording.share(costs.ettr), note="of wall time in steps that were kept", share=costs.ettr)
    yield _steps_tile(history)
    yield _loss_tile(history)
    yield _incidents_tile(history)
    downtimes = [case.incident.downtime_s for case in history.cases if case.incident.downtime_s is not None]
    typical = f"{wording.duration(median(downtimes))} per incident, in the median" if downtimes else ""
    yield Tile(label="Downtime", value=wording.duration(costs.downtime_s), note=typical or ("not recovered" if history.cases else "none"))
    thrown_away = "no steps reported" if costs.steps_lost is None else f"{wording.duration(costs.rollback_s)} of work"
    none_lost = "nothing thrown away" if costs.steps_lost == 0 else thrown_away
    yield Tile(label="Steps lost", value=wording.count(costs.steps_lost), note=none_lost)
    yield _checkpoints_tile(history)


def _last_step(history: JobHistory) -> int | None:
    kept = history.steps.kept
    return int(history.steps.step[kept[-1]]) if len(kept) else None


def _steps_tile(history: JobHistory) -> Tile:
    last = _last_step(history)
    if last is None:
        return Tile(label="Steps", value=wording.NOTHING, note="none reported")
    until = next((one.until for one in reversed(history.generations) if one.until is not None), None)
    of = f"of {wording.count(until)}; " if until is not None else ""
    typical = float(np.median(history.steps.seconds[history.steps.kept]))
    return Tile(label="Steps", value=wording.count(last), note=f"{of}{wording.duration(typical)} each, in the median")


def _loss_tile(history: JobHistory) -> Tile:
    values = history.steps.loss[history.steps.kept]
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Tile(label="Last loss", value=wording.NOTHING, note="none finite reported")
    bad = len(values) - len(finite)
    note = f"{plural(bad, 'step')} without a finite one" if bad else f"first {finite[0]:.4g}, lowest {finite.min():.4g}"
    return Tile(label="Last loss", value=f"{finite[-1]:.4g}", note=note)


def _incidents_tile(history: JobHistory) -> Tile:
    number = len(history.cases)
    is_open = sum(case.incident.closed_at is None for case in history.cases)
    recovered = sum(case.incident.outcome == "recovered" for case in history.cases)
    note = f"{is_open} open" if is_open else f"{'all' if recovered == number else recovered} recovered" if number else "none detected"
    return Tile(label="Incidents", value=wording.count(number), note=note)


def _checkpoints_tile(history: JobHistory) -> Tile:
    """Count the checkpoints on disk, without problems of in-memory snapshots."""
    on_disk = [one for one in history.checkpoints if one.problem not in memory.IN_MEMORY]
    complete = [one for one in on_disk if one.problem is None]
    seconds = [one.seconds for one in complete if one.seconds is not None]
    typical = f"{wording.duration(median(seconds))} each, in the median" if seconds else "none written"
    problems = len(on_disk) - len(complete)
    return Tile(label="Checkpoints", value=wording.count(len(complete)), note=f"{problems} more with problems" if problems else typical)


def _decided(history: JobHistory) -> dict[str | int, int]:
    """Return by reason, and by the generation that it led to, the number of the incident whose card has the reason."""
    found: dict[str | int, int] = {}
    for case in history.shown_cases:
        number = case.incident.number
        found |= {reason: number for reason in (case.incident.reason, *(one.reason for one in case.decisions)) if reason}
        if case.incident.generation_after is not None:
            found[case.incident.generation_after] = number
    return found


def _incident_of(decided: Mapping[str | int, int], reason: str, generation: int | None) -> int | None:
    """Return the incident whose card has *reason*, whole or as the beginning of a longer one, or that led to *generation*."""
    whole = decided.get(reason, decided.get(generation) if generation is not None else None)
    if whole is not None or len(reason) < _LONG_REASON:
        return whole
    return next((number for known, number in decided.items() if isinstance(known, str) and known.startswith(reason)), None)


def _fault_kinds(history: JobHistory) -> list[FaultKind]:
    """Return the catalogue's entries of all kinds on the page."""
    kinds = [kind for case in history.shown_cases for kind in (case.incident.kind, *(one.kind for one in case.faults))]
    kinds += [one.kind for one in history.loose_faults]
    return [catalogue.CATALOGUE[kind] for kind in dict.fromkeys(kinds) if kind in catalogue.CATALOGUE][:MOST_ROWS]


def _log_files(history: JobHistory, case: IncidentCase) -> list[tuple[str, str]]:
    """Return name and address of the logs on this machine of the ranks that an incident is about."""
    ranks = dict.fromkeys(one.rank for one in case.faults if one.root and one.rank is not None)
    paths = [Path(history.job.directory, "logs", f"rank-{rank}.log") for rank in ranks]
    return [(path.name, path.as_uri()) for path in paths if path.is_absolute() and path.is_file()]


# -- the plots ------------------------------------------------------------------------------------------------------------


def _drawings(
    history: JobHistory,
    drawn: Sequence[recoveries.Bar],
    rates: Mapping[str, throughput.RateChange],
    spans: Sequence[timeline.TimelineSpan],
) -> dict[str, Markup]:
    """Return each plot for a wide and for a narrow screen; the style sheet shows one of them."""
    found: dict[str, Callable[[Mapping[str, DrawingBox], str], Markup]] = {}
    if history.bill.total_hours:
        found["goodput"] = lambda _boxes, size: cost_page.category_bar(history.bill, "wide" if size == "wide" else "narrow")
    if len(history.steps):
        found["throughput"] = lambda boxes, size: throughput.throughput(history, rates, boxes["throughput"], f"throughput-{size}")
        found["time"] = lambda boxes, size: loss.over_time(history, boxes["time"], f"time-{size}")
        if history.steps.with_loss:
            found["steps"] = lambda boxes, size: loss.over_steps(history, boxes["steps"], f"steps-{size}")
    if history.transitions or history.generations:
        found["lanes"] = lambda boxes, size: timeline.timeline(history, spans, boxes["lanes"], f"lanes-{size}")
    if drawn:
        found["bars"] = lambda boxes, size: recoveries.phase_bars(
            drawn, boxes["bars"], f"bars-{size}", wide=size == "wide", link=history.anchor
        )
    wide, narrow = _fitted(_WIDE, history), _fitted(_NARROW, history)
    pair = Markup('<div class="wide">{}</div>\n<div class="narrow">{}</div>')
    with style():
        return {name: pair.format(draw(wide, "wide"), draw(narrow, "narrow")) for name, draw in found.items()}


def _fitted(boxes: Mapping[str, DrawingBox], history: JobHistory) -> dict[str, DrawingBox]:
    """Return *boxes* without the space for badges and generations if there is nothing to write in it."""
    is_plain = not history.cases and len(history.generations) < 2  # noqa: PLR2004 (one generation needs no number)
    return {name: replace(box, top=min(box.top, 10)) if is_plain else box for name, box in boxes.items()}


def _close_ups(history: JobHistory, cases: Sequence[IncidentCase]) -> dict[str, Markup]:
    """Return the loss around each of the newest incidents, by incident id."""
    if not history.steps.with_loss:
        return {}
    found = {}
    with style():
        for case in cases[-MOST_CLOSE_UPS:]:
            drawn = loss.close_up(history, case, _CLOSE_UP, f"near-{case.incident.number}")
            if drawn is not None:
                found[case.incident.id] = drawn
    return found


# -- the tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipRow:
    """A generation, its nodes with their ranks, and which nodes were added and removed."""

    generation: Generation
    seconds: float
    first: list[tuple[str, str]]
    others: list[tuple[str, str]]
    more: int
    added: list[str]
    removed: list[str]


def _memberships(history: JobHistory) -> list[MembershipRow]:
    """Return the newest generations, oldest first."""
    remaining, found = MOST_MEMBERS, []
    for position in range(len(history.generations))[: -MOST_GENERATIONS - 1 : -1]:
        found.append(_membership(history, position, max(remaining, FIRST_NODES)))
        remaining -= len(history.generations[position].ranks)
    return found[::-1]


def _membership(history: JobHistory, position: int, limit: int) -> MembershipRow:
    one, end = history.generation_ends[position]
    before = history.generations[position - 1].ranks if position else one.ranks
    order = sorted(one.ranks, key=lambda node: (min(one.ranks[node], default=0), node))
    first = sorted(order, key=lambda node: node in before)[:FIRST_NODES]
    named = {node: wording.ranks(one.ranks[node]) for node in order[: limit + FIRST_NODES] + first}
    return MembershipRow(
        generation=one,
        seconds=max(0.0, end - one.at),
        first=[(node, named[node]) for node in order if node in first],
        others=[(node, ranks) for node, ranks in named.items() if node not in first],
        more=len(order) - len(named),
        added=sorted(one.ranks.keys() - before.keys()),
        removed=sorted(before.keys() - one.ranks.keys())[: FIRST_NODES * 4],
    )


def _node_statuses(history: JobHistory) -> dict[str, Any]:
    """Return the newest status of each node, how many are left out, and the ranks that each node has at the end.

    Of many nodes, unhealthy ones and those of this job come first.
    """
    newest = {change.node: change for change in history.status_changes}
    ranks = {node: wording.ranks(of_node) for node, of_node in (history.generations[-1].ranks if history.generations else {}).items()}

    def order(one: NodeStatusChange) -> tuple[bool, bool, str]:
        return one.status == "healthy", one.node not in ranks, one.node

    ordered = sorted(newest.values(), key=order)
    shown = sorted(ordered[:MOST_ROWS], key=lambda one: one.node)
    return {"changes": shown, "more": len(ordered[MOST_ROWS:]), "ranks": ranks}


def _checkpoints(history: JobHistory) -> dict[str, Any]:
    """Return the checkpoints on disk, newest first: a few to show at once, the older ones, and all earlier ones with problems."""
    rows = [one for one in history.checkpoints if one.problem not in memory.IN_MEMORY]
    newest = rows[-NEWEST_CHECKPOINTS:]
    problems = [one for one in rows[:-NEWEST_CHECKPOINTS] if one.problem is not None][-MOST_ROWS:]
    shown = [*problems, *newest][::-1]
    return {"rows": shown[:FIRST_CHECKPOINTS], "older": shown[FIRST_CHECKPOINTS:], "more": len(rows) - len(shown)}


def _loose_faults(history: JobHistory) -> dict[str, Any]:
    """Return the faults without an incident, one row per kind: the first one, the count and the targets."""
    kinds: dict[str, list[FaultRecord]] = {}
    for fault in history.loose_faults:
        kinds.setdefault(fault.kind, []).append(fault)
    rows = [{"fault": found[0], "times": len(found), "targets": _targets(found)} for found in kinds.values()]
    return {"rows": rows[:MOST_ROWS], "more": len(rows[MOST_ROWS:])}


def _targets(faults: list[FaultRecord]) -> str:
    return wording.listing(dict.fromkeys(wording.on_target(one.target) for one in faults), MOST_TARGETS)


def _memory_problems(history: JobHistory) -> list[dict[str, Any]]:
    """Return the problems with in-memory snapshots, one entry per kind with its count."""
    kinds: dict[str, list[Checkpoint]] = {}
    for one in history.checkpoints:
        if one.problem in memory.IN_MEMORY:
            kinds.setdefault(str(one.problem), []).append(one)
    return [
        {
            "problem": kind,
            "times": len(found),
            "first": found[0].at,
            "step": found[0].step,
            "last_step": found[-1].step,
            "reason": found[-1].reason,
        }
        for kind, found in kinds.items()
    ]


def _memory(history: JobHistory) -> dict[str, Any]:
    """Return the newest generations with in-memory snapshots and the job's totals as text, or why there were none."""
    rows = [row for row in history.snapshots if row.step is not None]
    problems = _memory_problems(history)
    if rows:
        return {
            "problems": problems,
            "rows": rows[-MOST_ROWS:],
            "overhead": memory.overhead(rows),
            "typical_age": memory.typical_age(memory.total(rows)),
        }
    newest = history.snapshots[-1] if history.snapshots else None
    fault = next((one for one in reversed(history.loose_faults) if one.kind in memory.FAULTS), None)
    return {"problems": problems, "rows": [], "none": memory.why_none(newest, fault, history.job.spec, ended=history.ended)}


def _open_case(history: JobHistory) -> str | None:
    """Return the incident to show expanded: the only one, or the one that is open or failed the job."""
    if not history.cases:
        return None
    last = history.cases[-1].incident
    return last.id if len(history.cases) == 1 or last.closed_at is None or history.state == "FAILED" else None
