"""Monitor: wait for the next thing that the flow has to turn for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.control.config import gc_tuning
from holdfast.control.supervisor.controller import TICK, Run
from policies.states import Event, State
from tasks import titles
from tasks.turn import Turn, step

SLICE: Final = 300.0
"""Seconds between two rounds of memory management while nothing happens."""


@step("monitor", titles.monitor)
def monitor(run: Run) -> Turn:
    """Watch the job until something has to be answered: one task, however long that takes."""
    gc_tuning.set_aside()
    while (turn := watch(run, seconds=SLICE)) is None:
        gc_tuning.look_at_all()
    return turn


def watch(run: Run, *, seconds: float, until: Callable[[], bool] | None = None) -> Turn | None:
    """Take in what happens until the job faults, finishes, is asked to stop, or *until* is true; None after *seconds*."""
    end = time.monotonic() + seconds
    while True:
        turn = look(run)
        if turn is not None:
            return turn
        if until is not None and until():
            return Turn(Event.STARTED, f"all {len(run.board.ranks)} rank(s) are at work")
        left = end - time.monotonic()
        if left <= 0:
            return None
        run.pump(min(TICK, left))


def see_begun(run: Run, *, seconds: float) -> Turn | None:
    """See the job to its first step; None when that has not come within *seconds*, and not only because nobody could be heard."""
    turn = watch(run, seconds=max(0.0, seconds), until=run.begun)
    while turn is None and run.ears.deaf():
        turn = watch(run, seconds=TICK, until=run.begun)
    return turn


def look(run: Run) -> Turn | None:
    """Return what the flow has to turn for now, if anything."""
    if end := run.departures.end:
        return Turn(Event.TIME_OVER, end)
    if done := _done(run):
        return Turn(Event.FINISHED, done)
    if (turn := ending(run)) is not None:  # before faults: what is to end is saved, and needs no recovery first
        return turn
    symptom = run.symptom()
    if symptom:
        return Turn(Event.FAULTED, symptom)
    if run.state is State.RUNNING and (run.requests.moves or run.growth.due):
        return Turn(Event.MOVE_ASKED, run.requests.moves[0].in_words() if run.requests.moves else run.growth.in_words())
    return None


def _done(run: Run) -> str:
    """Return why the job is completed; empty when it is not."""
    if run.board.ranks and run.board.all_well():
        return f"all {len(run.board.ranks)} rank(s) ended with status 0"
    if why := run.over_but_for():
        run.remark(why)
    return why


def ending(run: Run) -> Turn | None:
    """Return the turn that ends or suspends the job, if a person asked for that or its time is over."""
    if run.requests.stop_reason:
        return Turn(Event.STOP_ASKED, run.requests.stop_reason)
    if run.requests.suspend_reason:
        return Turn(Event.SUSPEND_ASKED, run.requests.suspend_reason)
    return Turn(Event.TIME_OVER, end) if (end := run.departures.end) else None
