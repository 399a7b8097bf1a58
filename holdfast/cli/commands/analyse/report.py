"""`holdfast report`: write a page about a job, or show where its ranks wait."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_json
from holdfast.history.store import History
from holdfast.report import write_report


def report(job: str | None, output: Path | None, *, profile: bool, as_json: bool) -> int:
    """Write the page about a job, and show its path; or show its *profile*."""
    if profile:
        from holdfast.cli.commands.analyse.profile import profile as show  # noqa: PLC0415 (the page needs none of it)

        return show(job, output, as_json=as_json)
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        page = write_report(history, row, output or Path(f"{row.name}.html"))
    if as_json:
        echo_json({"job": row.name, "id": row.id, "report": str(page)})
    else:
        echo(str(page))
    return 0
