"""Plots of the loss: over wall time, over steps, and around one incident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from holdfast.plurals import plural
from holdfast.report.case import IncidentCase
from holdfast.report.pages.charts.axes import LABEL_PIXELS, count_axis, incident_marks, loss_axis, since_submission, step_axis, time_axis
from holdfast.report.pages.charts.drawing import Drawing, DrawingBox, SvgTheme, drawing, svg
from holdfast.report.pages.charts.incident_layers import downtimes, mark, marks_in_time, startup_note
from holdfast.report.pages.charts.thinning import Floats, Places, smoothed, thin_pieces
from holdfast.report.pages.job_history import Flags, JobHistory, StepColumns

_CROWDED: Final = 3
"""With more points than this per pixel column, a line through their medians is drawn over them."""
_BAND_LABEL_PIXELS: Final = 30
_DOTS: Final = 60
"""With more steps than this, dots on the line would touch."""
_CLOSE: Final = 14
"""Steps shown before and after those that an incident lost."""


Piece = tuple[Floats, Floats]
"""A part of a line: ascending x, and y, which may have gaps."""


def over_time(job: JobHistory, box: DrawingBox, name: str) -> Markup:
    """Draw the loss over wall time; the step number if no loss is reported."""
    on, steps = drawing(box), job.steps
    height = steps.loss if steps.with_loss else steps.step.astype(np.float64)
    time_axis(on, job.wall_seconds, zero=job.job.at)
    _height_axis(on, steps, height)
    _generation_bands(on, [(one.number, max(0.0, one.at - job.job.at), end - job.job.at) for one, end in job.generation_ends])
    downtimes(on, job)
    startup_note(on, job)
    faults = np.array([case.incident.fault_at - job.job.at for case in job.cases])
    kept, lost = _in_time(job, height)
    _line(on, lost, faults, color=SvgTheme.AGAIN, linewidth=1.8, dashes=(2, 1.2))
    _curve(on, kept, faults)
    _gaps(on, steps, np.sort(steps.at[~np.isfinite(steps.loss)]) - job.job.at)
    incident_marks(on, marks_in_time(job))
    what = "Loss" if steps.with_loss else "Step number"
    on.axis_titles(since_submission(job.job.at, job.wall_seconds), what.lower())
    return svg(on, name=name, title=f"{what} over wall time", text=_text(job))


def over_steps(job: JobHistory, box: DrawingBox, name: str) -> Markup:
    """Draw the loss over steps: the newest value of each, and below it those that were lost."""
    on, steps, kept = drawing(box), job.steps, job.steps.kept
    first, last = (int(steps.step.min()), int(steps.step.max())) if len(steps) else (0, 1)
    step_axis(on, first, last)
    _height_axis(on, steps, steps.loss)
    _generation_bands(on, _step_spans(steps))
    faults = np.array([float(case.incident.step_before or 0) for case in job.cases])
    for low, high in _lost_spans(steps, (last - first) / box.columns):
        on.axes.axvspan(low - 0.5, high + 0.5, facecolor=SvgTheme.AGAIN_BAND, edgecolor="none", zorder=1)
    old = [_by_step(steps, steps.lost & (steps.generation == number)) for number in np.unique(steps.generation[steps.lost])]
    _line(on, old, faults, color=SvgTheme.AGAIN, linewidth=5, alpha=0.75)
    _curve(on, [(steps.step[kept].astype(np.float64), steps.loss[kept])], faults)
    _gaps(on, steps, steps.step[kept][~np.isfinite(steps.loss[kept])].astype(np.float64))
    incident_marks(on, [mark(job, case, case.incident.step_before) for case in job.cases if case.incident.step_before is not None])
    on.axis_titles("step", "loss")
    return svg(on, name=name, title="Loss over steps", text=_text(job))


def close_up(job: JobHistory, case: IncidentCase, box: DrawingBox, name: str) -> Markup | None:
    """Draw the loss before and after one incident; None if too few steps have a loss."""
    span = _affected(case)
    if span is None:
        return None
    steps, (low, high) = job.steps, span
    near = (steps.step >= low - _CLOSE) & (steps.step <= high + _CLOSE) & np.isfinite(steps.loss)
    old = near & (steps.generation <= case.incident.generation_before)
    new = near & (steps.generation == case.incident.generation_after)
    resumed = near & (steps.generation == case.incident.generation_before) & (steps.step == low)
    if np.count_nonzero(old) < 2 or not new.any():  # noqa: PLR2004 (a line has two ends)
        return None
    on, shown = drawing(box), steps.step[old | new]
    step_axis(on, float(shown.min()), float(shown.max()))
    loss_axis(on, float(steps.loss[old | new].min()), float(steps.loss[old | new].max()))
    on.axes.axvspan(low + 0.5, high + 0.5, facecolor=SvgTheme.AGAIN_BAND, edgecolor="none")
    before = [_by_step(steps, old & (steps.generation == number)) for number in np.unique(steps.generation[old])]
    _line(on, before, np.empty(0), color=SvgTheme.AGAIN, linewidth=5, alpha=0.75)
    dots = {"marker": "o", "markersize": 4} if np.count_nonzero(new) < _DOTS else {}
    _line(on, [_by_step(steps, new | resumed)], np.empty(0), color=SvgTheme.LOSS, linewidth=1.8, **dots)
    on.axes.axvline(high, color=SvgTheme.INCIDENT, linewidth=1, dashes=(3, 2))
    on.axis_titles("step", "loss")
    text = f"Thick: before the fault at step {high:,}. Thin: after resuming from step {low:,}."
    return svg(on, name=name, title=f"Loss around incident {case.incident.number}", text=text)


def _by_step(steps: StepColumns, chosen: Flags) -> Piece:
    positions = np.flatnonzero(chosen)
    positions = positions[np.argsort(steps.step[positions], kind="stable")]
    return steps.step[positions].astype(np.float64), steps.loss[positions]


def _in_time(job: JobHistory, height: Floats) -> tuple[list[Piece], list[Piece]]:
    """Return each generation's kept steps, and its lost ones, which start where the others stop."""
    steps, kept, lost = job.steps, [], []
    for number in np.unique(steps.generation):
        positions = np.flatnonzero(steps.generation == number)
        positions = positions[np.argsort(steps.at[positions], kind="stable")]
        x, y, is_lost = steps.at[positions] - job.job.at, height[positions], steps.lost[positions]
        kept.append((x[~is_lost], y[~is_lost]))
        drawn = is_lost | np.append(is_lost[1:], np.False_)
        lost.append((x[drawn], y[drawn]) if is_lost.any() else (x[:0], y[:0]))
    return kept, lost


