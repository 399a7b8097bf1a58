"""Monitor a job until something needs an answer: a fault, its end, a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.control.supervisor.controller import TICK, JobController
from policies.states import Event, State, Transition

SLICE: Final = 300.0
"""Seconds between two rounds of memory management while nothing happens."""


def watch(run: JobController, *, seconds: float, until: Callable[[], bool] | None = None) -> Transition | None:
    """Handle events until the job faults, finishes, has to stop, or *until* is true; return None after *seconds*."""
    end = time.monotonic() + seconds
    while True:
        if (turn := poll(run)) is not None:
            return turn
        if until is not None and until():
            return Transition(Event.STARTED, f"all {len(run.generations.state.ranks)} rank(s) run")
        left = end - time.monotonic()
        if left <= 0:
            return None
        run.pump(min(TICK, left))


def see_begun(run: JobController, *, seconds: float) -> Transition | None:
    """Monitor the job until its first step; return None when that has not come within *seconds* of reachable agents."""
    turn = watch(run, seconds=max(0.0, seconds), until=run.generations.begun)
    while turn is None and run.faults.connectivity.is_partitioned():
        turn = watch(run, seconds=TICK, until=run.generations.begun)
    return turn


def poll(run: JobController) -> Transition | None:
    """Return the transition that is due, if any."""
    if end := run.drains.end:
        return Transition(Event.TIME_OVER, end)
    if done := _done(run):
        return Transition(Event.FINISHED, done)
    if (turn := ending(run)) is not None:  # before faults: what is to end is saved, and needs no recovery first
        return turn
    symptom = run.faults.symptom()
    if symptom:
        return Transition(Event.FAULTED, symptom)
    if run.state is State.RUNNING and (run.requests.migrations or run.scale_up.due):
        return Transition(Event.MOVE_ASKED, run.requests.migrations[0].describe() if run.requests.migrations else run.scale_up.describe())
    return None


def _done(run: JobController) -> str:
    """Return why the job is completed; empty when it is not."""
    if run.generations.state.ranks and run.generations.state.all_succeeded():
        return f"all {len(run.generations.state.ranks)} rank(s) exited with status 0"
    if why := run.faults.why_completed():
        run.log.record_event(why)
    return why


def ending(run: JobController) -> Transition | None:
    """Return the transition that ends or suspends the job, if a person requested that or its time is over."""
    if run.requests.stop_reason:
        return Transition(Event.STOP_ASKED, run.requests.stop_reason)
    if run.requests.suspend_reason:
        return Transition(Event.SUSPEND_ASKED, run.requests.suspend_reason)
    return Transition(Event.TIME_OVER, end) if (end := run.drains.end) else None
