"""The page about costs: one bar for all time by category, one bar of lost time for each kind of fault, and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from markupsafe import Markup
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from holdfast.accounting.bill import Bill, FailureLoss
from holdfast.accounting.ledger import MEANING, UNFINISHED, TimeCategory
from holdfast.plurals import plural
from holdfast.report import cost_table
from holdfast.report.cost_table import hours
from holdfast.report.pages.charts.axes import BarPart, bar_pitch, named_bar, shortened
from holdfast.report.pages.charts.drawing import Drawing, DrawingBox, SvgTheme, drawing, image, style, svg
from holdfast.report.pages.configuration import Configuration
from holdfast.report.pages.recoveries import COLORS
from holdfast.report.pages.template_env import Tile, render
from holdfast.report.phases import kind_of, label_of
from holdfast.report.text import wording

MOST_ROWS: Final = 500
MOST_KINDS: Final = 14
"""Kinds of faults that have a bar."""
CATEGORY_COLORS: Final = {
    TimeCategory.PRODUCTIVE: SvgTheme.TRAINING,
    TimeCategory.SNAPSHOTS: SvgTheme.WAITS_SHARDS,
    TimeCategory.CHECKPOINTS: SvgTheme.LOSS,
    TimeCategory.STARTUP: SvgTheme.STARTING,
    TimeCategory.MIGRATIONS: SvgTheme.WAITS_COLLECTIVE,
    TimeCategory.BETWEEN_STEPS: SvgTheme.ISOLATE,
    TimeCategory.STEPS_UNKNOWN: SvgTheme.WAITS_VOTE,
    TimeCategory.SHUTDOWN: SvgTheme.NODE,
    TimeCategory.LOST: SvgTheme.RECOVERING,
    TimeCategory.SPARE: SvgTheme.WAITING,
}
_WIDE: Final = DrawingBox(width=1000, height=0, left=190, right=84, top=8, bottom=44)
_NARROW: Final = DrawingBox(width=350, height=0, left=2, right=84, top=4, bottom=44)
_FILE: Final = DrawingBox(width=1000, height=0, left=190, right=84, top=52, bottom=0)
_UNITS: Final = ((1, "h"), (60, "min"), (3600, "s"), (3_600_000, "ms"))
"""How many of each are in an hour."""
_MARGIN: Final = 6
_LEGEND_COLUMNS: Final = 4
_GAP: Final = 34
"""Pixels between the bar of all time and those of the kinds."""
_NODES: Final = (
    "What incidents with their root cause on a node cost. Attributed: to its GPUs or to the node itself. "
    "Quarantine: one of these recommends eviction, or there were several; test the node."
)
Rows = Sequence[tuple[str, Sequence[BarPart]]]
Size = Literal["wide", "narrow"]


def drawn(bill: Bill, job: str | None, kind: str, configuration: Configuration) -> bytes:
    """Return the file of this *kind*: ``html``, ``png`` or ``svg``; only the first shows the *configuration*."""
    with style():
        if kind != "html":
            return _file(bill, kind, cost_table.heading(bill, job))
        pictures = [
            _picture(category_bar(bill, "wide"), category_bar(bill, "narrow"), category_legend(bill)),
            _picture(loss_bars(bill, "wide"), loss_bars(bill, "narrow"), loss_legend(bill)),
        ]
    each = f"Each microsecond of every {'rank' if bill.unit.by_rank else 'node'} is in one of these lines."
    page = render(
        "cost.html.j2",
        who=job or "all jobs",
        job=job,
        sentence=_sentence(bill),
        span=cost_table.heading(bill, job),
        counted=cost_table.counted(bill),
        tiles=_tiles(bill),
        configuration=configuration,
        categories=pictures[0],
        losses=pictures[1],
        left_out=sum(one.hours > 0 for one in bill.losses) - len(_shown_kinds(bill)),
        tables=[("categories", "By category", each, *_table(cost_table.categories(bill))), *_tables(bill)],
    )
    return page.encode("utf-8", "backslashreplace")


# -- text and tables ------------------------------------------------------------------------------------------------------


def _tables(bill: Bill) -> Iterator[tuple[str, str, str, Sequence[str], list[list[str]], list[int], int]]:
    """Yield the tables of losses, nodes and jobs: name, title, text, and the table itself."""
    if bill.phases:
        yield "phases", "Lost, by phase", "The phase of the incident in which it was lost.", *_table(cost_table.phases(bill))
    if bill.phases or bill.lost_capacity:
        kinds = _table(cost_table.kinds(bill))
        yield "faults", "Lost, by kind of fault", "The kind of the root cause of each incident, most expensive first.", *kinds
    if bill.bad_nodes:
        yield "nodes", "Nodes", _NODES, *_table(cost_table.bad_nodes(bill))
    if len(bill.jobs) > 1:
        yield "jobs", "Jobs", "Most expensive first.", *_table(cost_table.jobs(bill))


def _table(table: cost_table.Table) -> tuple[Sequence[str], list[list[str]], list[int], int]:
    """Return head, first rows, columns with numbers, and how many rows are left out."""
    head, rows = table
    return [name.capitalize() for name in head], rows[:MOST_ROWS], cost_table.numeric_columns(head), len(rows[MOST_ROWS:])


def _sentence(bill: Bill) -> str:
    if not bill.total_hours:
        return "No compute was held in this time."
    kept, lost = (wording.share(bill.hours(one) / bill.total_hours) for one in (TimeCategory.PRODUCTIVE, TimeCategory.LOST))
    if not bill.costs.steps_known:
        what = "no steps were reported, so what was kept is not known"
        return f"Of {hours(bill.total_hours)} of compute {lost} were lost to failures; {what}."
    return f"Of {hours(bill.total_hours)} of compute {kept} went into steps that were kept, {lost} were lost to failures."


def _tiles(bill: Bill) -> list[Tile]:
    lost = f"{wording.share(bill.hours(TimeCategory.LOST) / bill.total_hours)} of all" if bill.total_hours else wording.NOTHING
    return [
        Tile(label="ETTR", value=wording.share(bill.ettr), note="of the jobs' time in steps that were kept", share=bill.ettr),
        Tile(label="MTTF", value=wording.duration(bill.mttf.seconds), note=cost_table.sample_text(bill.mttf, "failure")),
        Tile(label="MTTR", value=wording.duration(bill.mttr.seconds), note=cost_table.sample_text(bill.mttr, "recovery")),
        Tile(label="Lost to failures", value=hours(bill.hours(TimeCategory.LOST)), note=lost),
    ]


# -- pictures -------------------------------------------------------------------------------------------------------------


def _picture(wide: Markup | None, narrow: Markup | None, legend: list[tuple[SvgTheme, str]]) -> dict[str, Any] | None:
    """Return a picture in both sizes with its legend, for the template."""
    return None if wide is None else {"wide": wide, "narrow": narrow, "legend": [(color.variable, text) for color, text in legend]}


def category_legend(bill: Bill) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the categories with their hours and shares, because some parts are too thin to be seen."""
    return [
        (CATEGORY_COLORS[one], f"{one.value} {hours(bill.hours(one))}, {wording.share(bill.hours(one) / bill.total_hours)}")
        for one in TimeCategory
        if bill.hours(one)
    ]


