"""What the job was doing, and which node held which ranks, over wall time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup

from holdfast.history.queries import TERMINAL
from holdfast.report import wording
from holdfast.report.axes import AxisMark, incident_marks, time_axis
from holdfast.report.story import Story
from holdfast.report.svg_theme import Drawing, DrawingBox, SvgTheme, drawing, svg

LANE: Final = 26
"""Height of a lane in pixels."""
MOST_LANES: Final = 16
_NAME_CHARACTERS: Final = 10
_LETTER_PIXELS: Final = 6.6
_MERGE_PIXELS: Final = 12
_STATE_INK: Final = {"LAUNCHING": SvgTheme.STARTING, "RUNNING": SvgTheme.TRAINING, "WAITING": SvgTheme.WAITING}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A piece of a lane, in seconds since the job's start."""

    start: float
    end: float
    ink: SvgTheme
    label: str
    words: str


def lanes(story: Story) -> list[str]:
    """Return the nodes to draw: all, or where they are many, those that changed their part, then the first ones."""
    members: dict[str, set[int]] = {}
    for generation in story.generations:
        for node in generation.ranks:
            members.setdefault(node, set()).add(generation.number)
    steady = len(story.generations)
    changed = [node for node, numbers in members.items() if len(numbers) != steady]
    chosen = set((changed + [node for node in members if node not in changed])[:MOST_LANES])
    return [node for node in sorted(members) if node in chosen]


def height(story: Story, box: DrawingBox) -> DrawingBox:
    """Return *box* high enough for the lanes of *story*."""
    return replace(box, height=(1 + len(lanes(story))) * LANE + box.top + box.bottom)


def timeline(story: Story, box: DrawingBox, name: str) -> Markup:
    """Draw the job's states and the nodes' ranks over wall time."""
    on, nodes = drawing(height(story, box)), lanes(story)
    time_axis(on, story.wall_seconds)
    on.axes.set_ylim(len(nodes) + 1, 0)
    on.axes.set_yticks([place + 0.5 for place in range(len(nodes) + 1)], ["job", *(_short(node) for node in nodes)], fontsize=11.5)
    on.axes.grid(axis="x")
    least = _MERGE_PIXELS * story.wall_seconds / box.columns
    for lane, stretches in enumerate([_states(story), *(_held(story, node, least) for node in nodes)]):
        _draw(on, lane, stretches)
    _troubles(on, story, nodes)
    zero = story.job.at
    marks = [(case.incident, case.incident.fault_at - zero) for case in story.cases]
    incident_marks(on, [AxisMark(number=one.number, x=max(0.0, x), words=f"incident {one.number}: {one.kind}") for one, x in marks])
    made, drawn = wording.plural(len(story.moves), "move"), wording.plural(len(nodes), "node")
    words = f"The job made {made}; {drawn} with ranks are drawn. All moves stand in the table below."
    return svg(on, name=name, title="States of the job and ranks of its nodes over wall time", words=words)


def _short(node: str) -> str:
    plain = wording.visible(node)
    return plain if len(plain) <= _NAME_CHARACTERS else f"{plain[: _NAME_CHARACTERS - 4]}…{plain[-3:]}"


def _states(story: Story) -> Sequence[TimelineSpan]:
    ends = [*(move.at for move in story.moves[1:]), story.end]
    zero = story.job.at
    first = story.moves[0].at if story.moves else story.end
    found = [TimelineSpan(start=0, end=first - zero, ink=SvgTheme.STARTING, label="", words="LAUNCHING")]
    for move, end in zip(story.moves, ends, strict=True):
        words = f"{move.after} for {wording.duration(end - move.at)}: {move.reason}"
        ink = _STATE_INK.get(move.after, SvgTheme.RECOVERING)
        label = move.after.lower() if ink is SvgTheme.TRAINING else ""
        found.append(TimelineSpan(start=move.at - zero, end=end - zero, ink=ink, label=label, words=words))
    return found


