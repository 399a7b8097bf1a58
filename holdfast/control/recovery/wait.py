"""Wait in the middle of a recovery: for nodes, or for a person's approval."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from holdfast.control.faults.network import check_connections
from holdfast.control.nodes.approvals import LEAST
from holdfast.control.recovery.incident_record import decided
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController, ending
from holdfast.detectors.nodes.node import NODE_APART
from holdfast.errors import LeaseLost, LeaseUnconfirmed, WorldError
from holdfast.history import approvals
from holdfast.history.approvals import ISOLATE
from holdfast.history.models import ApprovalRequest
from holdfast.plurals import all_of
from holdfast.policies.nodes.node_faults import NodeFault, isolating_fault
from holdfast.policies.nodes.placement import members_after
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event, Transition

INTERVAL: Final = 1.0
"""Seconds between two surveys for nodes that are back."""


def wait_for_approval(run: JobController) -> Transition:
    """Request a person's approval to isolate nodes, and wait for the answer or until the request has changed; training continues."""
    incident, decision = decided(run)
    state = run.generations.state
    missing, spares = run.faults.missing_members().keys(), set(run.nodes.spares())
    run.nodes.approvals.ask(LEAST, [_against(incident, node) for node in decision.drop], decision.reason, otherwise=ISOLATE)
    while True:
        for answer in run.nodes.approvals.answers(LEAST):
            if answer.nodes.keys() == set(decision.drop):  # else the answer to a request that was withdrawn just then
                return _answered(run, incident, answer)
        if state.ranks and state.all_succeeded():
            return Transition(Event.FINISHED, f"{all_of(len(state.ranks), 'rank')} exited with status 0")
        if (turn := ending(run)) is not None:
            return turn
        if lost := run.faults.missing_members().keys() - missing:
            return Transition(Event.FAULTED, f"{', '.join(sorted(lost))} was lost while an approval is pending")
        if added := set(run.nodes.spares()) - spares:
            return Transition(Event.ANSWERED, f"no approval is needed any more: {', '.join(sorted(added))} is available")
        bring_up_free_nodes(run, missing=len(decision.drop))


def _against(incident: IncidentInWork, node: str) -> NodeFault:
    """Return the fault for which *node* would be isolated."""
    assert incident.decision is not None
    assert incident.case is not None
    found = isolating_fault([fault for fault in incident.faults if fault.node == node], incident.case.recommended_actions)
    reason = incident.decision.reason
    return found or NodeFault(node=node, severe=True, reason=reason, evidence=(reason,), seen=incident.row.detected_at)


def _answered(run: JobController, incident: IncidentInWork, answer: ApprovalRequest) -> Transition:
    """Apply a person's answer, or the default one: nodes that were not approved stay in service as they were."""
    incident.approved |= set(answer.picked)
    if answer.by:
        kept = {node: facts for node, facts in answer.nodes.items() if node not in answer.picked}
        run.nodes.eligibility.approve(answer.picked, answer.by)
        run.nodes.eligibility.keep(kept, answer.answered_at or time.time())
    incident.lap("wait", time.time())
    return Transition(Event.ANSWERED, f"approval {answer.number}: {approvals.describe(answer)}")


def wait_for_capacity(run: JobController) -> Transition:
    """Wait until there are the nodes that the decision needs: lost ones that are back, or any free one."""
    incident, decision = decided(run)
    held, eligibility = run.generations.nodes_needed(frozenset(incident.lost)), run.nodes.eligibility
    limit = run.policy.timeouts.wait_for_capacity
    while True:
        have = members_after(held, decision)
        ours = [node for node in held if node not in decision.drop]  # a person's cordon takes no node from a running job
        usable = [node for node in run.agents.alive() if node in ours or not eligibility.why_ineligible(node)]
        alive = run.nodes.preflight.by_preference(usable)
        for text in eligibility.news(run.agents.source.names()):
            run.log.record_event(text)
        ready = [node for node in have if node in alive]
        found = [node for node in alive if node not in have]
        more = found[: max(0, run.generations.width - len(ready))]
        if len(ready) + len(found) >= decision.need and _are_connected(run, incident, [*ready, *more]):
            dropped, added = tuple(node for node in held if node not in ready), tuple(node for node in ready if node not in held)
            incident.decision = replace(decision, drop=dropped, add=(*added, *more))
            incident.lap("wait", time.time())
            return Transition(Event.GAINED, f"{', '.join(found) or 'enough nodes'} came back")
        if (turn := ending(run)) is not None:
            return turn
        if time.time() - incident.action_at > limit:
            incident.tried.append(RecoveryAction.WAIT_FOR_CAPACITY)
            incident.lap("wait", time.time())
            return Transition(Event.FAULTED, "; ".join([f"no capacity came within {limit:.0f} s", *eligibility.left_out()]))
        recheck_lost_agents(run, incident)
        bring_up_free_nodes(run, missing=decision.need - len(ready))


def _are_connected(run: JobController, incident: IncidentInWork, nodes: list[str]) -> bool:
    """Return whether *nodes* all reach each other; checked only after two that did not had stalled the job."""
    if NODE_APART.id not in {incident.row.kind, *(fault.kind for fault in incident.faults)}:
        return True
    cut_off, pairs = check_connections(run.agents.source, incident.faults, nodes)
    return not (cut_off or pairs)


def recheck_lost_agents(run: JobController, incident: IncidentInWork) -> None:
    """Check the job's nodes whose agents were lost while it waits: a node that answers gets another agent, others are lost."""
    missing = {node: why for node, why in run.faults.missing_members().items() if node in run.agents.clients}
    for node, answer in run.agents.each(missing, run.agents.recheck).items():
        if answer is not None:
            run.generations.sent_to.pop(node, None)  # a new agent knows no generation
        if isinstance(answer, (LeaseLost, LeaseUnconfirmed)):  # a problem of this controller: the node may be well
            run.log.record_event(f"{node} was not checked while the job waits: {answer}")
        elif answer is False or isinstance(answer, WorldError):
            incident.lost.add(node)
            run.log.record_node_status(node, "lost", f"its agent is unreachable: {missing[node]}")
            run.log.record_event(f"{node} was lost while the job waits: {missing[node]}")


def bring_up_free_nodes(run: JobController, *, missing: int) -> None:
    """Start agents on free nodes that jobs may use, then handle events for `INTERVAL` seconds."""
    alive, preflight = set(run.agents.alive()), run.nodes.preflight
    free = preflight.by_preference(node for node in run.nodes.free() if node not in alive)[:missing]
    preflight.begin(free)
    for node, answer in run.nodes.bring_up(free).items():
        if not isinstance(answer, WorldError):
            assert run.incidents.current is not None
            run.incidents.current.lost.discard(node)
    if free:
        preflight.finish()
    end = time.monotonic() + INTERVAL
    while time.monotonic() < end and not run.is_to_end:
        run.pump()