def loss_legend(bill: Bill) -> list[tuple[SvgTheme, str]]:
    """Return the colours of the phases in which time was lost."""
    return [(_phase_color(phase), label_of(phase)) for phase in bill.phases if any(phase in one.phases for one in _shown_kinds(bill))]


def goodput_rows(bill: Bill) -> list[tuple[SvgTheme, str, str, str, str]]:
    """Return the categories with time in them: colour, name, time, share and meaning."""
    return [
        (CATEGORY_COLORS[one], one.value, hours(bill.hours(one)), wording.share(bill.hours(one) / bill.total_hours), MEANING[one])
        for one in TimeCategory
        if bill.hours(one)
    ]


def category_bar(bill: Bill, size: Size) -> Markup:
    """Return the bar of all time by category, for a *wide* or a *narrow* screen; it needs no name."""
    kept, lost = bill.hours(TimeCategory.PRODUCTIVE), bill.hours(TimeCategory.LOST)
    productive = f"{hours(kept)} were productive" if bill.costs.steps_known else "what was productive is not known"
    text = f"Of {hours(bill.total_hours)} {productive}, and {hours(lost)} were lost to failures. The tables have the numbers."
    return _bars(bill, [("", _category_parts(bill))], size, f"cost-{size}", title="All hours by category", text=text)


def loss_bars(bill: Bill, size: Size) -> Markup | None:
    """Return a bar of the lost time for each kind of fault, by phase; None if nothing was lost."""
    rows = _loss_rows(bill)
    if not rows:
        return None
    lost = hours(bill.hours(TimeCategory.LOST))
    text = f"{lost} were lost to {plural(len(rows), 'kind')} of faults. The tables have the numbers."
    return _bars(bill, rows, size, f"lost-{size}", title="Lost to failures", text=text)


