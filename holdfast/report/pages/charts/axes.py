"""Parts that the plots share: axes of time, steps and loss, numbered incidents above them, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Transform

from holdfast.report.pages.charts.drawing import Drawing, SvgTheme
from holdfast.report.text import wording

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS: Final = (
    *(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)), 10.0, 15.0, 30.0,
    *(_MINUTE * many for many in (1.0, 2, 5, 10, 15, 30)), *(_HOUR * many for many in (1.0, 2, 3, 6, 12)),
    *(_DAY * digit * 10.0**power for power in range(6) for digit in (1, 2, 5)),
)  # fmt: skip
_SECONDS_UNTIL: Final = 120
"""A shorter axis shows seconds only."""
BADGE_PIXELS: Final = 32
"""Height of the badges above the axes."""
LABEL_PIXELS: Final = 7
"""Height of the generations' numbers, below the badges."""
_BADGE_EDGE_PIXELS: Final = 17
_DIGIT_PIXELS: Final = 7
_LABEL_LETTER_PIXELS: Final = 6.8
_CROWD: Final = 40
"""With so many incidents their lines are faint, so that they do not hide the curve."""
_LABEL_PIXELS: Final = 68
"""Room for one label on the time axis: a time of day."""
_DATE_PIXELS: Final = 92
"""Room for a day with a time of day."""
_PITCH, _PITCH_NARROW = 34, 56
_BAR_PIXELS: Final = 20
NAME_CHARACTERS: Final = 26
"""Characters of a bar's name."""
_LOG_FROM: Final = 40
"""A loss that falls by more than this factor gets a logarithmic axis."""


def clock_time(at: float, step: float, total: float) -> str:
    """Return *at* (seconds since 1970) in UTC as exactly as needed on an axis of *total* seconds with a tick every *step*."""
    form = "%H:%M:%S" if step < _MINUTE else "%H:%M"
    if total >= _DAY:
        form = "%m-%d" if step >= _DAY else "%m-%d %H:%M"
    return datetime.fromtimestamp(at, tz=UTC).strftime(form)


