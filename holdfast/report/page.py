"""The page: a story and its drawings put into the template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Final

import numpy as np
from markupsafe import Markup

import detectors.all_kinds  # enters every kind into the catalogue
import detectors.catalogue
from holdfast.history.models import Checkpoint, FaultRecord, Generation, NodeStatusChange
from holdfast.report import evidence, facts, hypotheses, loss, memory, phases, recoveries, timeline, wording
from holdfast.report.case import IncidentCase
from holdfast.report.notes import collapsed
from holdfast.report.story import Story
from holdfast.report.svg_theme import DrawingBox, pens
from holdfast.report.template_env import surroundings

MOST_INCIDENTS: Final = 80
MOST_CLOSE_UPS: Final = 16
MOST_ROWS: Final = 200
"""Rows of any other table; the newest are shown, and how many are not."""
FIRST_NODES: Final = 8
"""Nodes of a generation that are shown at once; those that just came are among them."""
MOST_GENERATIONS: Final = 100
MOST_MEMBERS: Final = 2000
"""Nodes that are named in all generations together, the newest first."""
FIRST_CHECKPOINTS: Final = 8
"""Checkpoints that are shown at once."""
NEWEST_CHECKPOINTS: Final = 30
"""Checkpoints that are shown, unless they are in trouble."""
MOST_SUBJECTS: Final = 4
"""Subjects of a fault that are named in one row."""
EVIDENCE_CHARACTERS: Final = 250_000
"""For the evidence of all faults together, so that the page stays small."""

_WIDE: Final = {
    "time": DrawingBox(width=1000, height=330, left=76, right=24, top=46, bottom=30),
    "steps": DrawingBox(width=1000, height=330, left=76, right=24, top=46, bottom=30),
    "lanes": DrawingBox(width=1000, height=0, left=76, right=24, top=46, bottom=30),
    "bars": DrawingBox(width=1000, height=0, left=230, right=90, top=6, bottom=28),
}
_NARROW: Final = {
    "time": DrawingBox(width=350, height=280, left=42, right=12, top=46, bottom=30),
    "steps": DrawingBox(width=350, height=280, left=42, right=12, top=46, bottom=30),
    "lanes": DrawingBox(width=350, height=0, left=72, right=12, top=46, bottom=30),
    "bars": DrawingBox(width=350, height=0, left=2, right=72, top=0, bottom=28),
}
_CLOSE_UP: Final = DrawingBox(width=440, height=190, left=48, right=14, top=10, bottom=28)


def page(story: Story) -> str:
    """Return the whole report as HTML."""
    template = surroundings().get_template("page.html.j2")
    shown = story.cases[-MOST_INCIDENTS:]
    longest = max(400, min(evidence.LONGEST, EVIDENCE_CHARACTERS // max(1, sum(len(case.faults) for case in shown))))
    drawn = recoveries.bars(story.cases)
    return template.render(
        story=story,
        job=story.job,
        style=Markup(resources.files(__package__).joinpath("template/style.css").read_text("utf-8")),  # noqa: S704 (ours)
        cases=shown,
        gaps=story.steps.with_loss and len(story.steps) > np.count_nonzero(np.isfinite(story.steps.loss)),
        tiles=list(facts.tiles(story)),
        sentence=facts.sentence(story),
        what_ran=facts.what_ran(story),
        tone=facts.tone(story.state),
        verdict=story.moves[-1] if story.moves else None,
        states=[(ink.variable, words) for ink, words in timeline.states(story)],
        drawings=_drawings(story, drawn),
        close_ups=_close_ups(story, shown),
        bar_count=len(drawn),
        bars_left_out=sum(bool(case.phases) for case in story.cases) - len(drawn),
        kinds=recoveries.kinds(drawn),
        phase_ink={kind: ink.variable for kind, ink in recoveries.INKS.items()},
        generations=_memberships(story),
        nodes=_standings(story),
        checkpoints=_checkpoints(story),
        loose_faults=_loose_faults(story),
        notes=collapsed(story.job_events, {node for one in story.generations for node in one.ranks}),
        memory=_memory(story),
        most_rows=MOST_ROWS,
        titles={kind: entry.title for kind, entry in detectors.catalogue.CATALOGUE.items()},
        acted=lambda act: list(evidence.pieces(wording.act(act), longest=longest)),
        pieces=lambda found: list(evidence.pieces(found, longest=longest)),
        parts=phases.parts,
        explained=lambda verdicts: list(hypotheses.explanations(verdicts)),
        recovery_details=wording.recovery_details,
        source=wording.source,
        open_case=_open_case(story),
    )


def _drawings(story: Story, drawn: Sequence[recoveries.Bar]) -> dict[str, Markup]:
    """Return each drawing as a pair, one for a wide and one for a narrow screen; the style sheet shows one of them."""
    found: dict[str, Callable[[Mapping[str, DrawingBox], str], Markup]] = {}
    if len(story.steps):
        found["time"] = lambda boxes, size: loss.over_time(story, boxes["time"], f"time-{size}")
        if story.steps.with_loss:
            found["steps"] = lambda boxes, size: loss.over_steps(story, boxes["steps"], f"steps-{size}")
    if story.moves or story.generations:
        found["lanes"] = lambda boxes, size: timeline.timeline(story, boxes["lanes"], f"lanes-{size}")
    if drawn:
        found["bars"] = lambda boxes, size: recoveries.phase_bars(drawn, boxes["bars"], f"bars-{size}", beside=size == "wide")
    wide, narrow = _fitted(_WIDE, story), _fitted(_NARROW, story)
    pair = Markup('<div class="wide">{}</div>\n<div class="narrow">{}</div>')
    with pens():
        return {name: pair.format(draw(wide, "wide"), draw(narrow, "narrow")) for name, draw in found.items()}


def _fitted(boxes: Mapping[str, DrawingBox], story: Story) -> dict[str, DrawingBox]:
    """Return *boxes* without the room for badges and generations where there is nothing to write in it."""
    bare = not story.cases and len(story.generations) < 2  # noqa: PLR2004 (one generation needs no number)
    return {name: replace(box, top=min(box.top, 10)) if bare else box for name, box in boxes.items()}


def _close_ups(story: Story, cases: Sequence[IncidentCase]) -> dict[str, Markup]:
    """Return the loss around each of the newest incidents, by the incident's id."""
    if not story.steps.with_loss:
        return {}
    found = {}
    with pens():
        for case in cases[-MOST_CLOSE_UPS:]:
            drawn = loss.close_up(story, case, _CLOSE_UP, f"near-{case.incident.number}")
            if drawn is not None:
                found[case.incident.id] = drawn
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipRow:
    """A generation, its nodes with the ranks they held, and who came and went."""

    generation: Generation
    lasted: float
    held: list[tuple[str, str]]
    rest: list[tuple[str, str]]
    more: int
    came: list[str]
    went: list[str]