def _bars(bill: Bill, rows: Rows, size: Size, name: str, *, title: str, text: str) -> Markup:  # noqa: PLR0913 (what it draws, and three texts)
    """Return a picture of *rows* with its own scale."""
    box, wide = (_WIDE, True) if size == "wide" else (_NARROW, False)
    if not any(name for name, _ in rows):
        box, wide = replace(box, left=_NARROW.left), True
    on = drawing(replace(box, height=box.top + bar_pitch(wide=wide) * len(rows) + box.bottom))
    _draw_rows(on, rows, wide=wide, ticks=True)
    on.axis_titles(f"time, added up over {'ranks' if bill.unit.by_rank else 'nodes'}")
    return svg(on, name=name, title=title, text=text)


def _file(bill: Bill, kind: str, title: str) -> bytes:
    """Return all bars in one file of this *kind*, ``png`` or ``svg``: all time above, and below with its own scale the lost time."""
    legend = [*category_legend(bill), *((color, f"lost in {phase}") for color, phase in loss_legend(bill))]
    rows = _loss_rows(bill)
    box = replace(_FILE, bottom=46 + 20 * -(-len(legend) // _LEGEND_COLUMNS))
    pitch = bar_pitch(wide=True)
    upper = box.top + pitch
    height = upper + (_GAP + pitch * len(rows) if rows else 0) + box.bottom
    on = drawing(replace(box, height=height, top=upper + _GAP if rows else box.top))
    above = on
    if rows:
        axes = on.figure.add_axes((box.left / box.width, 1 - upper / height, box.columns / box.width, pitch / height))
        axes.spines[:].set_visible(False)
        above = replace(on, box=replace(box, height=height, bottom=height - upper), axes=axes)
        _draw_rows(on, rows, wide=True, ticks=True)
    _draw_rows(above, [("all", _category_parts(bill))], wide=True, ticks=not rows)
    return image(on, kind, legend, title=wording.visible(title), columns=_LEGEND_COLUMNS)


def _draw_rows(on: Drawing, rows: Rows, *, wide: bool, ticks: bool) -> None:
    """Draw a bar for each of *rows*, its name to the left or above."""
    axes = on.axes
    totals = [sum(part.size for part in parts) for _, parts in rows]
    limit = max(totals, default=0.0) * 1.02 or 1.0
    factor, unit = next(((factor, unit) for factor, unit in _UNITS if limit * factor >= 2), _UNITS[-1])  # noqa: PLR2004 (a tick or two)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([])
    ticks_at = MaxNLocator(max(2, on.box.columns // 90), steps=[1, 2, 5, 10]).tick_values(0, limit * factor)
    axes.xaxis.set_major_locator(FixedLocator([at / factor for at in ticks_at if at <= limit * factor]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:,.6g} {unit}" if value else "0"))
    axes.grid(axis="x", visible=ticks)
    axes.tick_params(axis="x", labelbottom=ticks)
    axes.set_axisbelow(True)
    for row, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
        height = named_bar(on, parts, row, wide=wide, total=hours(total))
        left = (_MARGIN - on.box.left) / on.box.columns if wide else 0.0
        axes.text(
            left, height, shortened(name), transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=12, color=SvgTheme.TEXT
        )


def _shown_kinds(bill: Bill) -> Sequence[FailureLoss]:
    return [one for one in bill.losses if one.hours > 0][:MOST_KINDS]


def _loss_rows(bill: Bill) -> Rows:
    return [
        (one.kind, [_part(label_of(phase), spent, sum(one.phases.values()), _phase_color(phase)) for phase, spent in one.phases.items()])
        for one in _shown_kinds(bill)
    ]


def _category_parts(bill: Bill) -> list[BarPart]:
    shown = [one for one in TimeCategory if bill.hours(one)]
    return [_part(one.value, bill.hours(one), sum(map(bill.hours, shown)), CATEGORY_COLORS[one]) for one in shown]


def _part(name: str, size: float, total: float, color: SvgTheme) -> BarPart:
    return BarPart(size=size, color=color, tip=f"{name}: {hours(size)} ({wording.share(size / total)})")


def _phase_color(phase: str) -> SvgTheme:
    return SvgTheme.AGAIN if phase == UNFINISHED else COLORS[kind_of(phase).name]
