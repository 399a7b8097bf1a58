"""`holdfast profile`: where each rank of a job waits, what is copied meanwhile, and a picture of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, heading, hint, say, say_facts, say_json, say_rows
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.paths import job_directory
from holdfast.report import profile_text as words
from holdfast.report import write_profile
from holdfast.report.profiles import JobProfile, read
from holdfast.report.wording import plural
from holdfast.spec.job import TrainingJob

WIDTH: Final = 80
MOST: Final = 24
"""Ranks in a table or in the picture; where there are more, the first ones are shown."""


def profile(reference: str | None, output: Path | None, *, as_json: bool) -> int:
    """Print a job's profile, and draw it where that is asked for."""
    book = History.open(create=False)
    try:
        job = find_job(book, reference)
    finally:
        book.close()
    found = read(_checkpoints(job), job.name, since=job.at)
    drawn = write_profile(found, job.name, output) if output else None
    if as_json:
        say_json({"job": job.name, "id": job.id, **words.record(found), "picture": str(drawn) if drawn else None})
        return 0
    _tell(job.name, found)
    if drawn:
        say()
        say(str(drawn))
    return 0


def _checkpoints(job: Job) -> Path:
    """Return the folder of the job's checkpoints; of a job file that this version cannot read, the usual one."""
    try:
        return TrainingJob.model_validate(job.spec).checkpoints
    except ValidationError:
        return job_directory(job.name) / "checkpoints"


def _tell(job: str, found: JobProfile) -> None:
    heading(f"{job}  step {found.step:,} at {clock(found.time)}, generation {found.generation}")
    say(f"{plural(len(found.ranks), 'rank')} of {found.world} on {plural(found.nodes, 'node')}")
    for note in found.notes:
        hint(_wrapped(f"note: {note}"))
    _title("Layout")
    say_facts([(name, _wrapped(text, 14)) for name, text in words.layout_facts(found.layout)])
    _title("A usual step of each rank, and the longest window of the newest one")
    _rows(*words.rank_rows(found), ranks=len(found.ranks))
    _title("Windows of the newest step")
    _rows(*words.kind_rows(found), ranks=len(found.ranks))
    _title("Snapshots in memory, and the share of the training time that they cost")
    _rows(*words.snapshot_rows(found), ranks=len(found.ranks))
    for line in words.snapshot_interval(found):
        say(_wrapped(line))
    _title("The newest step")
    for line in words.picture(found, MOST):
        say(line)
    say(_wrapped(words.PICTURE_LEGEND))


def _title(text: str) -> None:
    say()
    heading(text)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], *, ranks: int) -> None:
    """Write the rows of the first ranks."""
    first: list[Sequence[str]] = []
    seen = 0
    for row in rows:
        seen += bool(row[0])
        if seen > MOST:
            break
        first.append(row)
    say_rows(head, first)
    if ranks > MOST:
        say(f"and {plural(ranks - MOST, 'rank')} more; `--json` and the page have all")


def _wrapped(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
