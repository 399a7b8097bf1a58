"""A job under a controller in the test's own process: its launch, and the way to its end."""

from __future__ import annotations

import time
from typing import Final

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.launch import begin
from holdfast.policies.states import Event, Transition
from tests.waiting import wait_until

SECONDS: Final = 100.0
COUNTS: Final = "import os, pathlib; pathlib.Path(f\"rank-{os.environ['RANK']}\").write_text(os.environ['LOCAL_WORLD_SIZE'])"
"""A script whose ranks write down how many of them are on their node."""


def launched(run: JobController) -> Transition:
    """Launch the job; return what follows."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if (turn := begin(run)) is not None:
            return turn
    raise AssertionError(f"the launch does not end: {run.nodes.allocations.describe()}")


def ends(run: JobController, turn: Transition) -> None:
    """Go through the rest of the job's life."""
    if turn.event is Event.STARTED:
        run.move(turn.event, turn.reason)
        wait_until(lambda: _all_ended(run), seconds=SECONDS)
        turn = Transition(Event.FINISHED, "all ended well")
    run.move(turn.event, turn.reason)


def _all_ended(run: JobController) -> bool:
    """Handle what the agents report; return whether all ranks have succeeded."""
    run.pump()
    return run.generations.state.all_succeeded()
