"""Report steps of a script or framework that keeps its own state: no session, nothing saved, nothing restored.

Standard library only: a loss is read by its own ``item``.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from typing import Protocol, SupportsFloat, SupportsIndex

from holdfast.process import started_at
from holdfast.runtime.agent_client import link

_log = logging.getLogger("holdfast.runtime")


class _Scalar(Protocol):
    """A tensor of one element, of whatever library."""

    def item(self) -> float: ...


class _ReportedProgress:
    """What this process has reported last."""

    def __init__(self) -> None:
        self.step = -1
        self.at: float | None = None
        """When the newest step was reported (monotonic)."""
        self.told = False
        """Whether it was said that the session reports steps already."""

    def advance(self, step: int) -> float:
        """Note *step*; return the seconds since the one before, or since this process began."""
        now = time.monotonic()
        seconds = now - self.at if self.at is not None else _age_of_this_process()
        self.step, self.at = step, now
        return max(0.0, seconds)


_progress = _ReportedProgress()


def heartbeat(step: SupportsIndex, loss: SupportsFloat | _Scalar | None = None, *, until: SupportsIndex | None = None) -> None:
    """Report that *step* (counted over the whole job) is done, with its *loss*; outside of Holdfast do nothing.

    For frameworks that save and restore their own state: nothing is saved, restored or waited for here. Call it on every rank; once in
    several steps will do. A number that was reported already is ignored. *until* is the step that the job ends at.

    A *loss* on a GPU is waited for, as ``loss.item()`` does: pass none, or one that is a number already, where that is too slow.
    """
    number, end = operator.index(step), None if until is None else operator.index(until)
    if number < 0 or (end is not None and end < 0):
        raise ValueError(f"heartbeat(step={number}, until={end}): steps are counted from 0")
    ours = link()
    if not ours.attached:
        return
    if ours.has_session:
        if not _progress.told:
            _progress.told = True
            _log.warning("holdfast.heartbeat is not needed in this script: its session reports the steps")
        return
    if number == _progress.step:
        return
    ours.step = number
    ours.heartbeat(number, None if loss is None else _number(loss), _progress.advance(number), end)


def _number(loss: SupportsFloat | _Scalar) -> float:
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"heartbeat(loss=...): the loss must be a number, or a tensor of one element: {error}") from error


def _age_of_this_process() -> float:
    """Return the seconds since this process began: how long its first step took at most, the start included."""
    begun = started_at(os.getpid())
    return 0.0 if begun is None else time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")
