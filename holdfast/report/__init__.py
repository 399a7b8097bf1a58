"""Reports that people read: one HTML page a job, one piece of Markdown an incident.

Nothing heavy is imported before a report is drawn.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import NotWritable

if TYPE_CHECKING:
    from holdfast.history.models import Job
    from holdfast.history.store import History

__all__ = ["write_report"]


def write_report(history: History, job: Job, output: Path) -> Path:
    """Write the report of *job* to *output*, one self-contained HTML page, and return its path."""
    from holdfast.report.page import page  # noqa: PLC0415 (matplotlib and numpy: only who draws pays for them)
    from holdfast.report.story import gather  # noqa: PLC0415

    text = page(gather(history, job, now=time.time()))
    target = output.expanduser().absolute()
    try:
        _put(target, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise NotWritable("report", str(output), error.strerror or str(error)) from error
    return target


def _put(target: Path, content: bytes) -> None:
    """Write beside *target* and rename, so that nobody ever opens half a report; a device or a pipe is written to as it is."""
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(content)
        return
    target = target.resolve()  # a link stays a link
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
