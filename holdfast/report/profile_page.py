"""The page about a job's steps: the picture, and the tables that the terminal shows too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Final

from markupsafe import Markup

from holdfast.report import profile_text as words
from holdfast.report import schedule
from holdfast.report.profiles import JobProfile
from holdfast.report.svg_theme import pens
from holdfast.report.template_env import surroundings
from holdfast.report.wording import NOTHING

MOST_ROWS: Final = 2000
_NUMBER: Final = re.compile(r"[\d,.]+ ?(?:%|[a-zA-Zµ]{1,3}(?: \d+ [a-z]{1,3})?)?")
_SNAPSHOTS: Final = (
    "What one snapshot takes to copy, how much of it is hidden in windows, and the share of the training time that snapshots cost: "
    "as predicted, and as measured."
)


def drawn(profile: JobProfile, job: str, kind: str) -> bytes:
    """Return the file of this *kind*: ``html``, ``png`` or ``svg``."""
    with pens():
        if kind != "html":
            return schedule.schedule_file(profile, kind, job)
        pictures = [schedule.schedule(profile, box, name) for box, name in ((schedule.WIDE, "wide"), (schedule.NARROW, "narrow"))]
    return _page(profile, job, pictures).encode("utf-8", "backslashreplace")


def _page(profile: JobProfile, job: str, pictures: list[Markup]) -> str:
    return (
        surroundings()
        .get_template("profile.html.j2")
        .render(
            job=job,
            profile=profile,
            style=Markup(resources.files(__package__).joinpath("template/style.css").read_text("utf-8")),  # noqa: S704 (ours)
            wide=pictures[0],
            narrow=pictures[1],
            legend=[(ink.variable, text) for ink, text in schedule.legend(profile)],
            left_out=len(profile.ranks) - len(schedule.shown(profile)),
            layout=list(words.layout_facts(profile.layout)),
            cadence=words.cadence(profile),
            tables=[
                (
                    "steps",
                    "Steps",
                    "A usual step of each rank, and the longest window of its newest one.",
                    *_table(*words.rank_rows(profile)),
                ),
                (
                    "windows",
                    "Windows",
                    "What each rank waited for in its newest step. Counted on: what every coming step is predicted to have at least.",
                    *_table(*words.kind_rows(profile)),
                ),
                (
                    "snapshots",
                    "Snapshots in memory",
                    _SNAPSHOTS,
                    *_table(*words.snapshot_rows(profile)),
                ),
            ],
        )
    )


def _table(head: Sequence[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], list[int], int]:
    """Return a table's head as a page writes it, its first rows, the columns with numbers, and how many rows are left out."""
    numbers = [column for column in range(len(head)) if all(_is_number(row[column]) for row in rows)]
    return [name.capitalize() for name in head], rows[:MOST_ROWS], numbers, len(rows[MOST_ROWS:])


def _is_number(cell: str) -> bool:
    """Tell whether a cell holds a number with or without its unit, or stands for one that is not known."""
    return cell in {"", NOTHING} or _NUMBER.fullmatch(cell) is not None
