"""The plot of a step: what each rank did over time, and below that when its snapshot was copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup
from matplotlib.patches import Rectangle

from holdfast.plurals import plural
from holdfast.report.pages.charts.axes import time_axis
from holdfast.report.pages.charts.drawing import Drawing, DrawingBox, SvgTheme, drawing, image, svg
from holdfast.report.profiles import JobProfile, RankProfile
from holdfast.report.text import wording

LANE: Final = 34
"""Height of a rank's lane in pixels."""
MOST_LANES: Final = 48
KINDS: Final[Mapping[str, tuple[SvgTheme, str]]] = {
    "pipeline": (SvgTheme.WAITS_PIPELINE, "waits for another stage"),
    "gradients": (SvgTheme.WAITS_GRADIENTS, "waits for gradients"),
    "shards": (SvgTheme.WAITS_SHARDS, "waits for shards"),
    "collective": (SvgTheme.WAITS_COLLECTIVE, "waits in another collective"),
    "vote": (SvgTheme.WAITS_VOTE, "waits for the vote on the step"),
    "data": (SvgTheme.WAITS_DATA, "waits for data"),
}
_COMPUTES: Final = (SvgTheme.COMPUTES, "computes")
_OVERLAPPED: Final = (SvgTheme.COPIES_OVERLAPPED, "copies while it waits")
_EXPOSED: Final = (SvgTheme.COPIES_EXPOSED, "copies while training is stopped")
_WORK_Y: Final = (0.06, 0.62)
_COPY_Y: Final = (0.72, 0.18)
WIDE: Final = DrawingBox(width=1000, height=0, left=118, right=24, top=10, bottom=44)
NARROW: Final = DrawingBox(width=350, height=0, left=74, right=12, top=10, bottom=44)
_LEAST_BARS: Final = 60
_MOST_BARS: Final = 6000
"""Spans of all lanes together; with more, each lane is drawn in so many columns."""
_FILE: Final = DrawingBox(width=1000, height=0, left=118, right=24, top=44, bottom=96)


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """What a rank did from *begin* to *end*, in seconds of the plot."""

    begin: float
    end: float
    color: SvgTheme
    text: str


def work(one: RankProfile, start: float) -> list[ScheduleSpan]:
    """Return what a rank did from its *start* on: between its waits it computes."""
    found, at = [], 0.0
    for wait in sorted(one.waits):
        begin, end = max(at, wait.begin), min(wait.end, one.took)
        if end <= begin:
            continue
        if begin > at:
            found.append(ScheduleSpan(start + at, start + begin, *_COMPUTES))
        found.append(ScheduleSpan(start + begin, start + end, *KINDS.get(wait.kind, KINDS["collective"])))
        at = end
    if at < one.took:
        found.append(ScheduleSpan(start + at, start + one.took, *_COMPUTES))
    return found


def copies(one: RankProfile, start: float) -> list[ScheduleSpan]:
    """Return when a rank copied from its *start* on."""
    return [ScheduleSpan(start + copy.begin, start + copy.end, *(_OVERLAPPED if copy.overlapped else _EXPOSED)) for copy in one.copies]


