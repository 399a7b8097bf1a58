"""The page of a plan: what is wasted by cause at each size, number of spares and checkpoint interval, and the tables behind it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from holdfast.plurals import plural
from holdfast.report.pages.charts.axes import BarPart, bar_pitch, named_bar, shortened
from holdfast.report.pages.charts.drawing import DrawingBox, SvgTheme, drawing, style, svg
from holdfast.report.pages.recoveries import COLORS
from holdfast.report.pages.template_env import Tile, render
from holdfast.report.phases import kind_of, label_of
from holdfast.report.text import wording
from holdfast.simulator import accounts
from holdfast.simulator.planning import JobPlan, PlanPoint, PlanSweep
from holdfast.simulator.results import Spread
from holdfast.simulator.systems import SYSTEMS

IDLE: Final = "idle nodes"
CAUSE_COLORS: Final[Mapping[str, SvgTheme]] = {
    accounts.CHECKPOINTS: SvgTheme.LOSS,
    accounts.SNAPSHOTS: SvgTheme.WAITS_SHARDS,
    accounts.OVERHEAD: SvgTheme.WAITS_VOTE,
    accounts.SLOWDOWN: SvgTheme.WAITS_PIPELINE,
    accounts.LOST_CAPACITY: SvgTheme.NODE,
    accounts.MIGRATION: SvgTheme.WAITS_COLLECTIVE,
    accounts.FAILED: SvgTheme.DOWN_BAND,
    accounts.STARTUP: SvgTheme.STARTING,
    IDLE: SvgTheme.WAITING,
}
"""Colours of what is no phase of a recovery."""
THIN: Final = 2e-5
"""Share of the time below which a cause is in no legend: it cannot be seen."""
_WIDE: Final = DrawingBox(width=1000, height=0, left=190, right=84, top=8, bottom=44)
_NARROW: Final = DrawingBox(width=350, height=0, left=2, right=84, top=4, bottom=44)
_MARGIN: Final = 6
_NOTE: Final = (
    "A projection, not a measurement: the phase times were published for other systems. Pictures show means of all runs, tables medians."
)
_CHOICES: Final = frozenset({"spare nodes", "hot spares", "checkpoint interval", "policy"})
"""Tables of which one row is recommended."""
Size = Literal["wide", "narrow"]


def page(plan: JobPlan, sizes: PlanSweep) -> bytes:
    """Return the page of *plan*, with what is wasted at other *sizes*."""
    request, best = plan.request, plan.sensitivity.points[0]
    with style():
        pictures = [
            _picture(
                "sizes", sizes, "Wasted on jobs of each size, by cause", "GPUs, with 3 % of spare nodes and hot spares on up to 16 of them."
            ),
            _picture("spares", plan.spares, "Spare nodes against waste", "Too few make the job wait, too many stand idle."),
            _picture("interval", plan.interval, "Checkpoint interval against waste", "Of checkpoints on disk, beside in-memory snapshots."),
            _picture("systems", plan.systems, "Systems under the same faults", "Each with the recommended spares."),
        ]
    source = "come as in a trace of a real cluster" if request.rate is None else f"are independent, {request.rate:g} in 1,000 node-days"
    spread = best.result.spread
    tables = [_table(sweep) for sweep in (plan.spares, plan.hot_spares, plan.interval, plan.policy, plan.systems, plan.sensitivity, sizes)]
    text = render(
        "plan.html.j2",
        who=f"{request.gpus:,} GPUs",
        sentence=f"{_spares(plan)}, a checkpoint every {plan.interval.best.label}, policy {plan.policy.best.label}.",
        span=f"{SYSTEMS[best.result.system].title}; faults {source}; {plural(request.runs, 'run')} of "
        f"{wording.duration(86_400 * request.days)}.",
        note=f"{plan.caveat()} {_NOTE}".strip(),
        tiles=[
            _share_tile("ETTR", spread(lambda run: run.ettr), "of the time in steps that were kept"),
            _share_tile("Goodput", spread(lambda run: run.goodput), "of the job's GPU time in steps that were kept"),
            Tile(label="Wasted", value=_hours(best.wasted.median), note="GPU-hours a week, those of idle nodes included"),
            Tile(
                label="Interrupted",
                value=wording.duration(_between(best)),
                note="mean time between two incidents of the job",
            ),
        ],
        pictures=pictures,
        tables=tables,
    )
    return text.encode("utf-8", "backslashreplace")


def _spares(plan: JobPlan) -> str:
    count, warm = int(plan.spares.best.value), int(plan.hot_spares.best.value)
    return f"{plural(count, 'spare node')}, {warm} of them with hot spares" if count else "No spare nodes"


def _share_tile(label: str, spread: Spread, note: str) -> Tile:
    """Return a tile whose range is in its note, as it would not fit into the value."""
    low, high = wording.share(spread.low), wording.share(spread.high)
    return Tile(label=label, value=wording.share(spread.median), note=note if low == high else f"{note}; {low} to {high} in single runs")


def _between(point: PlanPoint) -> float | None:
    incidents = point.result.total(lambda job: job.incidents)
    return sum(run.seconds for run in point.result.runs) / incidents if incidents else None


def causes(point: PlanPoint) -> dict[str, float]:
    """Return the share of the job's GPU time that each cause wastes, in order; idle nodes come last and may make the sum exceed 1."""
    shares = {name: part for name, part in point.result.shares().items() if name != accounts.PRODUCTIVE and part > 0}
    idle = statistics.mean(run.idle_gpu_seconds / run.held for run in point.result.runs)
    return {**shares, **({IDLE: idle} if idle else {})}


