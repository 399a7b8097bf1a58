"""Isolate: stop every rank at once and take what is sick out."""

from __future__ import annotations

import signal
import time
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.control import runs
from holdfast.control.fleet import failures
from holdfast.control.run import Run
from holdfast.history import models
from policies.states import Event
from tasks.turn import Turn

STOP_SECONDS: Final = 10.0
"""How long killed workers may take to be gone; one that hangs in the kernel for longer makes its node unfit."""


@task(task_run_name="isolate {job}", cache_policy=NO_CACHE)
def isolate(job: str) -> Turn:
    """Stop all ranks in one go, fence lost nodes, and let go of those that the decision drops."""
    run = runs.of(job)
    incident = run.incident
    assert incident is not None
    assert incident.decision is not None
    staying = [node for node in run.members if node in run.fleet.alive()]
    answers = run.fleet.order(staying, "stop", generation=run.generation, signal=int(signal.SIGKILL), grace=0.0)
    if incident.row.ordered_at is None:
        incident.row.ordered_at = time.time()
        run.recorder.amend(models.Incident, incident.row.id, ordered_at=incident.row.ordered_at)
    if failures(answers):
        return Turn(Event.FAULTED, "; ".join(str(error) for error in failures(answers).values()))
    stuck = wait_until_gone(run, set(staying))
    if stuck:
        incident.lost |= stuck
        return Turn(Event.FAULTED, f"workers on {', '.join(sorted(stuck))} cannot be ended")
    let_go(run, incident.decision.drop, lost=incident.lost, because=incident.decision.because)
    incident.lap("isolate", time.time())
    return Turn(Event.ISOLATED, f"all ranks of generation {run.generation} have stopped")


def wait_until_gone(run: Run, nodes: set[str]) -> set[str]:
    """Wait until no worker is left on *nodes*; return those that still have one, or lost their agent meanwhile."""
    until = time.monotonic() + STOP_SECONDS
    while not run.board.all_ended(nodes) and time.monotonic() < until:
        run.pump(0.02)
        if any(node in run.fleet.gone() for node in nodes):
            break
    return nodes - run.board.gone


def let_go(run: Run, nodes: tuple[str, ...], *, lost: set[str], because: str) -> None:
    """Let go of *nodes*: nothing of the job may run there any more."""
    run.fleet.each(nodes, run.fleet.drop)
    for node in nodes:
        run.stand(node, "lost" if node in lost else "excluded", because)
