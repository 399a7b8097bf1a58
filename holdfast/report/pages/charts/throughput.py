"""The plot of steps per second over wall time, and the rates before and after each recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from holdfast.history.models import Incident
from holdfast.report.case import IncidentCase
from holdfast.report.pages.charts.axes import incident_marks, since_submission, time_axis
from holdfast.report.pages.charts.drawing import DrawingBox, SvgTheme, drawing, svg
from holdfast.report.pages.charts.incident_layers import downtimes, marks_in_time, startup_note
from holdfast.report.pages.charts.thinning import Floats
from holdfast.report.pages.job_history import JobHistory, StepColumns
from holdfast.report.text import wording

_BIN_PIXELS: Final = 6
_STEPS_IN_BIN: Final = 2.0
"""A bin holds at least so many typical steps, so that single steps do not show as noise."""
_COMPARED: Final = 20
"""Steps on either side of a recovery whose median is its rate before and after."""
_MOST: Final = 0.5
"""Share of the steps that must have a size for it to be drawn: the first step after a recovery may have none."""
_LEAST: Final = 2
"""With fewer steps on one side there is no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChange:
    """Steps per second before the fault of an incident and after its recovery; None with too few steps."""

    incident: Incident
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """Return the relative change, -0.1 for 10% fewer steps per second."""
        return self.after / self.before - 1 if self.before and self.after else None


def rate_changes(job: JobHistory) -> dict[str, RateChange]:
    """Return the rates around each recovery, by incident id: medians of the last steps before it and of the steps after the first one."""
    per_step = job.steps.per_step
    found = {}
    for case in job.cases:
        incident = case.incident
        if incident.outcome == "recovered" and incident.generation_after is not None:
            ended = (job.steps.generation <= incident.generation_before) & (job.steps.at <= incident.fault_at)
            before = per_step[ended][-_COMPARED:]
            after = per_step[job.steps.generation == incident.generation_after][1 : _COMPARED + 1]
            found[incident.id] = RateChange(incident=incident, before=_rate(before), after=_rate(after))
    return found


def _rate(seconds: Floats) -> float | None:
    typical = float(np.median(seconds)) if len(seconds) >= _LEAST else 0.0
    return 1.0 / typical if typical > 0 else None


def unit(steps: StepColumns) -> str:
    """Return what the plot counts: ``tokens`` or ``samples`` where most steps were reported with them, else ``steps``."""
    for name in ("tokens", "samples"):
        if len(steps) and np.isfinite(getattr(steps, name)).mean() > _MOST:
            return name
    return "steps"


def _amounts(steps: StepColumns) -> Floats:
    """Return how many of `unit` each report stands for; a report without them is taken to have as many as is usual."""
    found: Floats = steps.weights if (name := unit(steps)) == "steps" else getattr(steps, name)
    return np.where(np.isfinite(found), found, np.nanmedian(found)) if len(found) else found


def signed(change: float | None) -> str:
    """Return a relative change with its sign."""
    return wording.NOTHING if change is None else f"{change * 100:+.1f}%".replace("-", "−")  # noqa: RUF001 (a minus is no hyphen)


def _rates(job: JobHistory, columns: int, *, lost: bool) -> tuple[Floats, Floats]:
    """Return the edges of the bins in seconds since submission, and `unit` per second in each, only *lost* steps or only kept ones."""
    steps = job.steps
    per_step, weights = steps.per_step, steps.weights
    total = max(job.wall_seconds, 1e-6)
    typical = float(np.median(per_step[per_step > 0])) if (per_step > 0).any() else 0.0
    width = max(total * _BIN_PIXELS / columns, _STEPS_IN_BIN * typical)
    edges = np.linspace(0.0, total, max(1, round(total / width)) + 1)
    chosen = steps.lost if lost else ~steps.lost
    order = np.argsort(steps.at[chosen], kind="stable")
    end = np.maximum.accumulate(steps.at[chosen][order] - job.job.at) if chosen.any() else np.empty(0)
    took = (per_step * weights)[chosen][order]
    begin = np.maximum(end - took, np.concatenate(([-np.inf], end[:-1]))) if len(end) else end
    done = np.concatenate(([0.0], np.cumsum(_amounts(steps)[chosen][order])))
    corners = np.stack([begin, end], axis=1).ravel()
    heights = np.stack([done[:-1], done[1:]], axis=1).ravel()
    if not len(corners):
        return edges, np.zeros(len(edges) - 1)
    heights_at = np.interp(edges, corners, heights, left=0.0, right=float(done[-1]))
    found: Floats = np.diff(heights_at) / np.diff(edges)
    return edges, found


def throughput(job: JobHistory, changes: Mapping[str, RateChange], box: DrawingBox, name: str) -> Markup:
    """Draw steps, samples or tokens per second over wall time, kept and lost ones; the description has the *changes* of recoveries."""
    on = drawing(box)
    time_axis(on, job.wall_seconds, zero=job.job.at)
    edges, kept = _rates(job, box.columns, lost=False)
    _, lost = _rates(job, box.columns, lost=True)
    on.axes.set_ylim(0, float((kept + lost).max()) * 1.12 or 1.0)
    on.axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    on.axes.grid(axis="y")
    downtimes(on, job)
    startup_note(on, job)
    on.axes.stairs(kept, edges, fill=True, color=SvgTheme.TRAINING, linewidth=0, zorder=3)
    if lost.any():
        on.axes.stairs(kept + lost, edges, baseline=kept, fill=True, color=SvgTheme.AGAIN, linewidth=0, zorder=3)
    incident_marks(on, marks_in_time(job))
    on.axis_titles(since_submission(job.job.at, job.wall_seconds), f"{unit(job.steps)} per second")
    return svg(on, name=name, title=f"{unit(job.steps).capitalize()} per second over wall time", text=_text(job, changes))


def _text(job: JobHistory, changes: Mapping[str, RateChange]) -> str:
    known = [one for one in changes.values() if one.change is not None]
    steps, counted = job.steps, unit(job.steps)
    per_second = _rate(steps.per_step[~steps.lost])
    text = f"In the median {wording.per_second(per_second)} steps per second."
    if counted != "steps" and per_second is not None:
        of_a_step = float(np.median((_amounts(steps) / steps.weights)[~steps.lost]))
        text += f" That is {wording.per_second(per_second * of_a_step)} {counted} per second."
    if known:
        worst = min(known, key=lambda one: one.change or 0.0)
        text += f" Largest decrease after a recovery: {signed(worst.change)}, incident {worst.incident.number}."
    return text


def rows(job: JobHistory, changes: Mapping[str, RateChange], shown: int) -> Iterator[tuple[IncidentCase, RateChange]]:
    """Yield the newest recoveries with a rate on one side at least, oldest first."""
    known = [(case, changes[case.incident.id]) for case in job.cases if case.incident.id in changes]
    yield from [(case, one) for case, one in known if one.before is not None or one.after is not None][-shown:]
