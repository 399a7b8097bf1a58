"""Short texts about a job's tasks in the Prefect UI: the name of a finished task run, and the log line of an incident."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from prefect.logging import get_run_logger

from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from holdfast.detectors.catalogue import Fault
from holdfast.plurals import plural
from holdfast.policies.recovery.case import Decision, RecoveryAction
from holdfast.policies.states import Event, Transition
from holdfast.prefect.links import incident_key, ui_link
from holdfast.report.text.wording import duration, listing, ranks

ACTIONS: Final = {
    RecoveryAction.RETRY_STEP: "retry the step",
    RecoveryAction.REPLACE_RANKS: "replace ranks",
    RecoveryAction.SHRINK_LIVE: "continue with fewer ranks",
    RecoveryAction.RESTART_WORKERS: "restart the workers",
    RecoveryAction.ROLLBACK: "restart from an older checkpoint",
    RecoveryAction.REPLACE_NODE: "replace the node",
    RecoveryAction.SHRINK_RESTART: "restart on fewer nodes",
    RecoveryAction.REQUEST_APPROVAL: "ask for approval",
    RecoveryAction.WAIT_FOR_CAPACITY: "wait for nodes",
    RecoveryAction.FAIL: "fail the job",
}
"""Recovery actions as titles and log lines name them."""
MOST_NODES: Final = 4
_SIGNAL: Final = re.compile(r"worker-(sig[a-z0-9]+)")


def fault_title(fault: Fault) -> str:
    """Name a fault by its target and its kind: ``rank 1 on node-1, SIGKILL``."""
    found = _SIGNAL.fullmatch(fault.kind)
    return f"{fault.target.removeprefix('node ')}, {found[1].upper() if found else fault.kind}"


def action_title(decision: Decision) -> str:
    """Name what a decision does, and to which ranks or nodes."""
    action = ACTIONS[decision.action]
    if decision.action is RecoveryAction.REPLACE_RANKS:
        lost = ranks(seat.rank for seat in decision.seats)
        return f"replace {'rank' if len(decision.seats) == 1 else 'ranks'} {lost}"
    if decision.drop and decision.action is RecoveryAction.REPLACE_NODE:
        return f"replace {listing(decision.drop, MOST_NODES)}" + (f" by {listing(decision.add, MOST_NODES)}" if decision.add else "")
    return action


def launch(run: JobController, transition: Transition, seconds: float) -> str:
    """Name what was started, and where."""
    if transition.event is not Event.STARTED:
        return f"launch: {_outcome(run, transition)}"
    return (
        f"launch: {plural(len(run.generations.state.ranks), 'rank')} on {listing(run.generations.members, MOST_NODES)}, {duration(seconds)}"
    )


def monitor(run: JobController, transition: Transition, seconds: float) -> str:
    """Name the time, the newest step and why monitoring ended."""
    step = f", step {run.generations.best:,}" if run.generations.managed else ""
    seen = "fault seen" if transition.event is Event.FAULTED else _outcome(run, transition)
    return f"monitor: {duration(seconds)}{step}, {seen}"


def detect(run: JobController, transition: Transition, seconds: float) -> str:  # noqa: ARG001 (the title has no duration)
    """Name the root cause."""
    if transition.event is Event.DISMISSED or run.incidents.current is None or run.incidents.current.diagnosis is None:
        return "detect: nothing to act on"
    return f"detect: {fault_title(run.incidents.current.diagnosis.root)}"


def decide(run: JobController, transition: Transition, seconds: float) -> str:  # noqa: ARG001 (the title has no duration)
    """Name the recovery action."""
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    return f"decide: {action_title(decision) if decision is not None else _outcome(run, transition)}"


def isolate(run: JobController, transition: Transition, seconds: float) -> str:
    """Name the stopped ranks and the nodes that were taken out."""
    decision = _decision(run)
    if transition.event is not Event.ISOLATED or decision is None:
        return f"isolate: {_outcome(run, transition)}"
    out = sorted({seat.rank for seat in decision.seats} | set(decision.vacate))
    stopped = f"{'rank' if len(out) == 1 else 'ranks'} {ranks(out)} stopped" if out else "all ranks stopped"
    nodes = f", {listing(decision.drop, MOST_NODES)} taken out" if decision.drop else ""
    return f"isolate: {stopped}{nodes}, {duration(seconds)}"


def reschedule(run: JobController, transition: Transition, seconds: float) -> str:  # noqa: ARG001 (the title has no duration)
    """Name the new nodes of the ranks."""
    decision = _decision(run)
    if transition.event is not Event.PLACED or decision is None:
        return f"reschedule: {_outcome(run, transition)}"
    if decision.seats:
        where = listing(
            (f"rank {seat.rank} to {_host(seat.node, hot_spare=seat.hot_spare is not None)}" for seat in decision.seats), MOST_NODES
        )
        return f"reschedule: {where}"
    return f"reschedule: {plural(len(run.generations.state.ranks), 'rank')} on {listing(run.generations.members, MOST_NODES)}"


def resume(run: JobController, transition: Transition, seconds: float) -> str:
    """Name how training resumed, and the downtime."""
    if transition.event not in {Event.STARTED, Event.FINISHED} or run.incidents.last is None:
        return f"resume: {_outcome(run, transition)}"
    down = duration(run.incidents.last.downtime_s if run.incidents.last.downtime_s is not None else seconds)
    decision = run.incidents.last_decision
    if decision is not None and decision.action is RecoveryAction.REPLACE_RANKS and decision.seats:
        seat, more = decision.seats[0], len(decision.seats) - 1
        others = f" and {plural(more, 'more')}" if more else ""
        return f"resume: rank {seat.rank}{others} replaced by {_host(seat.node, hot_spare=seat.hot_spare is not None)}, {down}"
    lost = run.incidents.last.steps_lost
    again = "all processes started again" if run.incidents.last.until_started else "training again"
    return f"resume: {again}, {down}" + ("" if lost is None else f", {plural(lost, 'step')} lost")


def wait(run: JobController, transition: Transition, seconds: float) -> str:
    """Name what the job waited for."""
    decision = _decision(run)
    what = "approval" if decision is not None and decision.action is RecoveryAction.REQUEST_APPROVAL else "nodes"
    return f"wait for {what}: {duration(seconds)}, {_outcome(run, transition)}"


def migrate(run: JobController, transition: Transition, seconds: float) -> str:
    """Name the outcome of a migration."""
    return f"migrate: {_outcome(run, transition)}, {duration(seconds)}"


def _decision(run: JobController) -> Decision | None:
    return run.incidents.current.decision if run.incidents.current is not None else None


def _host(node: str, *, hot_spare: bool) -> str:
    return f"{'hot spare' if hot_spare else 'new process'} on {node}"


def _outcome(run: JobController, transition: Transition) -> str:
    """Name the outcome of a task that did not do what it is named for."""
    if transition.event is Event.FAULTED:
        found = run.faults.acting()
        return fault_title(found[0]) if found else "a fault was seen"
    return _OUTCOMES.get(transition.event, transition.event)


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
    Event.FAILED: "job failed",
}


Publish = Callable[[str, dict[str, Any]], None]


class FlowLog:
    """Writes incidents to the log of the flow run at WARNING, and forwards all events of the controller."""

    def __init__(self, job: str, forward: Publish) -> None:
        self._job, self._forward = job, forward
        self._log = get_run_logger()

    def publish(self, event: str, facts: dict[str, Any]) -> None:
        """Log a decision about an incident, or its end; forward every event."""
        incident: IncidentInWork | None = facts.get("incident")
        if event == "decided" and incident is not None:
            self._decided(incident)
        if event == "incident" and incident is not None:
            self._over(incident)
        self._forward(event, facts)

    def _decided(self, incident: IncidentInWork) -> None:
        decision, diagnosis = incident.decision, incident.diagnosis
        if decision is None or diagnosis is None:
            return
        root, more = diagnosis.root, len(incident.faults) - 1
        others = f" and {plural(more, 'further fault')}" if more > 0 else ""
        what = f"{fault_title(root)}{others}. Decision: {action_title(decision)}, because {decision.reason}"
        self._log.warning("Incident %d: %s", incident.row.number, what)

    def _over(self, incident: IncidentInWork) -> None:
        row = incident.row
        ends = {"recovered": "training again", "passed": "it passed by itself", "failed": "the job failed", "stopped": "the job was ended"}
        words = ends.get(row.outcome or "", row.outcome or "closed")
        if row.outcome == "recovered":
            lost = "" if row.steps_lost is None else f", {plural(row.steps_lost, 'step')} lost"
            again = "all processes started again" if row.until_started else words
            words = f"{again} after {duration(row.downtime_s)}{lost}"
        link = ui_link("artifact", incident_key(self._job, row.number))
        self._log.warning("Incident %d closed: %s%s", row.number, words, f". Details: {link}" if link else "")
