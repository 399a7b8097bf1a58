"""The two ways to carry out a decision: restart all processes, or continue in those that run. Both isolate, reschedule and start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.control.recovery import in_process, restart
from holdfast.control.recovery.incident_record import decided
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController, see_begun
from holdfast.detectors.evidence import RecoveryTimeout
from holdfast.policies.recovery.case import IN_PROCESS, Decision
from holdfast.policies.states import Event, Transition


class RecoveryPath(NamedTuple):
    """The functions of one way."""

    isolate: Callable[[JobController, IncidentInWork, Decision], Transition]
    reschedule: Callable[[JobController, Decision], Transition]
    start: Callable[[JobController, Decision, float], None]
    """Starts the ranks of the new generation; they have so many seconds for their first step."""


RESTART: Final = RecoveryPath(restart.isolate, restart.reschedule, restart.start)
IN_LIVING_PROCESSES: Final = RecoveryPath(in_process.isolate, in_process.reschedule, in_process.start)


def path_of(decision: Decision) -> RecoveryPath:
    """Return the way of the decision's action."""
    return IN_LIVING_PROCESSES if decision.action in IN_PROCESS else RESTART


def isolate(run: JobController) -> Transition:
    """Stop the ranks that the decision stops, and release the nodes that it drops."""
    incident, decision = decided(run)
    return path_of(decision).isolate(run, incident, decision)


def reschedule(run: JobController) -> Transition:
    """Agree on the next generation, by the decision."""
    _, decision = decided(run)
    return path_of(decision).reschedule(run, decision)


def resume(run: JobController) -> Transition:
    """Start the new generation, and wait for its first new step within the action's timeout."""
    incident, decision = decided(run)
    limit, begin = run.policy.timeouts.of(decision.action, run.generations.pace()), time.time()
    state = run.generations.state
    if not state.all_started():  # a controller that reattached in this state finds them started
        path_of(decision).start(run, decision, limit)
    turn = see_begun(run, seconds=begin + limit - time.time())
    if turn is None:
        reached = {view.rank: view.reached() for view in state.ranks.values()}
        now = time.time()
        state.overrun = RecoveryTimeout(at=now, action=decision.action, seconds=now - begin + 1e-6, limit=limit, reached=reached)
        incident.tried.append(decision.action)
        return Transition(Event.FAULTED, f"{decision.action} brought no step within {limit:.0f} s")
    if turn.event in (Event.STARTED, Event.FINISHED):
        run.close_incident("recovered")
    return turn
