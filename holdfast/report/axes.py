"""What every plot of a job shares: an axis of elapsed time, numbered incidents above it, quiet grid lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Transform

from holdfast.report.svg_theme import Drawing, SvgTheme

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS: Final = (
    *(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)), 10.0, 15.0, 30.0,
    *(_MINUTE * many for many in (1.0, 2, 5, 10, 15, 30)), *(_HOUR * many for many in (1.0, 2, 3, 6, 12)),
    *(_DAY * digit * 10.0**power for power in range(6) for digit in (1, 2, 5)),
)  # fmt: skip
_SECONDS_UNTIL: Final = 120
"""A shorter axis speaks of seconds alone."""
BADGE_PIXELS: Final = 32
"""Where the badges sit: so far above the axes."""
LABEL_PIXELS: Final = 7
"""Where the generations' numbers sit, under the badges."""
_BADGE_EDGE_PIXELS: Final = 17
_DIGIT_PIXELS: Final = 7
_CROWD: Final = 40
"""From so many incidents on, their lines are faint, or they would hide the curve."""
_LABEL_PIXELS: Final = 86
"""Room for one label on the time axis."""
_LOG_FROM: Final = 40
"""A loss that falls by this factor shows its later part only on a logarithmic axis."""


def time_ticks(seconds: float, pixels: float) -> list[tuple[float, str]]:
    """Return where to mark an axis of *seconds* that is *pixels* wide, and what to write there."""
    most = max(2, int(pixels // _LABEL_PIXELS))
    step = next((step for step in _TIME_STEPS if seconds / step <= most), _TIME_STEPS[-1])
    return [(step * place, clock(step * place, step, seconds)) for place in range(int(seconds / step + 1e-9) + 1)]


def clock(at: float, step: float, whole: float) -> str:
    """Write *at* seconds as exactly as an axis needs that has a mark every *step* of *whole* seconds."""
    if at == 0:
        return "0"
    if step >= _DAY:
        return f"{at / _DAY:.0f} d"
    days, rest = divmod(round(at), _DAY)
    if step >= _HOUR:
        hours = rest // _HOUR
        return " ".join(part for part in (f"{days} d" if days else "", f"{hours} h" if hours or not days else "") if part)
    if whole >= _HOUR:
        return f"{round(at) // _HOUR}:{round(at) % _HOUR // _MINUTE:02d} h"
    if whole > _SECONDS_UNTIL:
        return f"{round(at) // _MINUTE}:{round(at) % _MINUTE:02d} min"
    return f"{at:.{max(0, -math.floor(math.log10(step) + 1e-9))}f} s"


def time_axis(on: Drawing, seconds: float) -> None:
    """Let x be elapsed time from 0 to *seconds*."""
    whole = max(seconds, 1e-6)
    ticks = time_ticks(whole, on.box.columns)
    on.axes.set_xlim(0, whole)
    on.axes.xaxis.set_major_locator(FixedLocator([at for at, _ in ticks]))
    on.axes.xaxis.set_major_formatter(FixedFormatter([words for _, words in ticks]))


def step_axis(on: Drawing, first: float, last: float) -> None:
    """Let x be the step number from *first* to *last*."""
    room = 0.5 if last == first else 0.0
    on.axes.set_xlim(first - room, last + room)
    on.axes.xaxis.set_major_locator(MaxNLocator(max(2, on.box.columns // _LABEL_PIXELS), integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    on.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def loss_axis(on: Drawing, lowest: float, highest: float) -> None:
    """Let y be the loss, logarithmic where it spans so much that a linear one would hide the end."""
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
    """Let y be a step number from 0 to *highest*."""
    on.axes.set_ylim(0, highest * 1.06 or 1)
    on.axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    on.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    on.axes.grid(axis="y")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMark:
    """An incident on an axis: its *number*, the place *x*, and the *words* that show over it."""

    number: int
    x: float
    words: str


def incident_marks(on: Drawing, marks: Sequence[AxisMark]) -> None:
    """Draw a line and a numbered badge for each incident; those too near each other share a badge."""
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
    for group in _neighbours(inside, near=single, reach=double):
        width = single if len(group) == 1 else double
        middle = max((group[0].x + group[-1].x) / 2, edge + width / 2)
        edge = middle + width / 2
        _group_badge(on, group, middle)


def _neighbours(marks: Sequence[AxisMark], *, near: float, reach: float) -> list[list[AxisMark]]:
    """Group the marks whose badges would touch, being *near*; a group *reaches* as far as its own badge is wide."""
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
    words = f"{first}" if first == last else f"{first}–{last}"  # noqa: RUF001 (a range)
    tip = on.tip("\n".join(mark.words for mark in group[:8]))
    badge(on, (middle, 1 + BADGE_PIXELS / on.box.rows), words, transform=on.axes.get_xaxis_transform(), gid=tip)


def badge(on: Drawing, place: tuple[float, float], words: str, *, transform: Transform, gid: str | None = None) -> None:
    """Draw an incident's number as it looks all over the page."""
    shape = "circle,pad=0.3" if len(words) == 1 else "round,pad=0.34,rounding_size=0.9"
    on.axes.text(
        *place,
        words,
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