def _memberships(story: Story) -> list[MembershipRow]:
    """Return the newest generations, oldest first."""
    left, found = MOST_MEMBERS, []
    for place in range(len(story.generations))[: -MOST_GENERATIONS - 1 : -1]:
        found.append(_membership(story, place, max(left, FIRST_NODES)))
        left -= len(story.generations[place].ranks)
    return found[::-1]


def _membership(story: Story, place: int, most: int) -> MembershipRow:
    one = story.generations[place]
    before = story.generations[place - 1].ranks if place else one.ranks
    end = one.ended_at or (story.generations[place + 1].at if place + 1 < len(story.generations) else story.end)
    order = sorted(one.ranks, key=lambda node: (min(one.ranks[node], default=0), node))
    first = sorted(order, key=lambda node: node in before)[:FIRST_NODES]
    held = {node: wording.ranks(one.ranks[node]) for node in order[: most + FIRST_NODES] + first}
    return MembershipRow(
        generation=one,
        lasted=max(0.0, end - one.at),
        held=[(node, held[node]) for node in order if node in first],
        rest=[(node, ranks) for node, ranks in held.items() if node not in first],
        more=len(order) - len(held),
        came=sorted(one.ranks.keys() - before.keys()),
        went=sorted(before.keys() - one.ranks.keys())[: FIRST_NODES * 4],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """The nodes to list, how many healthy ones are not, and the ranks that each holds at the end."""

    moves: list[NodeStatusChange]
    more: int
    holds: dict[str, str]


def _standings(story: Story) -> Standings:
    """Return the newest standing of each node; where they are many, those in trouble and those of this job come first."""
    newest = {move.node: move for move in story.node_moves}
    holds = {node: wording.ranks(ranks) for node, ranks in (story.generations[-1].ranks if story.generations else {}).items()}
    ordered = sorted(newest.values(), key=lambda move: (move.status == "healthy", move.node not in holds, move.node))
    return Standings(moves=sorted(ordered[:MOST_ROWS], key=lambda move: move.node), more=len(ordered[MOST_ROWS:]), holds=holds)


def _checkpoints(story: Story) -> dict[str, Any]:
    """Return the checkpoints on disk, newest first: a few to show at once, the older ones, and before those every one in trouble."""
    rows = [one for one in story.checkpoints if one.problem not in memory.IN_MEMORY]
    newest = rows[-NEWEST_CHECKPOINTS:]
    troubled = [one for one in rows[:-NEWEST_CHECKPOINTS] if one.problem is not None][-MOST_ROWS:]
    shown = [*troubled, *newest][::-1]
    return {"rows": shown[:FIRST_CHECKPOINTS], "older": shown[FIRST_CHECKPOINTS:], "more": len(rows) - len(shown)}


def _loose_faults(story: Story) -> dict[str, Any]:
    """Return the faults that no incident answers, one row a kind: the first one, how often it came and on whom."""
    kinds: dict[str, list[FaultRecord]] = {}
    for fault in story.loose_faults:
        kinds.setdefault(fault.kind, []).append(fault)
    rows = [
        {"fault": found[0], "times": len(found), "subjects": wording.some(dict.fromkeys(one.subject for one in found), MOST_SUBJECTS)}
        for found in kinds.values()
    ]
    return {"rows": rows[:MOST_ROWS], "more": len(rows[MOST_ROWS:])}


def _troubles_in_memory(story: Story) -> list[dict[str, Any]]:
    """Return what was wrong with snapshots, one entry a kind with how often it came: none of it concerns a checkpoint on disk."""
    kinds: dict[str, list[Checkpoint]] = {}
    for one in story.checkpoints:
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


def _memory(story: Story) -> dict[str, Any]:
    """Return the generations that had snapshots in memory, the newest ones, and the job's in words; or why there were none."""
    rows = [row for row in story.snapshots if row.step is not None]
    troubles = _troubles_in_memory(story)
    if rows:
        return {
            "troubles": troubles,
            "rows": rows[-MOST_ROWS:],
            "upkeep": memory.upkeep(rows),
            "usual_age": memory.usual_age(memory.total(rows)),
        }
    newest = story.snapshots[-1] if story.snapshots else None
    fault = next((one for one in reversed(story.loose_faults) if one.kind in memory.FAULTS), None)
    return {"troubles": troubles, "rows": [], "none": memory.why_none(newest, fault, story.job.spec, ended=story.ended)}


def _open_case(story: Story) -> str | None:
    """Return the incident to show open: the only one, or the one that the job ended on or is in."""
    if not story.cases:
        return None
    last = story.cases[-1].incident
    return last.id if len(story.cases) == 1 or last.closed_at is None or story.state == "FAILED" else None