def time_ticks(seconds: float, pixels: float) -> list[tuple[float, str]]:
    """Return positions and labels of the ticks of an axis of *seconds* that is *pixels* wide."""
    most = max(2, int(pixels // (_DATE_PIXELS if seconds >= _DAY else _LABEL_PIXELS)))
    step = next((step for step in _TIME_STEPS if seconds / step <= most), _TIME_STEPS[-1])
    return [(step * place, clock(step * place, step, seconds)) for place in range(int(seconds / step + 1e-9) + 1)]


def clock(at: float, step: float, total: float) -> str:
    """Return *at* seconds as exactly as needed on an axis of *total* seconds with a tick every *step*."""
    if at == 0:
        return "0"
    if step >= _DAY:
        return f"{at / _DAY:.0f} d"
    days, rest = divmod(round(at), _DAY)
    if step >= _HOUR:
        hours = rest // _HOUR
        return " ".join(part for part in (f"{days} d" if days else "", f"{hours} h" if hours or not days else "") if part)
    if total >= _HOUR:
        return f"{round(at) // _HOUR}:{round(at) % _HOUR // _MINUTE:02d} h"
    if total > _SECONDS_UNTIL:
        return f"{round(at) // _MINUTE}:{round(at) % _MINUTE:02d} min"
    return f"{at:.{max(0, -math.floor(math.log10(step) + 1e-9))}f} s"


def time_axis(on: Drawing, seconds: float, *, zero: float | None = None) -> None:
    """Make x elapsed time from 0 to *seconds*; with *zero*, the time of its origin, the time of day stands below."""
    total = max(seconds, 1e-6)
    ticks = time_ticks(total, on.box.columns)
    on.axes.set_xlim(0, total)
    on.axes.xaxis.set_major_locator(FixedLocator([at for at, _ in ticks]))
    labels = [label for _, label in ticks]
    if zero is not None:
        step = ticks[1][0] if len(ticks) > 1 else total
        labels = [f"{label}\n{clock_time(zero + at, step, total)}" for at, label in ticks]
    on.axes.xaxis.set_major_formatter(FixedFormatter(labels))


def since_submission(zero: float, seconds: float) -> str:
    """Return the title of a time axis that begins at *zero*, *seconds* long: it names the day of the times below the ticks."""
    begin, end = (datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d") for at in (zero, zero + seconds))
    return f"time since submission; below: UTC, {begin}" + (f" to {end}" if end != begin else "")


def step_axis(on: Drawing, first: float, last: float) -> None:
    """Make x the step number from *first* to *last*."""
    room = 0.5 if last == first else 0.0
    on.axes.set_xlim(first - room, last + room)
    on.axes.xaxis.set_major_locator(MaxNLocator(max(2, on.box.columns // _LABEL_PIXELS), integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    on.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def loss_axis(on: Drawing, lowest: float, highest: float) -> None:
    """Make y the loss, logarithmic if a linear axis would hide the end."""
    axes = on.axes
    if lowest > 0 and highest / lowest > _LOG_FROM:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.15, highest * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if highest / lowest < 1000 else (1.0,), numticks=6))  # noqa: PLR2004 (three decades)
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = (highest - lowest) * 0.06 or abs(highest) * 0.1 or 1.0
        axes.set_ylim(lowest - room, highest + room)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.grid(axis="y")


def count_axis(on: Drawing, highest: float) -> None:
    """Make y a step number from 0 to *highest*."""
    on.axes.set_ylim(0, highest * 1.06 or 1)
    on.axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    on.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    on.axes.grid(axis="y")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMark:
    """An incident on an axis: its *number*, its position *x*, and its tooltip *text*."""

    number: int
    x: float
    text: str
    link: str = ""


def incident_marks(on: Drawing, marks: Sequence[AxisMark]) -> None:
    """Draw a line and a numbered badge for each incident; incidents close to each other share a badge."""
    low, high = on.axes.get_xlim()
    per_pixel = (high - low) / on.box.columns
    inside = sorted((mark for mark in marks if low <= mark.x <= high), key=lambda mark: mark.x)
    style: dict[str, Any] = (
        {"linewidth": 1, "dashes": (3, 2)} if len(inside) < _CROWD else {"linewidth": 0.8, "alpha": max(0.12, 16 / len(inside))}
    )
    drawn, top = -math.inf, 1 + (BADGE_PIXELS - 8) / on.box.rows
    for mark in inside:
        if mark.x - drawn >= 2 * per_pixel:
            on.axes.axvline(mark.x, 0, top, color=SvgTheme.INCIDENT, zorder=4, clip_on=False, **style)
            drawn = mark.x
    digits = len(str(max((mark.number for mark in inside), default=0)))
    single, double = ((_BADGE_EDGE_PIXELS + letters * _DIGIT_PIXELS) * per_pixel for letters in (digits, 2 * digits + 1))
    edge = -math.inf
    for group in _groups(inside, near=single, reach=double):
        width = single if len(group) == 1 else double
        middle = max((group[0].x + group[-1].x) / 2, edge + width / 2)
        edge = middle + width / 2
        _group_badge(on, group, middle)


def _groups(marks: Sequence[AxisMark], *, near: float, reach: float) -> list[list[AxisMark]]:
    """Group the marks whose badges would touch, being *near*; a group *reaches* as far as its badge is wide."""
    groups: list[list[AxisMark]] = []
    for mark in marks:
        last = groups[-1] if groups else [mark]
        crowded = len(last) > 1 or mark.x - last[-1].x < near
        if groups and crowded and mark.x - last[0].x < reach:
            last.append(mark)
        else:
            groups.append([mark])
    return groups


def _group_badge(on: Drawing, group: Sequence[AxisMark], middle: float) -> None:
    first, last = group[0].number, group[-1].number
    label = f"{first}" if first == last else f"{first}–{last}"  # noqa: RUF001 (a range)
    tip = on.tip("\n".join(mark.text for mark in group[:8]), link=group[0].link)
    badge(on, (middle, 1 + BADGE_PIXELS / on.box.rows), label, transform=on.axes.get_xaxis_transform(), gid=tip)


def badge(on: Drawing, position: tuple[float, float], label: str, *, transform: Transform, gid: str | None = None) -> None:
    """Draw an incident's number, with the same look on the whole page."""
    shape = "circle,pad=0.3" if len(label) == 1 else "round,pad=0.34,rounding_size=0.9"
    on.axes.text(
        *position,
        label,
        transform=transform,
        ha="center",
        va="center_baseline",
        fontsize=11,
        fontweight="bold",
        color=SvgTheme.ON_INCIDENT,
        bbox={"boxstyle": shape, "facecolor": SvgTheme.INCIDENT, "edgecolor": "none"},
        gid=gid,
        zorder=6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """A part of a stacked bar: its size, its colour, its tooltip, and a label that is drawn if it fits."""

    size: float
    color: SvgTheme
    tip: str
    label: str = ""
    label_color: SvgTheme = SvgTheme.ON_LIGHT


def stacked_bar(on: Drawing, parts: Sequence[BarPart], middle: float, *, height: float, total: str) -> None:
    """Draw a horizontal bar of *parts* with its *total* at the end; parts beyond the axis are cut, invisible ones are left out."""
    limit = on.axes.get_xlim()[1]
    pixel, at = limit / on.box.columns, 0.0
    for part in parts:
        end = min(at + part.size, limit)
        if end - at > pixel / 4:
            gap = pixel if end - at > 4 * pixel else 0
            tip = on.tip(part.tip)
            on.axes.barh(middle, end - at - gap, left=at, height=height, color=part.color, linewidth=0, gid=tip, zorder=3)
            if part.label and len(part.label) * _LABEL_LETTER_PIXELS + 8 < (end - at) / pixel:
                on.axes.text(
                    (at + end) / 2, middle, part.label, ha="center", va="center_baseline", fontsize=10.5, color=part.label_color, zorder=5
                )
        at = end
    on.axes.text(at + 7 * pixel, middle, total, va="center_baseline", fontsize=12, fontweight="bold", color=SvgTheme.TEXT, zorder=5)


def bar_pitch(*, wide: bool) -> int:
    """Return the pixels from bar to bar: names stand to the left of *wide* ones, and above narrow ones."""
    return _PITCH if wide else _PITCH_NARROW


def named_bar(on: Drawing, parts: Sequence[BarPart], row: int, *, wide: bool, total: str) -> float:
    """Draw the stacked bar of a *row* of a plot whose rows are one unit high; return the height of its name."""
    pitch = bar_pitch(wide=wide)
    stacked_bar(on, parts, row + (0.5 if wide else 0.66), height=_BAR_PIXELS / pitch, total=total)
    return row + (0.5 if wide else 12 / pitch)


def shortened(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Return *text* with at most so many *characters*, cut at the end."""
    plain = wording.visible(text)
    return plain if len(plain) <= characters else f"{plain[: characters - 1]}…"
