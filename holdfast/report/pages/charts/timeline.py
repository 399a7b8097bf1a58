"""The plot of the job's states and of the ranks on each node over wall time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup

from holdfast.plurals import plural
from holdfast.policies.states import State
from holdfast.report.pages.charts.axes import incident_marks, since_submission, time_axis
from holdfast.report.pages.charts.drawing import Drawing, DrawingBox, SvgTheme, drawing, svg
from holdfast.report.pages.charts.incident_layers import marks_in_time
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.text import wording

LANE: Final = 26
"""Height of a lane in pixels."""
MOST_LANES: Final = 16
_NAME_CHARACTERS: Final = 10
_LETTER_PIXELS: Final = 6.6
_MERGE_PIXELS: Final = 12
_STATE_COLORS: Final = {
    "LAUNCHING": SvgTheme.STARTING,
    "RUNNING": SvgTheme.TRAINING,
    "WAITING": SvgTheme.WAITING,
    "MIGRATING": SvgTheme.MIGRATING,
    "SUSPENDED": SvgTheme.SUSPENDED,
}
RECOVERING: Final = "recovering"
NOT_DETECTED: Final = "fault not yet detected"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """An interval of a lane, in seconds since the job's submission."""

    start: float
    end: float
    color: SvgTheme
    label: str
    tip: str


def lanes(job: JobHistory) -> list[str]:
    """Return the nodes to draw: all, or of many those that changed, then the first ones."""
    members: dict[str, set[int]] = {}
    for generation in job.generations:
        for node in generation.ranks:
            members.setdefault(node, set()).add(generation.number)
    changed = [node for node, numbers in members.items() if len(numbers) != len(job.generations)]
    chosen = set((changed + [node for node in members if node not in changed])[:MOST_LANES])
    return [node for node in sorted(members) if node in chosen]


def height(job: JobHistory, box: DrawingBox) -> DrawingBox:
    """Return *box* with the height that the lanes of *job* need."""
    return replace(box, height=(1 + len(lanes(job))) * LANE + box.top + box.bottom)


def timeline(job: JobHistory, spans: Sequence[TimelineSpan], box: DrawingBox, name: str) -> Markup:
    """Draw the *spans* of the job's lane and the nodes' ranks."""
    on, nodes = drawing(height(job, box)), lanes(job)
    time_axis(on, job.wall_seconds, zero=job.job.at)
    on.axes.set_ylim(len(nodes) + 1, 0)
    on.axes.set_yticks([place + 0.5 for place in range(len(nodes) + 1)], ["job", *(_shortened(node) for node in nodes)], fontsize=11.5)
    on.axes.grid(axis="x")
    least = _MERGE_PIXELS * job.wall_seconds / box.columns
    for lane, shown in enumerate([spans, *(_node_spans(job, node, least) for node in nodes)]):
        _draw(on, lane, shown)
    _mark_status_changes(on, job, nodes)
    incident_marks(on, marks_in_time(job))
    on.axis_titles(since_submission(job.job.at, job.wall_seconds))
    made, drawn = plural(len(job.transitions), "transition"), plural(len(nodes), "node")
    text = f"The job made {made}; {drawn} with ranks are drawn. The table below has all transitions."
    return svg(on, name=name, title="States of the job and ranks of its nodes over wall time", text=text)


def _shortened(node: str) -> str:
    plain = wording.visible(node)
    return plain if len(plain) <= _NAME_CHARACTERS else f"{plain[: _NAME_CHARACTERS - 4]}…{plain[-3:]}"


def job_spans(job: JobHistory) -> list[TimelineSpan]:
    """Return the spans of the job's lane: its states, and over them the downtime of each incident, as the accounts count it.

    The job's state follows a fault late: by the time until it is detected. And it is running again a moment before the first new step.
    """
    spans = _states(job)
    for case in job.cases:
        incident, zero = case.incident, job.job.at
        down = job.downtime(incident)
        if not down:
            continue
        begin, end = max(0.0, incident.fault_at - zero), incident.fault_at - zero + down
        detected = min(max(incident.detected_at - zero, begin), end)
        name = f"incident {incident.number}: "
        late = f"{name}{NOT_DETECTED} for {wording.duration(detected - begin)}"
        again = f"{name}{wording.duration(down)} of downtime"
        spans = _overlaid(spans, TimelineSpan(start=begin, end=detected, color=SvgTheme.NOT_DETECTED, label="", tip=late))
        spans = _overlaid(spans, TimelineSpan(start=detected, end=end, color=SvgTheme.RECOVERING, label="", tip=again))
    return spans


def _overlaid(spans: Sequence[TimelineSpan], over: TimelineSpan, under: SvgTheme = SvgTheme.TRAINING) -> list[TimelineSpan]:
    """Return *spans* with *over* in place of what it covers of those in the colour *under*; other states stay, because they say more."""
    found = []
    for one in spans:
        begin, end = max(one.start, over.start), min(one.end, over.end)
        if one.color is not under or begin >= end:
            found.append(one)
            continue
        found += [replace(one, end=begin)] if begin > one.start else []
        found.append(replace(over, start=begin, end=end))
        found += [replace(one, start=end)] if end < one.end else []
    return found


