"""`holdfast report --profile`: where each rank of a job waits, what is copied meanwhile, and a picture of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from holdfast.cli.job_view import find_job
from holdfast.cli.output import WIDTH, clock, echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, hint, section
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report import write_profile
from holdfast.report.profiles import JobProfile, read
from holdfast.report.text import profile_text as words
from holdfast.stored_job import checkpoint_directory

MAX_RANKS: Final = 24
"""Ranks in a table or in the picture; of more, the first ones are shown."""


def profile(job: str | None, output: Path | None, *, as_json: bool) -> int:
    """Print a job's profile, and draw it on request."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        found = read(checkpoint_directory(row), row.name, since=row.at)
        drawn = write_profile(history, found, row, output) if output else None
    if as_json:
        echo_json({"job": row.name, "id": row.id, **words.record(found), "picture": str(drawn) if drawn else None})
        return 0
    _show(row.name, found)
    if drawn:
        echo()
        echo(str(drawn))
    return 0


def _show(job: str, found: JobProfile) -> None:
    ranks = len(found.ranks)
    heading(f"{job}  step {found.step:,} at {clock(found.time)}, generation {found.generation}")
    echo(f"{plural(ranks, 'rank')} of {found.world} on {plural(found.nodes, 'node')}")
    for note in found.notes:
        hint(_wrapped(f"note: {note}"))
    section("Layout")
    echo_facts([(name, _wrapped(text, 14)) for name, text in words.layout_facts(found.layout)])
    section("A typical step of each rank, and the longest wait of its newest one")
    _table(*words.rank_rows(found), ranks=ranks)
    section("Waits of the newest step")
    _table(*words.kind_rows(found), ranks=ranks)
    section("In-memory snapshots, and the share of the training time that they cost")
    _table(*words.snapshot_rows(found), ranks=ranks)
    for line in words.snapshot_interval(found):
        echo_wrapped(line)
    section("The newest step")
    for line in words.picture(found, MAX_RANKS):
        echo(line)
    echo_wrapped(words.PICTURE_LEGEND)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, ranks: int) -> None:
    """Write the rows of the first ranks; a row without a rank belongs to the one above."""
    first: list[Sequence[str]] = []
    seen = 0
    for row in rows:
        seen += bool(row[0])
        if seen > MAX_RANKS:
            break
        first.append(row)
    echo_table(head, first)
    if ranks > MAX_RANKS:
        echo(f"and {plural(ranks - MAX_RANKS, 'rank')} more; `--json` and the page have all")


def _wrapped(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
