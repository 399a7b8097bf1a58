"""What the policy is asked: the diagnosis of an incident, with all that the job knows of its nodes, ranks and past."""

from __future__ import annotations

import time

from detectors.catalogue import Fault
from detectors.diagnosis import Diagnosis, diagnose
from detectors.evidence import AgentUnreachable
from detectors.process import START_FAILED
from holdfast.control.faults.diagnosis_inputs import heard_once, places
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from policies.case import IN_PROCESS, Case
from policies.placement import nodes_needed
from policies.shrink_live import complete_copies


def diagnose_faults(run: JobController, faults: list[Fault]) -> Diagnosis:
    """Return the verdict on *faults*, by all that the job's past and its places tell."""
    return diagnose(faults, tuple(run.incidents.failures_before), len(run.generations.members), places(run), run.recommended_actions)


def lost_nodes(faults: list[Fault], silences: list[AgentUnreachable]) -> set[str]:
    """Return the nodes that these tell to be lost."""
    lost = {silence.node for silence in silences if silence.node_answers is not True}
    return lost | {fault.node for fault in faults if fault.kind == START_FAILED.id and fault.node}


def recovery_case(run: JobController, incident: IncidentInWork | None, diagnosis: Diagnosis, lost: frozenset[str] = frozenset()) -> Case:
    """Return all that the policy may know."""
    now = time.time()
    lost |= frozenset(incident.lost if incident is not None else ()) & set(run.generations.members)
    members = nodes_needed(run.generations.state.membership, run.spec.nodes.ranks, lost)
    seen = (diagnosis.root, *diagnosis.secondary_failures)
    counted = lost.union(members)
    context_faults = tuple(node for node in run.generations.members if node not in counted)
    return Case(
        now=now,
        diagnosis=diagnosis,
        members=members,
        lost=lost,
        spares=run.nodes.spares() + context_faults,
        least=run.spec.nodes.min_nodes,
        past=run.incidents.past(now),
        tried=tuple(incident.tried) if incident is not None else (),
        budget=run.policy.budget,
        recommended_actions=run.recommended_actions,
        earlier=heard_once(
            run.faults.history.of(
                {fault.kind for fault in seen}, but=run.faults.rows_of(seen), incident=incident.row.id if incident is not None else ""
            ),
            run.generations.state.unusable,
            run.cluster.kind,
        ),
        blocked_reason=(incident.blocked_reason if incident is not None else "") or run.generations.why_not_kept(),
        ranks={node: tuple(ranks) for node, ranks in run.generations.state.membership.items()},
        dead=run.generations.state.dead(),
        standbys=run.nodes.ready_hot_spares(),
        roles=run.generations.roles,
        copies=complete_copies(run.generations.copies, run.generations.vacant()),
        replacement_attempts=incident.replacement_attempts if incident is not None else 0,
        seated=_seated(run, incident),
        approval_possible=bool(run.nodes.approvals.seconds),
        approved=frozenset(incident.approved if incident is not None else ()),
        kept=run.nodes.eligibility.kept(seen, run.recommended_actions),
    )


def _seated(run: JobController, incident: IncidentInWork | None) -> frozenset[int]:
    """Return the ranks that the last decision of the *incident* gave new processes, if the generation that runs is the one it led to."""
    decision = incident.decision if incident is not None else None
    if (
        decision is None
        or decision.action not in IN_PROCESS
        or not run.incidents.attempts
        or run.generations.number <= run.incidents.attempts[-1].generation
    ):
        return frozenset()
    return frozenset(seat.rank for seat in decision.seats if run.generations.state.ranks[seat.rank].first_step is None)