def legend(profile: JobProfile) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the plot with their meanings."""
    present = {wait.kind if wait.kind in KINDS else "collective" for one in profile.ranks for wait in one.waits}
    found = [_COMPUTES, *(entry for kind, entry in KINDS.items() if kind in present)]
    copied = {copy.overlapped for one in profile.ranks for copy in one.copies}
    return found + [entry for entry, overlapped in ((_OVERLAPPED, True), (_EXPOSED, False)) if overlapped in copied]


def shown(profile: JobProfile) -> list[RankProfile]:
    """Return the ranks that fit into the plot: the first ones, complete pipelines if possible."""
    return profile.ordered[:MOST_LANES]


def schedule(profile: JobProfile, box: DrawingBox, name: str) -> Markup:
    """Return the plot for the page."""
    return svg(_drawn(profile, box, titled=True), name=name, title=f"What the ranks did in step {profile.step:,}", text=_text(profile))


def schedule_file(profile: JobProfile, kind: str, job: str) -> bytes:
    """Return the plot as a file of this *kind*, ``png`` or ``svg``."""
    colours = legend(profile)
    rows = -(-len(colours) // 5)
    box = replace(_FILE, bottom=38 + 20 * rows)
    return image(_drawn(profile, box, titled=False), kind, colours, title=f"{wording.visible(job)}, step {profile.step:,}")


def _drawn(profile: JobProfile, box: DrawingBox, *, titled: bool) -> Drawing:
    lanes = shown(profile)
    on = drawing(replace(box, height=len(lanes) * LANE + box.top + box.bottom))
    time_axis(on, profile.span)
    on.axes.set_ylim(len(lanes), 0)
    on.axes.set_yticks(
        [place + sum(_WORK_Y) / 2 for place in range(len(lanes))], [_name(profile, one, box) for one in lanes], fontsize=11.5
    )
    on.axes.grid(axis="x")
    if titled:
        on.axis_titles("time since the first rank began the step")
    for place, one in enumerate(lanes):
        start = profile.starts[one.rank]
        _bars(on, place, _WORK_Y, work(one, start), one.rank)
        _bars(on, place, _COPY_Y, copies(one, start), one.rank)
        if place and profile.layout.stage_of(one.rank) == 0:
            on.axes.axhline(place - 0.01, color=SvgTheme.QUIET, linewidth=0.8, dashes=(2, 3), zorder=1)
    return on


def _name(profile: JobProfile, one: RankProfile, box: DrawingBox) -> str:
    stage = profile.layout.stage_of(one.rank)
    if stage is None:
        return f"rank {one.rank}"
    return f"rank {one.rank} · s{stage + 1}" if box.left < WIDE.left else f"rank {one.rank} · stage {stage + 1}"


def _bars(on: Drawing, place: int, where: tuple[float, float], spans: Sequence[ScheduleSpan], rank: int) -> None:
    """Draw the spans of one rank, none thinner than half a pixel."""
    pixel = on.axes.get_xlim()[1] / on.box.columns
    lanes = on.axes.get_ylim()[0]
    most = int(max(_LEAST_BARS, min(on.box.columns, _MOST_BARS / lanes)))
    top, height = where
    for one in spans if len(spans) <= most else _coarse(spans, on.axes.get_xlim()[1], most):
        width = max(one.end - one.begin, pixel / 2)
        text = f"rank {rank} {one.text} for {wording.duration(one.end - one.begin)}, from {wording.duration(max(0.0, one.begin))} on"
        tip = on.tip(text)
        on.axes.add_patch(Rectangle((one.begin, place + top), width, height, facecolor=one.color, linewidth=0, zorder=3, gid=tip))


def _coarse(spans: Sequence[ScheduleSpan], total: float, columns: int) -> Iterator[ScheduleSpan]:
    """Yield what filled most of each of so many *columns*."""
    wide = total / columns
    shares: dict[int, dict[tuple[SvgTheme, str], float]] = {}
    for one in spans:
        for column in range(max(0, int(one.begin / wide)), min(columns - 1, int(one.end / wide)) + 1):
            inside = min(one.end, (column + 1) * wide) - max(one.begin, column * wide)
            filled = shares.setdefault(column, {})
            filled[one.color, one.text] = filled.get((one.color, one.text), 0.0) + inside
    last: ScheduleSpan | None = None
    for column, found in sorted(shares.items()):
        color, text = max(found, key=lambda key: found[key])
        if last is not None and last.color is color and column * wide - last.end < wide / 2:
            last = replace(last, end=(column + 1) * wide)
            continue
        if last is not None:
            yield last
        last = ScheduleSpan(column * wide, (column + 1) * wide, color, text)
    if last is not None:
        yield last


def _text(profile: JobProfile) -> str:
    idle = [one.idle_share for one in profile.ranks]
    text = f"{plural(len(shown(profile)), 'rank')} over {wording.duration(profile.span)}"
    waits = f"{wording.share(min(idle))} to {wording.share(max(idle))}"
    return f"{text}. Ranks wait for {waits} of a typical step. The tables below have all numbers."
