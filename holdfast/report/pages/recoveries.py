"""The time of each recovery: a stacked bar of phases per incident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from markupsafe import Markup

from holdfast.history.models import Incident
from holdfast.plurals import plural
from holdfast.report.case import IncidentCase
from holdfast.report.pages.charts.axes import BarPart, badge, bar_pitch, named_bar, shortened, time_axis
from holdfast.report.pages.charts.drawing import Drawing, DrawingBox, SvgTheme, drawing, svg
from holdfast.report.phases import KINDS, OTHER, PhaseKind, PhasePart, parts
from holdfast.report.text import wording

MOST_BARS: Final = 24
_OUTLIER: Final = 10
"""A recovery this many times longer than the median is cut at the edge, so that it does not flatten the others."""

COLORS: Final = {kind.name: SvgTheme[kind.name.upper().replace("-", "_").replace(" ", "_")] for kind in (*KINDS, OTHER)}
_DARK: Final = {"detect", "failed attempt", "reschedule", "warm-up", "other"}
"""Phases whose colour needs light text in both modes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One incident's phases."""

    case: IncidentCase
    parts: tuple[PhasePart, ...]

    @property
    def seconds(self) -> float:
        """Return the length of the bar."""
        return sum(part.seconds for part in self.parts)


def bars(cases: Sequence[IncidentCase]) -> list[Bar]:
    """Return the bars to draw in order of time: every recovery with a phase, or the longest ones of many."""
    all_bars = [Bar(case=case, parts=parts(case.phases)) for case in cases if case.phases]
    longest = sorted(all_bars, key=lambda bar: -bar.seconds)[:MOST_BARS]
    return sorted(longest, key=lambda bar: bar.case.incident.number)


def kinds(drawn: Sequence[Bar]) -> list[PhaseKind]:
    """Return the kinds of phases that appear, for the legend."""
    present = {part.kind.name for bar in drawn for part in bar.parts}
    return [kind for kind in (*KINDS, OTHER) if kind.name in present]


def edge(drawn: Sequence[Bar]) -> float:
    """Return where the axis ends: at the longest bar that is no outlier."""
    lengths = [bar.seconds for bar in drawn]
    typical = [length for length in lengths if length <= _OUTLIER * (median(lengths) or 1)]
    return max(typical or lengths) * 1.02 or 1.0


def height(drawn: Sequence[Bar], box: DrawingBox, *, wide: bool) -> DrawingBox:
    """Return *box* with the height that the bars need."""
    return replace(box, height=bar_pitch(wide=wide) * len(drawn) + box.top + box.bottom)


def phase_bars(drawn: Sequence[Bar], box: DrawingBox, name: str, *, wide: bool, link: Callable[[Incident], str]) -> Markup:
    """Draw the bars, their names to the left or, on a narrow screen, above; *link* gives the address of an incident's card."""
    on, limit = drawing(height(drawn, box, wide=wide)), edge(drawn)
    time_axis(on, limit)
    on.axes.set_ylim(len(drawn), 0)
    on.axes.set_yticks([])
    on.axes.grid(axis="x")
    for row, bar in enumerate(drawn):
        total = f"{'→ ' if bar.seconds > limit else ''}{wording.duration(bar.seconds)}"
        middle = named_bar(on, [_part(part) for part in bar.parts], row, wide=wide, total=total)
        _name(on, bar, middle, left=-on.box.left / on.box.columns if wide else 0.0, link=link(bar.case.incident))
    on.axis_titles("time since the fault")
    longest = max(drawn, key=lambda bar: bar.seconds)
    text = (
        f"{plural(len(drawn), 'recovery', 'recoveries')}; the longest, of incident {longest.case.incident.number}, "
        f"took {wording.duration(longest.seconds)}. Each incident below has its numbers in a table."
    )
    return svg(on, name=name, title="Phase times of each recovery", text=text)


def _part(part: PhasePart) -> BarPart:
    time = wording.duration(part.seconds)
    return BarPart(
        size=part.seconds,
        color=COLORS[part.kind.name],
        tip=f"{part.label}: {time} ({wording.share(part.share)})",
        label=time,
        label_color=SvgTheme.ON_DARK if part.kind.name in _DARK else SvgTheme.ON_LIGHT,
    )


def _name(on: Drawing, bar: Bar, height: float, *, left: float, link: str) -> None:
    """Write the incident's number and kind at this *height*, from *left* on (in shares of the axis)."""
    incident, aligned = bar.case.incident, on.axes.get_yaxis_transform()
    number = f"{incident.number}"
    tip = on.tip(f"incident {number}: {incident.kind} on {wording.on_target(incident.target)}", link=link)
    badge(on, (left + 11 / on.box.columns, height), number, transform=aligned, gid=tip)
    left += (22 + 6 * len(number)) / on.box.columns
    name = shortened(incident.kind)
    on.axes.text(left, height, name, transform=aligned, va="center_baseline", fontsize=12, color=SvgTheme.TEXT)
