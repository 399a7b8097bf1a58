"""Where the time of each recovery went: a stacked bar of phases per incident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from markupsafe import Markup

from holdfast.report import wording
from holdfast.report.axes import badge, time_axis
from holdfast.report.case import IncidentCase
from holdfast.report.phases import KINDS, OTHER, Kind, PhaseKind, parts
from holdfast.report.svg_theme import Drawing, DrawingBox, SvgTheme, drawing, svg

MOST_BARS: Final = 24
_OUTLIER: Final = 10
"""A recovery this many times longer than the median one is cut at the edge, or it would flatten all others."""
_LETTER_PIXELS: Final = 6.8
_NAME_CHARACTERS: Final = 26

INKS: Final = {kind.name: SvgTheme[kind.name.upper().replace("-", "_").replace(" ", "_")] for kind in (*KINDS, OTHER)}
_DARK: Final = {"detect", "failed attempt", "reschedule", "warm-up", "other"}
"""Phases whose colour needs light letters, by day and by night."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One incident's phases."""

    case: IncidentCase
    parts: tuple[PhaseKind, ...]

    @property
    def seconds(self) -> float:
        """Return the length of the whole bar."""
        return sum(part.seconds for part in self.parts)


def bars(cases: Sequence[IncidentCase]) -> list[Bar]:
    """Return the bars to draw: every recovery with a phase, or the longest ones where they are many, in order of time."""
    all_bars = [Bar(case=case, parts=parts(case.phases)) for case in cases if case.phases]
    longest = sorted(all_bars, key=lambda bar: -bar.seconds)[:MOST_BARS]
    return sorted(longest, key=lambda bar: bar.case.incident.number)


def kinds(drawn: Sequence[Bar]) -> list[Kind]:
    """Return the kinds of phases that appear, for the legend."""
    seen = {part.kind.name for bar in drawn for part in bar.parts}
    return [kind for kind in (*KINDS, OTHER) if kind.name in seen]


def edge(drawn: Sequence[Bar]) -> float:
    """Return where the axis ends: at the longest bar that is no outlier."""
    lengths = [bar.seconds for bar in drawn]
    usual = [length for length in lengths if length <= _OUTLIER * (median(lengths) or 1)]
    return max(usual or lengths) * 1.02 or 1.0


def phase_bars(drawn: Sequence[Bar], box: DrawingBox, name: str, *, beside: bool) -> Markup:
    """Draw the bars, their labels *beside* them or, where there is little width, above."""
    pitch = 34 if beside else 56
    on, limit = drawing(replace(box, height=pitch * len(drawn) + box.top + box.bottom)), edge(drawn)
    time_axis(on, limit)
    on.axes.set_ylim(len(drawn), 0)
    on.axes.set_yticks([])
    on.axes.grid(axis="x")
    for row, bar in enumerate(drawn):
        _bar(on, bar, row + (0.5 if beside else 0.66), thick=20 / pitch)
        _name(on, bar, row, beside=beside, pitch=pitch)
    longest = max(drawn, key=lambda bar: bar.seconds)
    words = (
        f"{wording.plural(len(drawn), 'recovery', 'recoveries')}; the longest, of incident {longest.case.incident.number}, "
        f"took {wording.duration(longest.seconds)}. Each incident below has its numbers in a table."
    )
    return svg(on, name=name, title="Phase times of each recovery", words=words)


def _bar(on: Drawing, bar: Bar, middle: float, *, thick: float) -> None:
    limit = on.axes.get_xlim()[1]
    pixel, at = limit / on.box.columns, 0.0
    for part in bar.parts:
        end = min(at + part.seconds, limit)
        if end - at >= pixel / 4:
            gap = pixel if end - at > 4 * pixel else 0
            tip = on.tip(f"{part.label} {part.kind.term}".strip() + f": {wording.duration(part.seconds)} ({wording.share(part.share)})")
            on.axes.barh(middle, end - at - gap, left=at, height=thick, color=INKS[part.kind.name], linewidth=0, gid=tip, zorder=3)
            _value(on, part, (at, end), middle)
        at = end
    words = f"{'→ ' if bar.seconds > limit else ''}{wording.duration(bar.seconds)}"
    on.axes.text(at + 7 * pixel, middle, words, va="center_baseline", fontsize=12, fontweight="bold", color=SvgTheme.TEXT, zorder=5)


def _value(on: Drawing, part: PhaseKind, span: tuple[float, float], middle: float) -> None:
    """Write a phase's time into its piece of the bar, where it has the room."""
    words = wording.duration(part.seconds)
    if len(words) * _LETTER_PIXELS + 8 < (span[1] - span[0]) / on.axes.get_xlim()[1] * on.box.columns:
        ink = SvgTheme.ON_DARK if part.kind.name in _DARK else SvgTheme.ON_LIGHT
        on.axes.text(sum(span) / 2, middle, words, ha="center", va="center_baseline", fontsize=10.5, color=ink, zorder=5)


def _short(kind: str) -> str:
    plain = wording.visible(kind)
    return plain if len(plain) <= _NAME_CHARACTERS else f"{plain[: _NAME_CHARACTERS - 1]}…"


def _name(on: Drawing, bar: Bar, row: int, *, beside: bool, pitch: int) -> None:
    """Write the incident's number and kind beside the bar, or above it."""
    incident, aligned = bar.case.incident, on.axes.get_yaxis_transform()
    left, height = (-on.box.left / on.box.columns, row + 0.5) if beside else (0.0, row + 12 / pitch)
    number = f"{incident.number}"
    badge(on, (left + 11 / on.box.columns, height), number, transform=aligned)
    indent = (22 + 6 * len(number)) / on.box.columns
    on.axes.text(left + indent, height, _short(incident.kind), transform=aligned, va="center_baseline", fontsize=12, color=SvgTheme.TEXT)
