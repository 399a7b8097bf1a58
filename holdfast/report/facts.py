"""The headline of a report: one sentence, and the numbers under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from holdfast.report import loss_words, wording
from holdfast.report.memory import IN_MEMORY
from holdfast.report.story import Story

TONES: Final = {"COMPLETED": "good", "FAILED": "bad", "CANCELLED": "plain", "RUNNING": "live", "LAUNCHING": "live"}
"""How each state looks; every other one is a recovery under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number of the headline, and a word on it."""

    label: str
    value: str
    remark: str = ""
    share: float | None = None
    """Draws a meter when given (0 to 1)."""


def tone(state: str) -> str:
    """Return how *state* looks."""
    return TONES.get(state, "mending")


def sentence(story: Story) -> str:
    """Say in one sentence how the job fared."""
    wall, last = wording.duration(story.wall_seconds), _last_step(story)
    steps = "" if last is None else wording.plural(last, "step")
    match story.state:
        case "COMPLETED":
            head = f"Completed {steps} in {wall}" if steps else f"Completed after {wall}"
        case "FAILED" | "CANCELLED":
            head = f"{'Failed' if story.state == 'FAILED' else 'Was cancelled'} after {f'{steps} and ' if steps else ''}{wall}"
        case _:
            head = f"Has made {steps or 'no step'} in {wall} so far" if steps or not story.moves else f"Has run for {wall} so far"
    return f"{head}, {_faults(story)}."


def _faults(story: Story) -> str:
    if not story.cases:
        return "with no incident"
    met = "with" if story.state == "FAILED" else "through"
    return f"{met} {wording.plural(len(story.cases), 'incident')}: {loss_words.sentence(story.losses)}"


def tiles(story: Story) -> Iterator[Tile]:
    """Yield the headline numbers."""
    losses = story.losses
    until = f"ended {wording.moment(story.end)}" if story.ended else "so far"
    yield Tile(label="Wall time", value=wording.duration(story.wall_seconds), remark=until)
    yield Tile(label="ETTR", value=wording.share(losses.ettr), remark="of wall time in steps that count", share=losses.ettr)
    yield _steps(story)
    yield _loss(story)
    yield _incidents(story)
    yield Tile(label="Downtime", value=wording.duration(losses.downtime_s), remark=_usual_downtime(story))
    thrown_away = "no steps reported" if losses.steps_lost is None else f"{wording.duration(losses.rollback_s)} of work"
    yield Tile(
        label="Steps lost", value=wording.count(losses.steps_lost), remark="nothing thrown away" if losses.steps_lost == 0 else thrown_away
    )
    yield _checkpoints(story)


def _last_step(story: Story) -> int | None:
    kept = story.steps.kept
    return int(story.steps.step[kept[-1]]) if len(kept) else None


def _steps(story: Story) -> Tile:
    last = _last_step(story)
    if last is None:
        return Tile(label="Steps", value=wording.NOTHING, remark="none reported")
    until = next((one.until for one in reversed(story.generations) if one.until is not None), None)
    of = f"of {wording.count(until)}; " if until is not None else ""
    usual = float(np.median(story.steps.seconds[story.steps.kept]))
    return Tile(label="Steps", value=wording.count(last), remark=f"{of}{wording.duration(usual)} each, in the median")


def _loss(story: Story) -> Tile:
    loss = story.steps.loss[story.steps.kept]
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return Tile(label="Last loss", value=wording.NOTHING, remark="none finite reported")
    bad = len(loss) - len(finite)
    remark = f"{wording.plural(bad, 'step')} without a finite one" if bad else f"first {finite[0]:.4g}, lowest {finite.min():.4g}"
    return Tile(label="Last loss", value=f"{finite[-1]:.4g}", remark=remark)


def _incidents(story: Story) -> Tile:
    whole = len(story.cases)
    still = sum(case.incident.closed_at is None for case in story.cases)
    recovered = sum(case.incident.outcome == "recovered" for case in story.cases)
    told = f"{still} open" if still else f"{'all' if recovered == whole else recovered} recovered" if whole else "none seen"
    return Tile(label="Incidents", value=wording.count(whole), remark=told)


def _usual_downtime(story: Story) -> str:
    known = [case.incident.downtime_s for case in story.cases if case.incident.downtime_s is not None]
    if known:
        return f"{wording.duration(median(known))} per incident, in the median"
    return "not recovered" if story.cases else "none"


def _checkpoints(story: Story) -> Tile:
    """Count the checkpoints on disk; what is wrong with snapshots in memory stands with those."""
    on_disk = [one for one in story.checkpoints if one.problem not in IN_MEMORY]
    whole = [one for one in on_disk if one.problem is None]
    written = [one.seconds for one in whole if one.seconds is not None]
    usual = f"{wording.duration(median(written))} each, in the median" if written else "none written"
    troubled = len(on_disk) - len(whole)
    return Tile(label="Checkpoints", value=wording.count(len(whole)), remark=f"{troubled} more in trouble" if troubled else usual)


def what_ran(story: Story) -> list[str]:
    """Return what was asked for, in a few words each; a specification of any shape will do."""
    spec, found = story.job.spec, []
    command = spec.get("command")
    ran = [str(spec.get("script") or ""), *map(str, _listed(spec.get("args")))] if spec.get("script") else map(str, _listed(command))
    found.append(" ".join(ran))
    nodes = spec.get("nodes")
    if isinstance(nodes, dict):
        found.append(_nodes(nodes))
    if spec.get("policy"):
        found.append(f"{spec['policy']} policy")
    if story.job.cluster.get("name"):
        found.append(f"cluster {story.job.cluster['name']}")
    return [words for words in found if words]


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 (a cell of JSON)
    return value if isinstance(value, list) else []


def _nodes(nodes: dict[str, Any]) -> str:
    wanted, ranks, spare = nodes.get("wanted", 1), nodes.get("ranks", 1), nodes.get("spare", 0)
    words = f"{wanted} {'node' if wanted == 1 else 'nodes'} × {ranks} {'rank' if ranks == 1 else 'ranks'}"  # noqa: RUF001 (times)
    return words + (f", {spare} spare" if spare else "")