def _label(cause: str) -> str:
    return label_of(cause)


def _color(cause: str) -> SvgTheme:
    return CAUSE_COLORS[cause] if cause in CAUSE_COLORS else COLORS.get(kind_of(cause).name, SvgTheme.OTHER)


def _picture(name: str, sweep: PlanSweep, title: str, what: str) -> dict[str, Any]:
    """Return a picture in both sizes with its legend, for the template."""
    found = [causes(point) for point in sweep.points]
    legend = dict.fromkeys(cause for some in found for cause, part in some.items() if part > THIN)
    return {
        "name": name,
        "title": title,
        "what": what,
        "wide": _bars(name, sweep, found, "wide", title),
        "narrow": _bars(name, sweep, found, "narrow", title),
        "legend": [(_color(cause).variable, _label(cause)) for cause in legend],
    }


def _bars(name: str, sweep: PlanSweep, found: Sequence[Mapping[str, float]], size: Size, title: str) -> Markup:
    """Return a bar for each point of *sweep*: shares of the job's GPU time by cause."""
    box, wide = (_WIDE, True) if size == "wide" else (_NARROW, False)
    on = drawing(replace(box, height=box.top + bar_pitch(wide=wide) * len(found) + box.bottom))
    totals = [sum(some.values()) for some in found]
    usual = sorted(totals)[len(totals) // 2]
    limit = min(max(totals), 6 * usual) * 1.02 or 1.0  # one bad choice must not hide the others; its bar is cut, its number is not
    axes = on.axes
    axes.set_xlim(0, limit)
    axes.set_ylim(len(found), 0)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(max(2, on.box.columns // 90), steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %" if value else "0"))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    left = (_MARGIN - on.box.left) / on.box.columns if wide else 0.0
    for row, (point, some, total) in enumerate(zip(sweep.points, found, totals, strict=True)):
        parts = [BarPart(size=part, color=_color(cause), tip=f"{_label(cause)}: {_share(part)}") for cause, part in some.items()]
        height = named_bar(on, parts, row, wide=wide, total=_share(total) + (" (cut)" if total > limit else ""))
        place = axes.get_yaxis_transform()
        axes.text(left, height, shortened(point.label), transform=place, va="center_baseline", fontsize=12, color=SvgTheme.TEXT)
    on.axis_titles("wasted, of the job's GPU time")
    worst = max(zip(totals, sweep.points, strict=True), key=lambda one: one[0])
    text = f"From {_share(min(totals))} to {_share(worst[0])} at {worst[1].label}. The tables have the numbers."
    return svg(on, name=f"{name}-{size}", title=title, text=text)


def _table(sweep: PlanSweep) -> tuple[str, str, Sequence[str], list[list[str]], list[int]]:
    """Return name, title, head, rows, and which columns are numbers."""
    head = (
        sweep.name.removeprefix("checkpoint ").capitalize() if sweep.name != "GPUs" else sweep.name,
        "ETTR",
        "Goodput",
        "Lost a week",
        "Wasted a week",
        "Job failed",
    )
    rows = [
        [
            point.label + (" (recommended)" if sweep.name in _CHOICES and point is sweep.best else ""),
            _percent(point.result.spread(lambda run: run.ettr)),
            _percent(point.result.spread(lambda run: run.goodput)),
            _range(point.result.spread(lambda run: run.lost_per_week)),
            _range(point.wasted),
            str(point.result.total(lambda job: job.failures)),
        ]
        for point in sweep.points
    ]
    return f"table-{sweep.name.replace(' ', '-')}", sweep.name[:1].upper() + sweep.name[1:], head, rows, [1, 2, 3, 4, 5]


def _percent(spread: Spread) -> str:
    return _joined(map(wording.share, (spread.median, spread.low, spread.high)))


def _range(spread: Spread) -> str:
    return _joined(map(_hours, (spread.median, spread.low, spread.high)))


def _joined(texts: Iterable[str]) -> str:
    median, low, high = texts
    bare = low.removesuffix(" h").removesuffix("%")  # the unit once, or the widest table does not fit
    return median if low == high else f"{median} ({bare} to {high.removesuffix(' h').removesuffix('%')})"


def _share(part: float) -> str:
    return f"{100 * part:.2f} %" if part < 1 else f"{100 * part:,.0f} %"


def _hours(number: float) -> str:
    return f"{number:,.3g} h" if number < 1000 else f"{number:,.0f} h"  # noqa: PLR2004 (digits)
