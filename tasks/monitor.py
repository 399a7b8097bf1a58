"""Monitor: wait for the next thing that the flow has to turn for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.control import garbage, runs
from holdfast.control.run import TICK, Run
from holdfast.errors import HandedOver
from policies.states import Event, State
from tasks.turn import Turn

SLICE: Final = 300.0
"""Seconds a monitor task lasts when nothing happens: months of training are thousands of task runs, not millions."""


@task(task_run_name="monitor {job}", cache_policy=NO_CACHE)
def monitor(job: str) -> Turn | None:
    """Watch the job until something has to be answered; None when a quiet slice is over, or the flow is to let go of the job."""
    run = runs.of(job)
    garbage.set_aside()
    with suppress(HandedOver):  # no trouble: what watched goes
        turn = watch(run, seconds=SLICE)
        if turn is None:
            garbage.look_at_all()
        return turn
    return None


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
    symptom = run.symptom()
    if symptom:
        return Turn(Event.FAULTED, symptom)
    if run.board.ranks and run.board.all_well():
        return Turn(Event.FINISHED, f"all {len(run.board.ranks)} rank(s) ended with status 0")
    if (turn := ending(run)) is not None:
        return turn
    if run.state is State.RUNNING and (run.requests.moves or run.growth.due):
        return Turn(Event.MOVE_ASKED, run.requests.moves[0].in_words() if run.requests.moves else run.growth.in_words())
    return None


def ending(run: Run) -> Turn | None:
    """Return the turn that ends the job, if a person asked for that or its time is over."""
    if run.stop_asked:
        return Turn(Event.STOP_ASKED, "a person asked the job to stop")
    return Turn(Event.TIME_OVER, end) if (end := run.departures.end) else None
