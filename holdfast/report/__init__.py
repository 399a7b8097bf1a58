"""What people read about jobs: text for the terminal, Markdown for Prefect, notifications, metrics, and HTML pages (`pages`).

Nothing here decides or writes to the history. Matplotlib and Jinja are imported only when a page is written.
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
    from holdfast.simulator.planning import JobPlan, PlanSweep

__all__ = ["write_atomically", "write_cost", "write_plan", "write_profile", "write_report"]


def write_report(history: History, job: Job, output: Path) -> Path:
    """Write the report of *job* to *output*, one self-contained HTML page, and return its path."""
    from holdfast.report.pages.job_history import read_history  # noqa: PLC0415
    from holdfast.report.pages.report_page import page  # noqa: PLC0415 (matplotlib and numpy are slow to import)

    text = page(read_history(history, job, now=time.time()))
    return _written("report", output, text.encode("utf-8", "backslashreplace"))


def write_profile(history: History, profile: JobProfile, job: Job, output: Path) -> Path:
    """Write the profile of *job*'s newest step to *output*, as HTML, PNG or SVG by its suffix, and return its path."""
    from holdfast.report.pages.configuration import configuration_of  # noqa: PLC0415
    from holdfast.report.pages.profile_page import drawn  # noqa: PLC0415

    configuration = configuration_of(history, [job])
    return _written("profile", output, drawn(profile, job.name, output.suffix.lower().removeprefix("."), configuration))


def write_cost(history: History, bill: Bill, job: Job | None, output: Path) -> Path:
    """Write *bill*, of *job* or of all jobs, to *output*, as HTML, PNG or SVG by its suffix, and return its path."""
    from holdfast.history import queries  # noqa: PLC0415
    from holdfast.report.pages.configuration import configuration_of  # noqa: PLC0415
    from holdfast.report.pages.cost_page import drawn  # noqa: PLC0415

    billed = {one.job.id for one in bill.jobs}
    jobs = [one for one in queries.jobs(history, limit=None) if one.id in billed] if job is None else [job]
    content = drawn(bill, job.name if job is not None else None, output.suffix.lower().removeprefix("."), configuration_of(history, jobs))
    return _written("account of costs", output, content)


def write_plan(plan: JobPlan, sizes: PlanSweep, output: Path) -> Path:
    """Write the page of *plan* to *output*, with what is wasted at other *sizes*, and return its path."""
    from holdfast.report.pages.plan_page import page  # noqa: PLC0415

    return _written("plan", output, page(plan, sizes))


def _written(what: str, output: Path, content: bytes) -> Path:
    target = output.expanduser().absolute()
    try:
        if target.exists() and not target.is_file() and not target.is_dir():  # a device or a pipe
            target.write_bytes(content)
        else:
            resolved = target.resolve()  # a link stays a link
            if not resolved.is_dir():
                resolved.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(resolved, content)
    except OSError as error:
        raise NotWritable(what, str(output), error.strerror or str(error)) from error
    return target


def write_atomically(target: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write a temporary file in the same folder as *target* and rename it, so that nobody reads half of it; raise ``OSError``.

    The temporary file has an unpredictable name and follows no link, because others may write to the folder.
    """
    if target.is_dir():  # also the root, which has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(content)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
