"""The page about what compute was held and what became of it: one bar for all of it, one for each kind of fault, and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, Final

from markupsafe import Markup

from holdfast.accounting.bill import Bill
from holdfast.accounting.ledger import Use
from holdfast.report import cost_bars, cost_table, wording
from holdfast.report.facts import Tile
from holdfast.report.svg_theme import SvgTheme, pens
from holdfast.report.template_env import surroundings

MOST_ROWS: Final = 500
_NODES: Final = (
    "What incidents cost that had their root on a node. Blamed: they speak against its GPUs or the node itself. "
    "Quarantine: one of these asked for it to leave, or there were several; it is worth a test."
)


def drawn(bill: Bill, job: str | None, kind: str) -> bytes:
    """Return the file of this *kind*: ``html``, ``png`` or ``svg``."""
    with pens():
        if kind != "html":
            return cost_bars.bars_file(bill, kind, cost_table.heading(bill, job))
        found = [
            _picture(cost_bars.use_bar(bill, "wide"), cost_bars.use_bar(bill, "narrow"), cost_bars.use_legend(bill)),
            _picture(cost_bars.loss_bars(bill, "wide"), cost_bars.loss_bars(bill, "narrow"), cost_bars.loss_legend(bill)),
        ]
    return _page(bill, job, found).encode("utf-8", "backslashreplace")


def _picture(wide: Markup | None, narrow: Markup | None, legend: list[tuple[SvgTheme, str]]) -> dict[str, Any] | None:
    """Return a picture in both sizes with its legend, for the template."""
    return None if wide is None else {"wide": wide, "narrow": narrow, "legend": [(ink.variable, text) for ink, text in legend]}


def _page(bill: Bill, job: str | None, pictures: list[dict[str, Any] | None]) -> str:
    each = f"Each microsecond of every {'rank' if bill.unit.by_rank else 'node'} is in one of these lines."
    return (
        surroundings()
        .get_template("cost.html.j2")
        .render(
            who=job or "all jobs",
            job=job,
            sentence=_sentence(bill),
            span=cost_table.heading(bill, job),
            counted=cost_table.counted(bill),
            tiles=_tiles(bill),
            style=Markup(resources.files(__package__).joinpath("template/style.css").read_text("utf-8")),  # noqa: S704 (ours)
            uses=pictures[0],
            losses=pictures[1],
            left_out=cost_bars.left_out(bill),
            tables=[("uses", "What became of it", each, *_table(cost_table.uses(bill))), *_tables(bill)],
        )
    )


def _tables(bill: Bill) -> Iterator[tuple[str, str, str, Sequence[str], list[list[str]], list[int], int]]:
    """Yield what there is to tell of losses, nodes and jobs: name, title, words, and the table."""
    if bill.phases:
        yield "phases", "Lost, by phase", "Where in an incident it was lost.", *_table(cost_table.phases(bill))
    if bill.phases or bill.without:
        yield (
            "faults",
            "Lost, by kind of fault",
            "The kind of the root of each incident, most expensive first.",
            *_table(cost_table.kinds(bill)),
        )
    if bill.bad_nodes:
        yield "nodes", "Nodes", _NODES, *_table(cost_table.bad_nodes(bill))
    if len(bill.jobs) > 1:
        yield "jobs", "Jobs", "The largest first.", *_table(cost_table.jobs(bill))


def _sentence(bill: Bill) -> str:
    if not bill.whole:
        return "Nothing was held in this time."
    kept, lost = (wording.share(bill.hours(use) / bill.whole) for use in (Use.PRODUCTIVE, Use.LOST))
    return f"Of {cost_table.hours(bill.whole)} of compute {kept} went into steps that count, {lost} were lost to faults."


def _tiles(bill: Bill) -> list[Tile]:
    lost = f"{wording.share(bill.hours(Use.LOST) / bill.whole)} of all" if bill.whole else wording.NOTHING
    return [
        Tile(label="ETTR", value=wording.share(bill.ettr), remark="of the jobs' time in steps that count", share=bill.ettr),
        Tile(label="MTTF", value=wording.duration(bill.mttf.seconds), remark=cost_table.stands_on(bill.mttf, "failure")),
        Tile(label="MTTR", value=wording.duration(bill.mttr.seconds), remark=cost_table.stands_on(bill.mttr, "recovery")),
        Tile(label="Lost to faults", value=cost_table.hours(bill.hours(Use.LOST)), remark=lost),
    ]


def _table(table: cost_table.Table) -> tuple[Sequence[str], list[list[str]], list[int], int]:
    """Return a table's head as a page writes it, its first rows, the columns with numbers, and how many rows are left out."""
    head, rows = table
    return [name.capitalize() for name in head], rows[:MOST_ROWS], cost_table.numbers(head), len(rows[MOST_ROWS:])
