"""Wait in the middle of a recovery: for nodes, or for a person's word on those that are there."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from detectors.node import NODE_APART
from holdfast.control.faults import reachability
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.recovery.incident_record import decided
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.watch import ending
from holdfast.errors import WorldError
from holdfast.history import approvals
from holdfast.history.approvals import ISOLATE
from holdfast.history.models import ApprovalRequest
from policies.case import RecoveryAction
from policies.node_faults import NodeFault, isolating_fault
from policies.placement import members_after
from policies.states import Event, Transition

KNOCK: Final = 1.0
"""Seconds between two looks for nodes that are back."""


def wait_for_approval(run: JobController) -> Transition:
    """Ask a person whether nodes may be isolated, until one answers or what was asked has changed; what trains goes on training."""
    incident, decision = decided(run)
    missing, spares = run.faults.missing_members().keys(), set(run.nodes.spares())
    run.nodes.approvals.ask(LEAST, [_against(run, incident, node) for node in decision.drop], decision.reason, otherwise=ISOLATE)
    while True:
        for answer in run.nodes.approvals.answers(LEAST):
            if answer.nodes.keys() == set(decision.drop):  # else of a question that was given up just when it was answered
                return _answered(run, incident, answer)
        if run.generations.state.ranks and run.generations.state.all_succeeded():
            return Transition(Event.FINISHED, f"all {len(run.generations.state.ranks)} rank(s) ended with status 0")
        if (turn := ending(run)) is not None:
            return turn
        if lost := run.faults.missing_members().keys() - missing:
            return Transition(Event.FAULTED, f"{', '.join(sorted(lost))} is gone while a person is asked")
        if came := set(run.nodes.spares()) - spares:
            return Transition(Event.ANSWERED, f"nobody need be asked any more: {', '.join(sorted(came))} is there")
        knock(run, missing=len(decision.drop))


def _against(run: JobController, incident: IncidentInWork, node: str) -> NodeFault:
    """Return what speaks against *node*."""
    found = isolating_fault([fault for fault in incident.faults if fault.node == node], run.recommended_actions)
    assert incident.decision is not None
    reason = incident.decision.reason
    return found or NodeFault(node=node, severe=True, reason=reason, evidence=(reason,), seen=incident.row.detected_at)


def _answered(run: JobController, incident: IncidentInWork, answer: ApprovalRequest) -> Transition:
    """Take a person's word, or that there was none: what was said not to be isolated stays, and is what it was before."""
    incident.approved |= set(answer.picked)
    if answer.by:
        run.nodes.eligibility.approve(answer.picked, answer.by)
        run.nodes.eligibility.keep(
            {node: told for node, told in answer.nodes.items() if node not in answer.picked}, answer.answered_at or time.time()
        )
    incident.lap("wait", time.time())
    return Transition(Event.ANSWERED, f"question {answer.number}: {approvals.describe(answer)}")


def wait_for_capacity(run: JobController) -> Transition:
    """Wait until the nodes that the decision needs are there: lost ones that came back, or any free one."""
    incident, decision = decided(run)
    held = run.generations.nodes_needed(frozenset(run.incidents.current.lost if run.incidents.current is not None else ()))
    limit = run.policy.deadlines.wait_for_capacity
    while True:
        have = members_after(held, decision)
        ours = [node for node in held if node not in decision.drop]  # a person's hold takes nothing from a job
        alive = run.nodes.preflight.by_preference(
            node for node in run.agents.alive() if node in ours or not run.nodes.eligibility.why_ineligible(node)
        )
        for words in run.nodes.eligibility.news(run.agents.source.names()):
            run.log.record_event(words)
        ready = [node for node in have if node in alive]
        found = [node for node in alive if node not in have]
        more = found[: max(0, run.generations.width - len(ready))]
        if len(ready) + len(found) >= decision.need and can_meet(run, incident, [*ready, *more]):
            gone = tuple(node for node in held if node not in ready)
            incident.decision = replace(decision, drop=gone, add=tuple(n for n in ready if n not in held) + tuple(more))
            incident.lap("wait", time.time())
            return Transition(Event.GAINED, f"{', '.join(found) or 'enough nodes'} came back")
        if (turn := ending(run)) is not None:
            return turn
        if time.time() - incident.action_at > limit:
            incident.tried.append(RecoveryAction.WAIT_FOR_CAPACITY)
            incident.lap("wait", time.time())
            return Transition(Event.FAULTED, "; ".join([f"no capacity came within {limit:.0f} s", *run.nodes.eligibility.left_out()]))
        look_after(run, incident)
        knock(run, missing=decision.need - len(ready))


def can_meet(run: JobController, incident: IncidentInWork, nodes: list[str]) -> bool:
    """Tell whether *nodes* all reach each other; asked only after two that did not have brought the job to a halt."""
    if NODE_APART.id not in {incident.row.kind, *(fault.kind for fault in incident.faults)}:
        return True
    cut_off, pairs = reachability.check_connections(run.agents.source, incident.faults, nodes)
    return not (cut_off or pairs)


def look_after(run: JobController, incident: IncidentInWork) -> None:
    """See what became of nodes that the job holds and whose agents ended while it waits: one that answers gets another, else it is lost."""
    gone = {node: why for node, why in run.faults.missing_members().items() if node in run.agents.clients}
    for node, answer in run.agents.each(gone, run.agents.recheck).items():
        if answer is not None:
            run.generations.sent_to.pop(node, None)  # a new agent knows of no generation
        if answer is False or isinstance(answer, WorldError):
            incident.lost.add(node)
            run.log.record_node_status(node, "lost", f"its agent is gone: {gone[node]}")
            run.log.record_event(f"{node} is gone while the job waits: {gone[node]}")


def knock(run: JobController, *, missing: int) -> None:
    """Try to bring up free nodes that jobs may be given, then go on listening for a second."""
    alive = set(run.agents.alive())
    free = run.nodes.preflight.by_preference(node for node in run.nodes.free() if node not in alive)[:missing]
    run.nodes.preflight.begin(free)
    for node, answer in run.agents.each(free, run.agents.bring_up).items():
        if not isinstance(answer, WorldError):
            assert run.incidents.current is not None
            run.incidents.current.lost.discard(node)
            run.log.record_node_status(node, "healthy", "it answers, and its agent is up")
    if free:
        run.nodes.preflight.finish()
    until = time.monotonic() + KNOCK
    while time.monotonic() < until and not run.is_to_end:
        run.pump()
