"""The plot of steps per second over wall time, and the rates before and after each recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from holdfast.history.models import Incident
from holdfast.report import wording
from holdfast.report.case import IncidentCase
from holdfast.report.pages.axes import incident_marks, since_submission, time_axis
from holdfast.report.pages.drawing import DrawingBox, SvgTheme, drawing, svg
from holdfast.report.pages.incident_layers import downtimes, marks_in_time, startup_note
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.pages.thinning import Floats

_BIN_PIXELS: Final = 6
_STEPS_IN_BIN: Final = 2.0
"""A bin holds at least so many typical steps, so that single steps do not show as noise."""
_COMPARED: Final = 20
"""Steps on either side of a recovery whose median is its rate before and after."""
_MANY: Final = 1000
"""From so many steps per second on, three digits would need an exponent."""
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


def rate(number: float | None) -> str:
    """Return steps per second with three digits."""
    if number is None:
        return wording.NOTHING
    return f"{number:#.3g}".rstrip(".") if number < _MANY else f"{number:,.0f}"


def signed(change: float | None) -> str:
    """Return a relative change with its sign."""
    return wording.NOTHING if change is None else f"{change * 100:+.1f}%".replace("-", "−")  # noqa: RUF001 (a minus is no hyphen)


def _rates(job: JobHistory, columns: int, *, lost: bool) -> tuple[Floats, Floats]:
    """Return the edges of the bins in seconds since submission, and the steps per second in each, only *lost* steps or only kept ones."""
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
    done = np.concatenate(([0.0], np.cumsum(weights[chosen][order])))
    corners = np.stack([begin, end], axis=1).ravel()
    heights = np.stack([done[:-1], done[1:]], axis=1).ravel()
    if not len(corners):
        return edges, np.zeros(len(edges) - 1)
    heights_at = np.interp(edges, corners, heights, left=0.0, right=float(done[-1]))
    found: Floats = np.diff(heights_at) / np.diff(edges)
    return edges, found


def throughput(job: JobHistory, changes: Mapping[str, RateChange], box: DrawingBox, name: str) -> Markup:
    """Draw steps per second over wall time, kept and lost ones, with the *changes* of each recovery in its description."""
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
    on.axis_titles(since_submission(job.job.at, job.wall_seconds), "steps per second")
    return svg(on, name=name, title="Steps per second over wall time", text=_text(job, changes))


def _text(job: JobHistory, changes: Mapping[str, RateChange]) -> str:
    typical = rate(_rate(job.steps.per_step[~job.steps.lost]))
    text = f"In the median {typical} steps per second."
    known = [one for one in changes.values() if one.change is not None]
    if known:
        worst = min(known, key=lambda one: one.change or 0.0)
        text += f" Largest decrease after a recovery: {signed(worst.change)}, incident {worst.incident.number}."
    return text


def rows(job: JobHistory, changes: Mapping[str, RateChange], shown: int) -> Iterator[tuple[IncidentCase, RateChange]]:
    """Yield the newest recoveries with a rate on one side at least, oldest first."""
    known = [(case, changes[case.incident.id]) for case in job.cases if case.incident.id in changes]
    yield from [(case, one) for case, one in known if one.before is not None or one.after is not None][-shown:]
