"""What a script reports about its progress: steps that a session does not report, and declared long sections.

Standard library only: a loss is read by its own ``item``.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, SupportsFloat, SupportsIndex

from holdfast.host.process import started_at
from holdfast.runtime.agent_client import StepSize, link

_log = logging.getLogger("holdfast.runtime")

_sections_begun = 0
_open_sections: list[tuple[str, float | None]] = []
"""The sections that this process is in, the innermost last; the agent knows one at a time."""


def sections_begun() -> int:
    """Return how many sections this process has begun so far: step measurements exclude steps with a section in them."""
    return _sections_begun


@contextmanager
def section(name: str, limit: float | timedelta | None = None) -> Iterator[None]:
    """Declare a long section between two steps, such as a compile, a save or an evaluation: Holdfast waits for it longer than for a step.

    Use it as ``with holdfast.section("evaluation"):``. Sections may lie within each other. Outside of a job it does nothing.

    Args:
        name: Name of the section, for messages.
        limit: Maximum duration in seconds, or a ``timedelta``; None: the job's ``timeouts.section``. After that the rank counts as hung.

    Yields:
        Nothing.

    Raises:
        ValueError: ``limit`` is not above 0.
    """
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if seconds is not None and not seconds > 0:
        raise ValueError(f"section '{name}': the limit is {limit!r}, but must be a number of seconds above 0")
    global _sections_begun  # noqa: PLW0603 (one count for the process)
    _sections_begun += 1
    _open_sections.append((name, seconds))
    link().section(name, seconds, begin=True)
    try:
        yield
    finally:
        _open_sections.pop()
        if _open_sections:
            link().section(*_open_sections[-1], begin=True)
        else:
            link().section(name, seconds, begin=False)


class Scalar(Protocol):
    """A tensor of one element, of any library."""

    def item(self) -> float:
        """Return the element."""


class _Progress:
    """What this process has reported last."""

    def __init__(self) -> None:
        self.step = -1
        self.at: float | None = None
        """When the newest step was reported (monotonic)."""
        self.warned = False
        """Whether it was logged that the session reports steps already."""

    def advance(self, step: int) -> float:
        """Record *step*; return the seconds since the one before, or since this process started."""
        now = time.monotonic()
        seconds = now - self.at if self.at is not None else _age_of_this_process()
        self.step, self.at = step, now
        return max(0.0, seconds)


_progress = _Progress()


def heartbeat(
    step: SupportsIndex,
    loss: SupportsFloat | Scalar | None = None,
    *,
    until: SupportsIndex | None = None,
    samples: int | None = None,
    tokens: int | None = None,
) -> None:
    """Report that a step is done, for scripts and frameworks that save and restore their own state.

    It enables hang detection, step counts and goodput without a `session`; it saves and restores nothing. Call it on every rank, after
    every step or every few steps. Outside of a job, and for a step that was reported already, it does nothing.

    Args:
        step: Number of the step that is done, counted over the whole job.
        loss: Loss of the step: a number, or a tensor with one element. A tensor on a GPU is copied to the host, which waits for the step:
            pass a number that is on the host already, or nothing, where that is too slow.
        until: Step at which the job ends, for the remaining time in `holdfast status`.
        samples: Samples that all ranks together computed since the step that was reported before, for the throughput in samples per
            second.
        tokens: Tokens that all ranks together computed since then, for the throughput in tokens per second.

    Raises:
        TypeError: ``loss`` is neither a number nor a tensor with one element, or a size is not a whole number.
        ValueError: ``step``, ``until``, ``samples`` or ``tokens`` is negative.
    """
    number, end = operator.index(step), None if until is None else operator.index(until)
    if number < 0 or (end is not None and end < 0):
        raise ValueError(f"heartbeat(step={number}, until={end}): steps are counted from 0")
    size = StepSize.of("heartbeat", samples, tokens)
    agent = link()
    if not agent.attached:
        return
    if agent.has_session:
        if not _progress.warned:
            _progress.warned = True
            _log.warning("holdfast.heartbeat is not needed in this script: its session reports the steps")
        return
    if number == _progress.step:
        return
    agent.step = number
    agent.heartbeat(number, None if loss is None else _number(loss), _progress.advance(number), end, size)


def _number(loss: SupportsFloat | Scalar) -> float:
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"heartbeat(loss=...): the loss must be a number, or a tensor of one element: {error}") from error


def _age_of_this_process() -> float:
    """Return the seconds since this process started: its first step, startup included, took at most this long."""
    begun = started_at(os.getpid())
    return 0.0 if begun is None else time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")
