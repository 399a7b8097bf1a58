"""The page about a job's steps: a plot, and the tables that the terminal shows too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from holdfast.report.pages.charts import schedule
from holdfast.report.pages.charts.drawing import style
from holdfast.report.pages.configuration import Configuration
from holdfast.report.pages.template_env import render
from holdfast.report.profiles import JobProfile
from holdfast.report.text import profile_text
from holdfast.report.text.wording import NOTHING

MOST_ROWS: Final = 2000
_NUMBER: Final = re.compile(r"[\d,.]+ ?(?:%|[a-zA-Zµ]{1,3}(?: \d+ [a-z]{1,3})?)?")
_SNAPSHOTS: Final = (
    "How long one snapshot takes to copy, how much of that overlaps with waits, and the share of the training time that snapshots cost: "
    "as predicted, and as measured."
)


def drawn(profile: JobProfile, job: str, kind: str, configuration: Configuration) -> bytes:
    """Return the file of this *kind*: ``html``, ``png`` or ``svg``; only the first shows the *configuration*."""
    with style():
        if kind != "html":
            return schedule.schedule_file(profile, kind, job)
        pictures = [schedule.schedule(profile, box, name) for box, name in ((schedule.WIDE, "wide"), (schedule.NARROW, "narrow"))]
    steps = "A typical step of each rank, and the longest wait of its newest one."
    waits = "What each rank waited for in its newest step. Predicted: what every step is predicted to have at least."
    page = render(
        "profile.html.j2",
        job=job,
        profile=profile,
        configuration=configuration,
        wide=pictures[0],
        narrow=pictures[1],
        legend=[(color.variable, text) for color, text in schedule.legend(profile)],
        left_out=len(profile.ranks) - len(schedule.shown(profile)),
        layout=list(profile_text.layout_facts(profile.layout)),
        snapshot_interval=profile_text.snapshot_interval(profile),
        tables=[
            ("steps", "Steps", steps, *_table(*profile_text.rank_rows(profile))),
            ("waits", "Waits", waits, *_named(*_table(*profile_text.kind_rows(profile)))),
            ("snapshots", "In-memory snapshots", _SNAPSHOTS, *_table(*profile_text.snapshot_rows(profile))),
        ],
    )
    return page.encode("utf-8", "backslashreplace")


def _table(head: Sequence[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], list[int], int]:
    """Return head, first rows, columns with numbers, and how many rows are left out."""
    numbers = [column for column in range(len(head)) if all(_is_number(row[column]) for row in rows)]
    return [name.capitalize() for name in head], rows[:MOST_ROWS], numbers, len(rows[MOST_ROWS:])


def _named(head: list[str], rows: list[list[str]], numbers: list[int], more: int) -> tuple[list[str], list[list[str]], list[int], int]:
    """Return the table with the rank of the row above in rows without one, shown where rows are stacked and have lost their order."""
    rank, named = "", []
    for first, *rest in rows:
        rank = first or rank
        named.append([first or Markup('<span class="narrow">{}</span>').format(rank), *rest])
    return head, named, numbers, more


def _is_number(cell: str) -> bool:
    """Return whether a cell holds a number, with or without a unit, or stands for an unknown one."""
    return cell in {"", NOTHING} or _NUMBER.fullmatch(cell) is not None
