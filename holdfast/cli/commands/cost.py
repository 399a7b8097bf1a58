"""`holdfast cost`: what became of the time that jobs held devices for."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

from holdfast.accounting.bill import Bill, bill
from holdfast.cli.job_view import find_job
from holdfast.cli.output import heading, hint, say, say_facts, say_json, say_rows
from holdfast.history.store import History
from holdfast.report import cost_table as words
from holdfast.report import write_cost
from holdfast.report.wording import plural

WIDTH: Final = 100
MOST: Final = 12
"""Rows of a table on the terminal; `--json` and the page have all."""


def cost(reference: str | None, since: float | None, output: Path | None, *, as_json: bool) -> int:
    """Tell the bill of one job, or of all, and draw it where that is asked for."""
    book = History.open(create=False)
    try:
        job = None if reference is None else find_job(book, reference)
        found = bill(book, job, since=since)
    finally:
        book.close()
    name = None if job is None else job.name
    drawn = write_cost(found, name, output) if output else None
    if as_json:
        say_json({"job": name, "id": job.id if job else None, **words.record(found), "picture": str(drawn) if drawn else None})
        return 0
    if not found.jobs:
        hint("There is no job to account for. `holdfast history` lists what the history has.")
    else:
        _tell(found, name)
    if drawn:
        say()
        say(str(drawn))
    return 0


def _tell(found: Bill, name: str | None) -> None:
    heading(words.heading(found, name))
    for line in textwrap.wrap(words.counted(found), WIDTH):
        say(line)
    say()
    _rows(words.categories(found), "")
    say()
    say_facts(list(words.bill_figures(found)))
    if found.phases:
        _rows(words.phases(found), "Lost, by phase")
    if found.phases or found.lost_capacity:
        _rows(words.kinds(found), "Lost, by kind of fault")
    if found.bad_nodes:
        _rows(words.bad_nodes(found), "Nodes, by what incidents with their root there cost")
    if len(found.jobs) > 1:
        _rows(words.jobs(found), "Jobs")


def _rows(table: words.Table, title: str) -> None:
    """Write the first rows of *table*."""
    head, rows = table
    if title:
        say()
        heading(title)
    most = MOST if title else len(rows)
    say_rows(head, rows[:most])
    if len(rows) > most:
        say(f"and {plural(len(rows) - most, 'row')} more; `--json` and the page have all")
