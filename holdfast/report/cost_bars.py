"""The bars of a bill: all of it by use, and under it the losses by kind of fault and phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from markupsafe import Markup
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from holdfast.accounting.bill import Bill, FailureLoss
from holdfast.accounting.ledger import UNFINISHED, Use
from holdfast.report import wording
from holdfast.report.cost_table import hours
from holdfast.report.phases import kind_of
from holdfast.report.recoveries import INKS
from holdfast.report.standalone import image
from holdfast.report.svg_theme import Drawing, DrawingBox, SvgTheme, drawing, svg

MOST: Final = 14
"""Kinds of faults that have a bar."""
USES: Final = {
    Use.PRODUCTIVE: SvgTheme.TRAINING,
    Use.SNAPSHOTS: SvgTheme.WAITS_SHARDS,
    Use.CHECKPOINTS: SvgTheme.LOSS,
    Use.LAUNCH: SvgTheme.STARTING,
    Use.MOVES: SvgTheme.WAITS_COLLECTIVE,
    Use.BESIDE: SvgTheme.COMPUTES,
    Use.UNSEEN: SvgTheme.WAITS_VOTE,
    Use.ENDING: SvgTheme.NODE,
    Use.LOST: SvgTheme.RECOVERING,
    Use.SPARE: SvgTheme.WAITING,
}
_WIDE: Final = DrawingBox(width=1000, height=0, left=190, right=84, top=8, bottom=30)
_NARROW: Final = DrawingBox(width=350, height=0, left=2, right=66, top=4, bottom=30)
_ALONE: Final = DrawingBox(width=1000, height=0, left=190, right=84, top=52, bottom=0)
_UNITS: Final = ((1, "h"), (60, "min"), (3600, "s"), (3_600_000, "ms"))
"""In an hour so many of each."""
_MARGIN: Final = 6
PITCH: Final = 34
"""Pixels from bar to bar where the names stand beside them."""
PITCH_NARROW: Final = 56
"""Pixels from bar to bar where the names stand above them."""
COLOURS_A_LINE: Final = 4
"""Entries of the legend in a line of a picture."""
_GAP: Final = 34
"""Pixels between the bar of all and those of the kinds."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a bar: what it is, how large, and its colour."""

    words: str
    size: float
    ink: SvgTheme


def ink_of(phase: str) -> SvgTheme:
    """Return the colour of a phase of a loss."""
    return SvgTheme.AGAIN if phase == UNFINISHED else INKS[kind_of(phase).name]


def use_legend(bill: Bill) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the bar of all hours, with what they mean and how much that is: some pieces are too thin to be seen."""
    return [
        (USES[use], f"{use.value} {hours(bill.hours(use))}, {wording.share(bill.hours(use) / bill.whole)}")
        for use in Use
        if bill.hours(use)
    ]


def loss_legend(bill: Bill) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the phases in which hours were lost."""
    return [(ink_of(phase), phase) for phase in bill.phases if any(phase in one.phases for one in _shown(bill))]


def left_out(bill: Bill) -> int:
    """Return how many kinds of faults have no bar."""
    return sum(one.hours > 0 for one in bill.losses) - len(_shown(bill))


def use_bar(bill: Bill, size: Literal["wide", "narrow"]) -> Markup:
    """Return the bar of all hours by use, for a *wide* or a *narrow* screen."""
    kept, lost = bill.hours(Use.PRODUCTIVE), bill.hours(Use.LOST)
    words = f"Of {hours(bill.whole)} {hours(kept)} were productive and {hours(lost)} lost to faults. The tables have the numbers."
    return _alone([("all", _by_use(bill))], size, f"cost-{size}", "What became of the hours", words)


def loss_bars(bill: Bill, size: Literal["wide", "narrow"]) -> Markup | None:
    """Return a bar of the lost hours for each kind of fault, by phase; None where nothing was lost."""
    rows = _by_phase(bill)
    if not rows:
        return None
    words = f"{hours(bill.hours(Use.LOST))} were lost to {wording.plural(len(rows), 'kind')} of faults. The tables have the numbers."
    return _alone(rows, size, f"lost-{size}", "What was lost to faults", words)


def bars_file(bill: Bill, kind: str, title: str) -> bytes:
    """Return all bars in one picture as a file of this *kind*, ``png`` or ``svg``."""
    colours = [*use_legend(bill), *((ink, f"lost in {phase}") for ink, phase in loss_legend(bill))]
    box = replace(_ALONE, bottom=46 + 20 * -(-len(colours) // COLOURS_A_LINE))
    return image(_drawn(bill, box), kind, colours, title=wording.visible(title), columns=COLOURS_A_LINE)


def _alone(rows: Sequence[tuple[str, Sequence[_Piece]]], size: Literal["wide", "narrow"], name: str, title: str, words: str) -> Markup:
    """Draw a picture of its own, with a scale of its own."""
    box, beside = (_WIDE, True) if size == "wide" else (_NARROW, False)
    pitch = PITCH if beside else PITCH_NARROW
    on = drawing(replace(box, height=box.top + pitch * len(rows) + box.bottom))
    _rows(on, rows, pitch, beside=beside, ticks=True)
    return svg(on, name=name, title=title, words=words)


def _shown(bill: Bill) -> Sequence[FailureLoss]:
    return [one for one in bill.losses if one.hours > 0][:MOST]


def _drawn(bill: Bill, box: DrawingBox) -> Drawing:
    """Draw all bars below each other: the one of all hours, and with a scale of their own those of the lost ones."""
    kinds = _by_phase(bill)
    upper = box.top + PITCH
    height = upper + (_GAP + PITCH * len(kinds) if kinds else 0) + box.bottom
    on = drawing(replace(box, height=height, top=upper + _GAP if kinds else box.top))
    all_of_it = on
    if kinds:
        where = (box.left / box.width, 1 - upper / height, box.columns / box.width, PITCH / height)
        axes = on.figure.add_axes(where)
        axes.spines[:].set_visible(False)
        all_of_it = replace(on, box=replace(box, height=height, bottom=height - upper), axes=axes)
        _rows(on, kinds, PITCH, beside=True, ticks=True)
    _rows(all_of_it, [("all", _by_use(bill))], PITCH, beside=True, ticks=not kinds)
    return on


def _by_phase(bill: Bill) -> list[tuple[str, list[_Piece]]]:
    return [(one.kind, [_Piece(phase, spent, ink_of(phase)) for phase, spent in one.phases.items()]) for one in _shown(bill)]


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
        axes.text(left, height, _short(name), transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=12, color=SvgTheme.TEXT)


def _bar(on: Drawing, pieces: Sequence[_Piece], middle: float, *, thick: float) -> None:
    at, whole = 0.0, sum(piece.size for piece in pieces)
    pixel = on.axes.get_xlim()[1] / on.box.columns
    for piece in pieces:
        if piece.size > pixel / 4:
            gap = pixel if piece.size > 4 * pixel else 0
            tip = on.tip(f"{piece.words}: {hours(piece.size)} ({wording.share(piece.size / whole)})")
            on.axes.barh(middle, piece.size - gap, left=at, height=thick, color=piece.ink, linewidth=0, gid=tip, zorder=3)
        at += piece.size
    on.axes.text(at + 7 * pixel, middle, hours(whole), va="center_baseline", fontsize=12, fontweight="bold", color=SvgTheme.TEXT, zorder=5)


def _short(kind: str) -> str:
    plain = wording.visible(kind)
    return plain if len(plain) <= 26 else f"{plain[:25]}…"  # noqa: PLR2004 (the room beside a bar)
