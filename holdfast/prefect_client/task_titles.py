"""What the steps of the state machine are called once they are over: who, where, how long. Read in Prefect's graph, so they are short."""

from __future__ import annotations

import re
from typing import Final

from detectors.catalogue import Fault
from holdfast.control.supervisor.controller import JobController
from holdfast.report.wording import duration, listing, plural, ranks
from policies.case import Decision, RecoveryAction
from policies.states import Event, Transition

ACTIONS: Final = {
    RecoveryAction.RETRY_STEP: "retry the step",
    RecoveryAction.TAKE_OVER: "replace ranks",
    RecoveryAction.NARROW: "continue with fewer ranks",
    RecoveryAction.RESTART_IN_PLACE: "restart the workers",
    RecoveryAction.GO_BACK: "restart from an older checkpoint",
    RecoveryAction.REPLACE_NODE: "replace the node",
    RecoveryAction.SHRINK: "restart on fewer nodes",
    RecoveryAction.ASK_A_PERSON: "ask for approval",
    RecoveryAction.WAIT_FOR_CAPACITY: "wait for nodes",
    RecoveryAction.GIVE_UP: "fail the job",
}
"""Recovery actions, as titles and log lines name them."""
MOST_NODES: Final = 4
_SIGNAL: Final = re.compile(r"worker-(sig[a-z0-9]+)")


def of_fault(fault: Fault) -> str:
    """Name a fault by its target and its kind: ``rank 1 on node-1, SIGKILL``."""
    found = _SIGNAL.fullmatch(fault.kind)
    return f"{fault.subject.removeprefix('node ')}, {found[1].upper() if found else fault.kind}"


def of_action(decision: Decision) -> str:
    """Name what a decision does, and to whom."""
    action = ACTIONS[decision.action]
    if decision.action is RecoveryAction.TAKE_OVER:
        lost = ranks(seat.rank for seat in decision.seats)
        return f"replace {'rank' if len(decision.seats) == 1 else 'ranks'} {lost}"
    if decision.drop and decision.action is RecoveryAction.REPLACE_NODE:
        return f"replace {listing(decision.drop, MOST_NODES)}" + (f" by {listing(decision.add, MOST_NODES)}" if decision.add else "")
    return action


def launch(run: JobController, turn: Transition, seconds: float) -> str:
    """Say what was started, and where."""
    if turn.event is not Event.STARTED:
        return f"launch: {_outcome(run, turn)}"
    return (
        f"launch: {plural(len(run.generations.state.ranks), 'rank')} on {listing(run.generations.members, MOST_NODES)}, {duration(seconds)}"
    )


def monitor(run: JobController, turn: Transition, seconds: float) -> str:
    """Say how far the job came."""
    step = f", step {run.generations.best:,}" if run.generations.managed else ""
    seen = "fault seen" if turn.event is Event.FAULTED else _outcome(run, turn)
    return f"monitor: {duration(seconds)}{step}, {seen}"


def detect(run: JobController, turn: Transition, seconds: float) -> str:  # noqa: ARG001 (the title of a diagnosis says what, not how long)
    """Name the root cause."""
    if turn.event is Event.DISMISSED or run.incidents.current is None or run.incidents.current.diagnosis is None:
        return "detect: nothing to act on"
    return f"detect: {of_fault(run.incidents.current.diagnosis.root)}"


def decide(run: JobController, turn: Transition, seconds: float) -> str:  # noqa: ARG001 (a decision takes no time)
    """Name the recovery action."""
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    return f"decide: {of_action(decision) if decision is not None else _outcome(run, turn)}"


def isolate(run: JobController, turn: Transition, seconds: float) -> str:
    """Say who was stopped, and which nodes were taken out."""
    decision = _decision(run)
    if turn.event is not Event.ISOLATED or decision is None:
        return f"isolate: {_outcome(run, turn)}"
    out = sorted({seat.rank for seat in decision.seats} | set(decision.vacate))
    stopped = f"{'rank' if len(out) == 1 else 'ranks'} {ranks(out)} stopped" if out else "all ranks stopped"
    nodes = f", {listing(decision.drop, MOST_NODES)} taken out" if decision.drop else ""
    return f"isolate: {stopped}{nodes}, {duration(seconds)}"


def reschedule(run: JobController, turn: Transition, seconds: float) -> str:  # noqa: ARG001 (agreeing on a membership takes milliseconds)
    """Say where the ranks go."""
    decision = _decision(run)
    if turn.event is not Event.PLACED or decision is None:
        return f"reschedule: {_outcome(run, turn)}"
    if decision.seats:
        where = listing(
            (f"rank {seat.rank} to {_host(seat.node, standby=seat.standby is not None)}" for seat in decision.seats), MOST_NODES
        )
        return f"reschedule: {where}"
    return f"reschedule: {plural(len(run.generations.state.ranks), 'rank')} on {listing(run.generations.members, MOST_NODES)}"


def resume(run: JobController, turn: Transition, seconds: float) -> str:
    """Say how the job got back to work, and how long it was down."""
    if turn.event not in {Event.STARTED, Event.FINISHED} or run.incidents.last is None:
        return f"resume: {_outcome(run, turn)}"
    down = duration(run.incidents.last.downtime_s if run.incidents.last.downtime_s is not None else seconds)
    decision = run.incidents.last_decision
    if decision is not None and decision.action is RecoveryAction.TAKE_OVER and decision.seats:
        seat, more = decision.seats[0], len(decision.seats) - 1
        others = f" and {plural(more, 'more')}" if more else ""
        return f"resume: rank {seat.rank}{others} replaced by {_host(seat.node, standby=seat.standby is not None)}, {down}"
    lost = run.incidents.last.steps_lost
    again = "all processes started again" if run.incidents.last.until_started else "training again"
    return f"resume: {again}, {down}" + ("" if lost is None else f", {plural(lost, 'step')} lost")


def wait(run: JobController, turn: Transition, seconds: float) -> str:
    """Say what was waited for."""
    decision = _decision(run)
    what = "approval" if decision is not None and decision.action is RecoveryAction.ASK_A_PERSON else "nodes"
    return f"wait for {what}: {duration(seconds)}, {_outcome(run, turn)}"


def migrate(run: JobController, turn: Transition, seconds: float) -> str:
    """Say what came of a planned move."""
    return f"migrate: {_outcome(run, turn)}, {duration(seconds)}"


def _decision(run: JobController) -> Decision | None:
    return run.incidents.current.decision if run.incidents.current is not None else None


def _host(node: str, *, standby: bool) -> str:
    return f"{'hot spare' if standby else 'new process'} on {node}"


def _outcome(run: JobController, turn: Transition) -> str:
    """Say how a step ended that did not do what it is named for."""
    if turn.event is Event.FAULTED:
        found = run.faults.acting()
        return of_fault(found[0]) if found else "a fault was seen"
    return _OUTCOMES.get(turn.event, turn.event)


_OUTCOMES: Final = {
    Event.STARTED: "all ranks at work",
    Event.FINISHED: "all ranks completed",
    Event.STOP_ASKED: "stop requested",
    Event.SUSPEND_ASKED: "suspend requested",
    Event.TIME_OVER: "time limit reached",
    Event.MOVE_ASKED: "migration requested",
    Event.MOVED: "done",
    Event.MOVE_FAILED: "not done",
    Event.SHORT: "too few nodes",
    Event.GAINED: "nodes found",
    Event.ANSWERED: "answered",
    Event.GAVE_UP: "job failed",
}