def _states(job: JobHistory) -> list[TimelineSpan]:
    ends = [*(one.at for one in job.transitions[1:]), job.end] if job.transitions else []
    zero = job.job.at
    first = job.transitions[0].at if job.transitions else job.end
    found = [TimelineSpan(start=0, end=first - zero, color=SvgTheme.STARTING, label="", tip="launching")]
    for one, end in zip(job.transitions, ends, strict=True):
        color = _STATE_COLORS.get(one.after, SvgTheme.RECOVERING)
        label = one.after.lower() if color is SvgTheme.TRAINING else ""
        tip = f"{one.after.lower()} for {wording.duration(end - one.at)}: {one.reason}"
        found.append(TimelineSpan(start=one.at - zero, end=end - zero, color=color, label=label, tip=tip))
    return _overlaid(found, _before_the_controller(job), SvgTheme.STARTING)


def _before_the_controller(job: JobHistory) -> TimelineSpan:
    """Return the span in which the job trains and is still launching: ranks start before Prefect does, whose flow follows their state."""
    begin = min((one.first_step_at for one in job.generations[:1] if one.first_step_at is not None), default=job.end) - job.job.at
    end = next((one.at for one in job.transitions if one.after == State.RUNNING), job.end) - job.job.at
    tip = f"trains for {wording.duration(max(0.0, end - begin))} before its controller has attached"
    return TimelineSpan(start=begin, end=end, color=SvgTheme.TRAINING, label="", tip=tip)


def states(spans: Sequence[TimelineSpan]) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the *spans* of the job's lane with their states, for the legend."""
    present = {one.color for one in spans if one.end > one.start}
    names = {color: state.lower() for state, color in _STATE_COLORS.items()}
    names |= {SvgTheme.NOT_DETECTED: NOT_DETECTED, SvgTheme.RECOVERING: RECOVERING}
    return [(color, name) for color, name in names.items() if color in present]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """The *ranks* of a node from generation *first* to *last*, in seconds since the job's submission."""

    start: float
    end: float
    first: int
    last: int
    ranks: str

    def span(self, node: str) -> TimelineSpan:
        """Return the span in *node*'s lane."""
        many = self.first != self.last
        generations = f"generations {self.first} to {self.last}" if many else f"generation {self.first}"
        label = f"g{self.first}–{self.last} · {self.ranks}" if many else f"g{self.first} · {self.ranks}"  # noqa: RUF001 (a range)
        tip = f"{node} held ranks {self.ranks} in {generations}"
        return TimelineSpan(start=self.start, end=self.end, color=SvgTheme.NODE, label=label, tip=tip)


def _node_spans(job: JobHistory, node: str, least: float) -> Iterator[TimelineSpan]:
    """Yield the spans of *node*; a generation shorter than *least* seconds is joined to a neighbour with the same ranks."""
    last: NodeRanks | None = None
    for one in _node_ranks(job, node):
        short = last is not None and min(one.end - one.start, last.end - last.start) < least
        if last is not None and short and one.ranks == last.ranks and one.first == last.last + 1:
            last = replace(last, end=one.end, last=one.last)
            continue
        if last is not None:
            yield last.span(node)
        last = one
    if last is not None:
        yield last.span(node)


def _node_ranks(job: JobHistory, node: str) -> Iterator[NodeRanks]:
    zero = job.job.at
    for one, end in job.generation_ends:
        if node in one.ranks:
            yield NodeRanks(start=one.at - zero, end=end - zero, first=one.number, last=one.number, ranks=wording.ranks(one.ranks[node]))


def _draw(on: Drawing, lane: int, spans: Iterable[TimelineSpan]) -> None:
    """Draw a lane. No span is thinner than a pixel, and of overlapping ones only the first of a colour is drawn."""
    pixel = on.axes.get_xlim()[1] / on.box.columns
    drawn: set[tuple[int, SvgTheme]] = set()
    for one in spans:
        start, end = max(0.0, one.start), max(one.end, one.start + pixel)
        key = (int(start / pixel / 2), one.color)
        if one.end <= one.start or (end - start <= 2 * pixel and key in drawn):
            continue
        drawn.add(key)
        gap = min(pixel, (end - start) / 4)
        on.axes.barh(lane + 0.5, end - start - gap, left=start, height=0.62, color=one.color, linewidth=0, zorder=3, gid=on.tip(one.tip))
        if len(one.label) * _LETTER_PIXELS + 12 < (end - start) / pixel:
            color = SvgTheme.NODE_TEXT if one.color is SvgTheme.NODE else SvgTheme.PAPER
            on.axes.text(start + 6 * pixel, lane + 0.5, one.label, color=color, fontsize=10.5, va="center_baseline", ha="left", zorder=5)


def _mark_status_changes(on: Drawing, job: JobHistory, nodes: Sequence[str]) -> None:
    """Mark where a node's status became anything but healthy."""
    for change in job.status_changes:
        at = change.at - job.job.at
        if change.node in nodes and change.status != "healthy" and 0 <= at <= job.wall_seconds:
            tip, y = on.tip(f"{change.node} {change.status}: {change.reason}"), nodes.index(change.node) + 1.5
            on.axes.plot(at, y, "X", color=SvgTheme.INCIDENT, markeredgecolor=SvgTheme.PAPER, markersize=10, zorder=6, gid=tip)