def states(story: Story) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the job's lane with what each stands for, for the legend."""
    seen = {"LAUNCHING", *(move.after for move in story.moves)} - TERMINAL
    found = [(ink, state.lower()) for state, ink in _STATE_INK.items() if state in seen]
    return [*found, (SvgTheme.RECOVERING, "recovering")] if seen - _STATE_INK.keys() else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The ranks that a node *held* from generation *first* to *last*, in seconds since the job's start."""

    start: float
    end: float
    first: int
    last: int
    held: str

    def stretch(self, node: str) -> TimelineSpan:
        """Return the piece of *node*'s lane."""
        many = self.first != self.last
        generations = f"generations {self.first} to {self.last}" if many else f"generation {self.first}"
        label = f"g{self.first}–{self.last} · {self.held}" if many else f"g{self.first} · {self.held}"  # noqa: RUF001 (a range)
        words = f"{node} held ranks {self.held} in {generations}"
        return TimelineSpan(start=self.start, end=self.end, ink=SvgTheme.NODE, label=label, words=words)


def _held(story: Story, node: str, least: float) -> Iterator[TimelineSpan]:
    """Yield what *node* held; a generation shorter than *least* seconds is joined to a neighbour with the same ranks."""
    last: Holding | None = None
    for one in _holdings(story, node):
        short = last is not None and min(one.end - one.start, last.end - last.start) < least
        if last is not None and short and one.held == last.held and one.first == last.last + 1:
            last = replace(last, end=one.end, last=one.last)
            continue
        if last is not None:
            yield last.stretch(node)
        last = one
    if last is not None:
        yield last.stretch(node)


def _holdings(story: Story, node: str) -> Iterator[Holding]:
    ends = [*(one.at for one in story.generations[1:]), story.end]
    for one, end in zip(story.generations, ends, strict=True):
        if node in one.ranks:
            start, until = one.at - story.job.at, (one.ended_at or end) - story.job.at
            yield Holding(start=start, end=until, first=one.number, last=one.number, held=wording.ranks(one.ranks[node]))


def _draw(on: Drawing, lane: int, stretches: Iterable[TimelineSpan]) -> None:
    """Draw a lane. No stretch is thinner than a pixel, and of those that would lie on each other only the first of a colour is drawn."""
    pixel = on.axes.get_xlim()[1] / on.box.columns
    drawn: set[tuple[int, SvgTheme]] = set()
    for one in stretches:
        start, end = max(0.0, one.start), max(one.end, one.start + pixel)
        key = (int(start / pixel / 2), one.ink)
        if one.end <= one.start or (end - start <= 2 * pixel and key in drawn):
            continue
        drawn.add(key)
        gap = min(pixel, (end - start) / 4)
        on.axes.barh(lane + 0.5, end - start - gap, left=start, height=0.62, color=one.ink, linewidth=0, zorder=3, gid=on.tip(one.words))
        if len(one.label) * _LETTER_PIXELS + 12 < (end - start) / pixel:
            ink = SvgTheme.NODE_TEXT if one.ink is SvgTheme.NODE else SvgTheme.PAPER
            on.axes.text(start + 6 * pixel, lane + 0.5, one.label, color=ink, fontsize=10.5, va="center_baseline", ha="left", zorder=5)


def _troubles(on: Drawing, story: Story, nodes: Sequence[str]) -> None:
    """Mark where a node's standing became anything but healthy."""
    for move in story.node_moves:
        at = move.at - story.job.at
        if move.node in nodes and move.status != "healthy" and 0 <= at <= story.wall_seconds:
            tip, y = on.tip(f"{move.node} {move.status}: {move.reason}"), nodes.index(move.node) + 1.5
            on.axes.plot(at, y, "X", color=SvgTheme.INCIDENT, markeredgecolor=SvgTheme.PAPER, markersize=10, zorder=6, gid=tip)
