"""What every plot over wall time shows of a job besides its curve: startup, downtimes, and numbered incidents."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from holdfast.report.case import IncidentCase
from holdfast.report.pages.charts.axes import AxisMark
from holdfast.report.pages.charts.drawing import Drawing, SvgTheme
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.text import wording

_LETTER_PIXELS: Final = 7


def downtimes(on: Drawing, job: JobHistory) -> None:
    """Shade the downtime of each incident; of those within one pixel only the first."""
    pixel, drawn = job.wall_seconds / on.box.columns, -math.inf
    for case in job.cases:
        start, lasted = case.incident.fault_at - job.job.at, job.downtime(case.incident)
        if lasted and start + lasted > drawn + pixel:
            tip = on.tip(f"incident {case.incident.number}: down for {wording.duration(lasted)}")
            on.axes.axvspan(start, start + lasted, facecolor=SvgTheme.DOWN_BAND, edgecolor="none", zorder=1, gid=tip)
            drawn = start + lasted


def startup_note(on: Drawing, job: JobHistory) -> None:
    """Write into the empty part before the first step what it is, if there is room."""
    first = float(job.steps.at.min() - job.steps.seconds[np.argmin(job.steps.at)] - job.job.at) if len(job.steps) else 0.0
    text = "startup"
    if first / job.wall_seconds * on.box.columns > (len(text) + 2) * _LETTER_PIXELS if job.wall_seconds else False:
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 11, "color": SvgTheme.QUIET}
        on.axes.text(first / 2, 0.5, text, transform=on.axes.get_xaxis_transform(), **style)


def marks_in_time(job: JobHistory) -> list[AxisMark]:
    """Return the mark of each incident on an axis of seconds since submission."""
    return [mark(job, case, case.incident.fault_at - job.job.at) for case in job.cases]


def mark(job: JobHistory, case: IncidentCase, x: float) -> AxisMark:
    """Return the mark of an incident at position *x*; it leads to the incident's card."""
    one = case.incident
    text = f"incident {one.number}: {one.kind} on {wording.on_target(one.target)}"
    return AxisMark(number=one.number, x=max(0.0, x), text=text, link=job.anchor(one))
