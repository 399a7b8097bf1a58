"""Isolate: stop every rank at once and take what is unhealthy out."""

from __future__ import annotations

import signal
import time
from typing import Final

from detectors.node import NODE_LEAVING
from holdfast.control.agents.pool import failures
from holdfast.control.checkpoints.final_checkpoint import save_what_lives
from holdfast.control.supervisor.controller import JobController
from policies.case import IN_PROCESS, RecoveryAction
from policies.states import Event
from tasks import takeover, titles
from tasks.turn import Transition, step

STOP_SECONDS: Final = 10.0
"""How long killed workers may take to be gone; one that hangs in the kernel for longer makes its node unfit."""

WIDTH_MAY_CHANGE: Final = (RecoveryAction.SHRINK, RecoveryAction.WAIT_FOR_CAPACITY)
"""Rungs after which there may be fewer ranks: what lies in memory is each rank's for one width, a checkpoint is read at any."""


@step("isolate", titles.isolate)
def isolate(run: JobController) -> Transition:
    """Stop all ranks in one go, fence lost nodes, and let go of those that the decision drops."""
    incident = run.incident
    assert incident is not None
    assert incident.decision is not None
    if incident.decision.action in IN_PROCESS:
        return takeover.isolate(run, incident)
    alive = set(run.fleet.alive())
    staying = [node for node in run.members if node in alive]
    answers = run.fleet.order(staying, "stop", generation=run.generation, signal=int(signal.SIGKILL), grace=0.0)
    incident.note_order(run.recorder)
    if failures(answers):
        return Transition(Event.FAULTED, "; ".join(str(error) for error in failures(answers).values()))
    stuck = wait_until_gone(run, set(staying))
    if stuck:
        incident.lost |= stuck
        return Transition(Event.FAULTED, f"workers on {', '.join(sorted(stuck))} cannot be ended")
    if incident.row.kind == NODE_LEAVING.id or incident.decision.action in WIDTH_MAY_CHANGE:
        save_what_lives(run)  # a node that is still there takes nothing along that could have been saved
    gone = [node for node in run.members if node in incident.lost and node not in incident.decision.drop]  # held less than others
    takeover.let_go(run, (*incident.decision.drop, *gone), lost=incident.lost, reason=incident.decision.reason)
    incident.lap("isolate", time.time())
    return Transition(Event.ISOLATED, f"all ranks of generation {run.generation} have stopped")


def wait_until_gone(run: JobController, nodes: set[str]) -> set[str]:
    """Wait until no worker is left on *nodes*; return those that still have one, or lost their agent meanwhile."""
    until = time.monotonic() + STOP_SECONDS
    while not run.board.all_ended(nodes) and time.monotonic() < until:
        run.pump(0.02)
        if not nodes.isdisjoint(run.fleet.gone()):
            break
    return nodes - run.board.gone