def _affected(case: IncidentCase) -> tuple[int, int] | None:
    """Return the step from which the recovery resumed, and the newest one before the fault."""
    incident = case.incident
    if incident.step_before is None or incident.generation_after is None:
        return None
    resumed = incident.step_before if incident.resumed_step is None else min(incident.resumed_step, incident.step_before)
    return resumed, incident.step_before


def _height_axis(on: Drawing, steps: StepColumns, height: Floats) -> None:
    finite = height[np.isfinite(height)]
    if steps.with_loss:
        loss_axis(on, float(finite.min()), float(finite.max()))
    else:
        count_axis(on, float(finite.max()) if len(finite) else 1.0)


def _curve(on: Drawing, pieces: Sequence[Piece], faults: Floats) -> None:
    """Draw the kept steps; many of them as a pale line with its medians on top."""
    x, y = (np.concatenate(column) if column else np.empty(0) for column in ([x for x, _ in pieces], [y for _, y in pieces]))
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= _CROWDED * on.box.columns:
        _line(on, pieces, faults, color=SvgTheme.LOSS, linewidth=1.8, solid_capstyle="round")
    else:
        _line(on, pieces, faults, color=SvgTheme.LOSS, linewidth=0.8, alpha=0.4)
        on.axes.plot(*smoothed(x, y, on.box.columns // 4), color=SvgTheme.LOSS, linewidth=2, zorder=5)
    if len(finite):
        on.axes.plot(x[finite[-1]], y[finite[-1]], "o", color=SvgTheme.LOSS, markersize=6, clip_on=False, zorder=6)


def _line(on: Drawing, pieces: Sequence[Piece], faults: Floats, **style: Any) -> None:  # noqa: ANN401 (matplotlib's properties of a line)
    x, y = thin_pieces(pieces, on.box.columns, faults)
    if np.isfinite(y).any():
        on.axes.plot(x, y, zorder=3, **style)


def _gaps(on: Drawing, steps: StepColumns, x: Floats) -> None:
    """Mark at the bottom of the plot the steps without a finite loss, at most one mark per few pixels."""
    if not steps.with_loss or not len(x):
        return
    low, high = on.axes.get_xlim()
    columns = np.unique(np.round((x - low) / (high - low) * on.box.columns / 7))
    bottom = on.axes.get_xaxis_transform()
    on.axes.plot(
        low + columns * 7 / on.box.columns * (high - low), np.full(len(columns), 8 / on.box.rows), "x", color=SvgTheme.INCIDENT,
        markersize=6,        markeredgewidth=1.6, transform=bottom, zorder=6, gid=on.tip("no finite loss"),
    )  # fmt: skip


def _generation_bands(on: Drawing, spans: Sequence[tuple[int, float, float]]) -> None:
    """Shade every other generation, and number those that are wide enough."""
    low, high = on.axes.get_xlim()
    for number, start, end in spans:
        pixels = (end - start) / (high - low) * on.box.columns
        if number % 2 == 0 and pixels >= 1:
            on.axes.axvspan(start, end, facecolor=SvgTheme.SHADE, edgecolor="none", zorder=0)
        if pixels >= _BAND_LABEL_PIXELS and len(spans) > 1:
            transform = on.axes.get_xaxis_transform()
            on.axes.text(
                start, 1 + LABEL_PIXELS / on.box.rows, f" g{number}", transform=transform, color=SvgTheme.QUIET, fontsize=11, va="baseline"
            )


def _step_spans(steps: StepColumns) -> list[tuple[int, float, float]]:
    kept = steps.kept
    numbers = steps.generation[kept]
    found = [(int(number), steps.step[kept][numbers == number]) for number in np.unique(numbers)]
    return [(number, float(of.min()), float(of.max())) for number, of in found]


def _lost_spans(steps: StepColumns, pixel: float) -> list[tuple[int, int]]:
    """Return the ranges of lost steps, merged if they overlap or lie within a *pixel* of steps."""
    again = np.unique(steps.step[steps.lost])
    if not len(again):
        return []
    ends: Places = np.flatnonzero(np.diff(again) > max(1.0, pixel))
    starts = np.concatenate([[0], ends + 1])
    return [(int(again[low]), int(again[high])) for low, high in zip(starts, [*ends, len(again) - 1], strict=True)]


def _text(job: JobHistory) -> str:
    steps = job.steps
    text = f"{plural(len(steps), 'step')} reported in {plural(len(job.generations), 'generation')}"
    finite = steps.loss[steps.kept][np.isfinite(steps.loss[steps.kept])]
    if len(finite):
        text += f"; the loss went from {finite[0]:.4g} to {finite[-1]:.4g}"
    lost = "" if job.losses.steps_lost is None else f", {plural(job.losses.steps_lost, 'step')} lost"
    return f"{text}. {plural(len(job.cases), 'incident')}{lost}."
