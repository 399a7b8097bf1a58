"""Reports that people read: one HTML page a job, one picture of its steps, one piece of Markdown an incident.

Nothing heavy is imported before a report is drawn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import NotWritable

if TYPE_CHECKING:
    from holdfast.accounting.bill import Bill
    from holdfast.history.models import Job
    from holdfast.history.store import History
    from holdfast.report.profiles import JobProfile

__all__ = ["write_cost", "write_profile", "write_report"]


def write_report(history: History, job: Job, output: Path) -> Path:
    """Write the report of *job* to *output*, one self-contained HTML page, and return its path."""
    from holdfast.report.page import page  # noqa: PLC0415 (matplotlib and numpy: only who draws pays for them)
    from holdfast.report.story import gather  # noqa: PLC0415

    text = page(gather(history, job, now=time.time()))
    return _written("report", output, text.encode("utf-8", "backslashreplace"))


def write_profile(profile: JobProfile, job: str, output: Path) -> Path:
    """Write the picture of *job*'s newest step to *output*, as HTML, PNG or SVG by its name, and return its path."""
    from holdfast.report.profile_page import drawn  # noqa: PLC0415

    return _written("profile", output, drawn(profile, job, output.suffix.lower().removeprefix(".")))


def write_cost(bill: Bill, job: str | None, output: Path) -> Path:
    """Write the picture of *bill*, of *job* or of all jobs, to *output*, as HTML, PNG or SVG by its name, and return its path."""
    from holdfast.report.cost_page import drawn  # noqa: PLC0415

    return _written("account of costs", output, drawn(bill, job, output.suffix.lower().removeprefix(".")))


def _written(what: str, output: Path, content: bytes) -> Path:
    target = output.expanduser().absolute()
    try:
        _put(target, content)
    except OSError as error:
        raise NotWritable(what, str(output), error.strerror or str(error)) from error
    return target


def _put(target: Path, content: bytes) -> None:
    """Write beside *target* and rename, so that nobody ever opens half a report; a device or a pipe is written to as it is."""
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(content)
        return
    target = target.resolve()  # a link stays a link
    if target.is_dir():  # also the root, which has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
