"""The bars of a bill: all of it by use, and under it the losses by kind of fault and phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from markupsafe import Markup
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from holdfast.accounting.bill import Bill, Loss
from holdfast.accounting.ledger import UNFINISHED, Use
from holdfast.report import wording
from holdfast.report.hours import hours
from holdfast.report.ink import Box, Drawing, Ink, drawing, svg
from holdfast.report.phases import kind_of
from holdfast.report.recoveries import INKS
from holdfast.report.standalone import image

MOST: Final = 14
"""Kinds of faults that have a bar."""
USES: Final = {
    Use.PRODUCTIVE: Ink.TRAINING,
    Use.SNAPSHOTS: Ink.WAITS_SHARDS,
    Use.CHECKPOINTS: Ink.LOSS,
    Use.LAUNCH: Ink.STARTING,
    Use.MOVES: Ink.WAITS_COLLECTIVE,
    Use.BESIDE: Ink.COMPUTES,
    Use.UNSEEN: Ink.WAITS_VOTE,
    Use.ENDING: Ink.NODE,
    Use.LOST: Ink.RECOVERING,
    Use.SPARE: Ink.WAITING,
}
_WIDE: Final = Box(width=1000, height=0, left=190, right=84, top=8, bottom=30)
_NARROW: Final = Box(width=350, height=0, left=2, right=66, top=4, bottom=30)
_ALONE: Final = Box(width=1000, height=0, left=190, right=84, top=52, bottom=0)
_UNITS: Final = ((1, "h"), (60, "min"), (3600, "s"), (3_600_000, "ms"))
"""In an hour so many of each."""
_MARGIN: Final = 6
_GAP: Final = 34
"""Pixels between the bar of all and those of the kinds."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a bar: what it is, how large, and its colour."""

    words: str
    size: float
    ink: Ink


def ink_of(phase: str) -> Ink:
    """Return the colour of a phase of a loss."""
    return Ink.AGAIN if phase == UNFINISHED else INKS[kind_of(phase).name]


def legend(bill: Bill) -> list[tuple[Ink, str]]:
    """Return the colours that appear, with what they mean."""
    uses = [(USES[use], use.value) for use in Use if bill.hours(use)]
    shown = [phase for phase in bill.phases if any(phase in one.phases for one in _shown(bill))]
    return uses + [(ink_of(phase), f"lost: {phase}") for phase in shown]


def left_out(bill: Bill) -> int:
    """Return how many kinds of faults have no bar."""
    return sum(one.hours > 0 for one in bill.losses) - len(_shown(bill))


def bars(bill: Bill, size: Literal["wide", "narrow"]) -> Markup:
    """Return the picture for a *wide* or a *narrow* screen."""
    on = _drawn(bill, _WIDE if size == "wide" else _NARROW, beside=size == "wide")
    kept, lost = bill.hours(Use.PRODUCTIVE), bill.hours(Use.LOST)
    words = f"Of {hours(bill.whole)} {hours(kept)} were productive and {hours(lost)} lost to faults. The tables have the numbers."
    return svg(on, name=f"cost-{size}", title="What became of the hours", words=words)


def bars_file(bill: Bill, kind: str, title: str) -> bytes:
    """Return the picture as a file of this *kind*, ``png`` or ``svg``."""
    colours = legend(bill)
    box = replace(_ALONE, bottom=46 + 20 * -(-len(colours) // 5))
    return image(_drawn(bill, box, beside=True), kind, colours, title=wording.visible(title))


def _shown(bill: Bill) -> Sequence[Loss]:
    return [one for one in bill.losses if one.hours > 0][:MOST]


def _drawn(bill: Bill, box: Box, *, beside: bool) -> Drawing:
    pitch, kinds = (34 if beside else 56), _shown(bill)
    upper = box.top + pitch
    height = upper + (_GAP + pitch * len(kinds) if kinds else 0) + box.bottom
    on = drawing(replace(box, height=height, top=upper + _GAP if kinds else box.top))
    all_of_it = on
    if kinds:
        where = (box.left / box.width, 1 - upper / height, box.columns / box.width, pitch / height)
        axes = on.figure.add_axes(where)
        axes.spines[:].set_visible(False)
        all_of_it = replace(on, box=replace(box, height=height, bottom=height - upper), axes=axes)
    _rows(all_of_it, [("all", _by_use(bill))], pitch, beside=beside, ticks=not kinds)
    if kinds:
        rows = [(one.kind, [_Piece(phase, spent, ink_of(phase)) for phase, spent in one.phases.items()]) for one in kinds]
        _rows(on, rows, pitch, beside=beside, ticks=True)
    return on


def _by_use(bill: Bill) -> list[_Piece]:
    return [_Piece(use.value, bill.hours(use), USES[use]) for use in Use if bill.hours(use)]


def _rows(on: Drawing, rows: Sequence[tuple[str, Sequence[_Piece]]], pitch: int, *, beside: bool, ticks: bool) -> None:
    """Draw a bar for each of *rows*, its name beside it or above."""
    axes = on.axes
    limit = max((sum(piece.size for piece in pieces) for _, pieces in rows), default=0.0) * 1.02 or 1.0
    size, unit = next(((size, unit) for size, unit in _UNITS if limit * size >= 2), _UNITS[-1])  # noqa: PLR2004 (a tick or two)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([])
    ticks_at = MaxNLocator(max(2, on.box.columns // 90), steps=[1, 2, 5, 10]).tick_values(0, limit * size)
    axes.xaxis.set_major_locator(FixedLocator([at / size for at in ticks_at if at <= limit * size]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * size:,.6g} {unit}"))
    axes.grid(axis="x", visible=ticks)
    axes.tick_params(axis="x", labelbottom=ticks)
    axes.set_axisbelow(True)
    for row, (name, pieces) in enumerate(rows):
        _bar(on, pieces, row + (0.5 if beside else 0.66), thick=20 / pitch)
        left, height = ((_MARGIN - on.box.left) / on.box.columns, row + 0.5) if beside else (0.0, row + 12 / pitch)
        axes.text(left, height, _short(name), transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=12, color=Ink.TEXT)


def _bar(on: Drawing, pieces: Sequence[_Piece], middle: float, *, thick: float) -> None:
    at, whole = 0.0, sum(piece.size for piece in pieces)
    pixel = on.axes.get_xlim()[1] / on.box.columns
    for piece in pieces:
        if piece.size > pixel / 4:
            gap = pixel if piece.size > 4 * pixel else 0
            tip = on.tip(f"{piece.words}: {hours(piece.size)} ({wording.share(piece.size / whole)})")
            on.axes.barh(middle, piece.size - gap, left=at, height=thick, color=piece.ink, linewidth=0, gid=tip, zorder=3)
        at += piece.size
    on.axes.text(at + 7 * pixel, middle, hours(whole), va="center_baseline", fontsize=12, fontweight="bold", color=Ink.TEXT, zorder=5)


def _short(kind: str) -> str:
    plain = wording.visible(kind)
    return plain if len(plain) <= 26 else f"{plain[:25]}…"  # noqa: PLR2004 (the room beside a bar)
