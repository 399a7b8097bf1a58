"""`holdfast cost`: what the time that jobs held devices for was used for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final

from holdfast.accounting.bill import Bill, bill
from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, hint, section
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report import cost_table as words
from holdfast.report import write_cost

WIDTH: Final = 100
MAX_ROWS: Final = 12
"""Rows of a table on the terminal; `--json` and the page have all."""


def cost(job: str | None, since: float | None, output: Path | None, *, as_json: bool) -> int:
    """Show the cost of one job, or of all, and draw it on request."""
    with closing(History.open(create=False)) as history:
        row = None if job is None else find_job(history, job)
        found = bill(history, row, since=since)
        drawn = write_cost(history, found, row, output) if output else None
    name = None if row is None else row.name
    if as_json:
        echo_json({"job": name, "id": row.id if row else None, **words.record(found), "picture": str(drawn) if drawn else None})
        return 0
    if not found.jobs:
        hint("There is no job to account for. `holdfast ps -a` lists the jobs of the history.")
    else:
        _show(found, name)
    if drawn:
        echo()
        echo(str(drawn))
    return 0


def _show(found: Bill, name: str | None) -> None:
    heading(words.heading(found, name))
    echo_wrapped(words.counted(found), width=WIDTH)
    echo()
    echo_table(*words.categories(found))
    echo()
    echo_facts(list(words.bill_figures(found)))
    if found.phases:
        _table(words.phases(found), "Lost, by phase")
    if found.phases or found.lost_capacity:
        _table(words.kinds(found), "Lost, by kind of fault")
    if found.bad_nodes:
        _table(words.bad_nodes(found), "Nodes, by the cost of incidents whose root cause was there")
    if len(found.jobs) > 1:
        _table(words.jobs(found), "Jobs")


def _table(table: words.Table, title: str) -> None:
    """Write the first rows of *table*."""
    head, rows = table
    section(title)
    echo_table(head, rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        echo(f"and {plural(len(rows) - MAX_ROWS, 'row')} more; `--json` and the page have all")
