"""The diagnosis of an incident and the policy's case: their inputs, and how the diagnosis is recorded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from detectors.causes import Candidate
from detectors.diagnosis import Diagnosis, diagnose, unexplained_faults
from detectors.evidence import AgentUnreachable
from detectors.logs import warm
from detectors.outputs import read
from detectors.process import START_FAILED
from holdfast.control.faults.node_faults import machine_of
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from holdfast.history import models
from holdfast.report import wording
from policies.case import IN_PROCESS, Case, PastFault
from policies.in_process import complete_copies
from policies.placement import nodes_needed

MAX_EVIDENCE: Final = 12
"""Pieces of evidence that are recorded with each hypothesis; the faults themselves have rows of their own."""
MAX_TARGETS: Final = 8
READ_SECONDS: Final = 1.0
"""How long a recovery waits for the workers' last output to be read: no node is isolated before."""
RECENT: Final = 7200.0
"""Seconds for which a node's fault that calls for no action may explain another one."""


def compile_log_patterns() -> None:
    """Compile the patterns for the workers' last output while workers start, so that no incident waits a tenth of a second for it."""
    threading.Thread(target=warm, name="signatures", daemon=True).start()


# -- inputs of the diagnosis -----------------------------------------------------------------------------------------------


def context_faults(run: JobController) -> list[Fault]:
    """Return the known faults that call for no action: of nodes, and those through which training continues.

    Faults that are only recorded, such as a clock that is not synchronized, explain nothing.
    """
    now, kind, state = time.time(), run.cluster.kind, run.generations.state
    seen = [fault for fault in run.faults.all() if not run.recommended_actions.needs_action(fault)]
    acting = {_identity(fault, kind) for fault in state.unusable}
    others = [fault for fault in state.node_faults if _identity(fault, kind) not in acting]
    reported = [fault for fault in (*others, *state.problems) if fault.node in run.generations.members and now - fault.at < RECENT]
    known = [fault for fault in (*seen, *reported) if run.recommended_actions.of(fault) is not RecommendedAction.RECORD]
    return [fault for fault in known if not run.nodes.eligibility.is_excused(fault, run.recommended_actions)]


def _identity(fault: Fault | PastFault, cluster_kind: str) -> tuple[str, str, str]:
    """Return kind, device and machine of a fault: the nodes of one machine report the same one."""
    return fault.kind, fault.device, machine_of(fault.node or "", cluster_kind)


def heard_once(earlier: Iterable[PastFault], unusable: Iterable[Fault], cluster_kind: str) -> tuple[PastFault, ...]:
    """Return *earlier* without what other nodes of the same machine reported of an *unusable* GPU: the fault is not theirs."""
    node_of = {_identity(fault, cluster_kind): fault.node for fault in unusable}
    return tuple(one for one in earlier if node_of.get(_identity(one, cluster_kind), one.node) == one.node)


def read_last_output(run: JobController) -> list[Fault]:
    """Return the faults in the workers' last output: read once, when the evidence is complete, and only briefly, as ranks wait."""
    end = time.monotonic() + READ_SECONDS
    found, unread = read(run.generations.state.evidence, lambda: time.monotonic() >= end)
    if unread:
        run.log.record_event(
            f"the last output of {wording.plural(len(unread), 'rank')} ({wording.ranks(unread)}) was not read within {READ_SECONDS:g} s, "
            f"for which a recovery waits. `holdfast logs {run.job.name}` shows it, `holdfast classify` reads it"
        )
    return found


def places(run: JobController) -> dict[str, str]:
    """Return the node of every name that a fault may use for a peer."""
    ranks = {f"rank {rank}": view.node for rank, view in run.generations.state.ranks.items()}
    return ranks | {node: node for node in run.generations.members}


def diagnose_faults(run: JobController, faults: list[Fault]) -> Diagnosis:
    """Return the diagnosis of *faults*, with the job's past and places."""
    return diagnose(faults, tuple(run.incidents.failures_before), len(run.generations.members), places(run), run.recommended_actions)


# -- the policy's case -----------------------------------------------------------------------------------------------------


def lost_nodes(faults: list[Fault], silences: list[AgentUnreachable]) -> set[str]:
    """Return the nodes that are lost by this evidence."""
    lost = {silence.node for silence in silences if silence.node_answers is not True}
    return lost | {fault.node for fault in faults if fault.kind == START_FAILED.id and fault.node}


def recovery_case(run: JobController, incident: IncidentInWork | None, diagnosis: Diagnosis, lost: frozenset[str] = frozenset()) -> Case:
    """Return everything that the policy may know."""
    now, generations, state = time.time(), run.generations, run.generations.state
    lost |= frozenset(incident.lost if incident is not None else ()) & set(generations.members)
    members = nodes_needed(state.membership, run.spec.ranks_per_node, lost)
    seen = (diagnosis.root, *diagnosis.secondary_failures)
    unneeded = tuple(node for node in generations.members if node not in lost.union(members))
    kinds, incident_id = {fault.kind for fault in seen}, incident.row.id if incident is not None else ""
    earlier = run.faults.history.of(kinds, but=run.faults.rows_of(seen), incident=incident_id)
    return Case(
        now=now,
        diagnosis=diagnosis,
        members=members,
        lost=lost,
        spares=run.nodes.spares() + unneeded,
        least=run.spec.min_nodes,
        past=run.incidents.past(now),
        tried=tuple(incident.tried) if incident is not None else (),
        budget=run.policy.budget,
        recommended_actions=run.recommended_actions,
        earlier=heard_once(earlier, state.unusable, run.cluster.kind),
        blocked_reason=(incident.blocked_reason if incident is not None else "") or generations.why_not_kept(),
        ranks={node: tuple(ranks) for node, ranks in state.membership.items()},
        dead=state.dead(),
        hot_spares=run.nodes.ready_hot_spares(),
        roles=generations.roles,
        copies=complete_copies(generations.copies, generations.vacant()),
        replacement_attempts=incident.replacement_attempts if incident is not None else 0,
        seated=_replaced(run, incident),
        approval_possible=bool(run.nodes.approvals.seconds),
        approved=frozenset(incident.approved if incident is not None else ()),
        kept=run.nodes.eligibility.kept(seen, run.recommended_actions),
    )


def _replaced(run: JobController, incident: IncidentInWork | None) -> frozenset[int]:
    """Return the ranks without a step that the incident's last decision gave new processes, if its generation is the current one."""
    decision, attempts = incident.decision if incident is not None else None, run.incidents.attempts
    if decision is None or decision.action not in IN_PROCESS or not attempts or run.generations.number <= attempts[-1].generation:
        return frozenset()
    return frozenset(seat.rank for seat in decision.seats if run.generations.state.ranks[seat.rank].first_step is None)


# -- the record ------------------------------------------------------------------------------------------------------------


def incident_faults(diagnosis: Diagnosis, acting: Iterable[Fault]) -> list[Fault]:
    """Return the faults of the incident, the root cause first: those that call for an action, and those that the root explains."""
    root = diagnosis.root
    explained = diagnosis.candidates[0].explains if diagnosis.candidates else ()
    ours = {id(fault) for fault in (*acting, *explained)}
    return [root, *(fault for fault in diagnosis.secondary_failures if fault is not root and id(fault) in ours)]


def row_of(
    diagnosis: Diagnosis, job: str, incident: str, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
) -> models.IncidentDiagnosis:
    """Return the diagnosis as a row of the history."""
    root = diagnosis.root
    return models.IncidentDiagnosis(
        job_id=job,
        incident_id=incident,
        at=time.time(),
        kind=root.kind,
        target=root.target,
        confidence=diagnosis.candidates[0].confidence if diagnosis.candidates else 1.0,
        reason=diagnosis.reason,
        candidates=[record(one, recommended_actions) for one in diagnosis.candidates],
    )


def record(one: Candidate, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> dict[str, Any]:
    """Return a hypothesis as JSON: the fault, its confidence, its evidence with time and source, what it explains and what not."""
    fault = one.fault
    return {
        "kind": fault.kind,
        "target": fault.target,
        "node": fault.node,
        "rank": fault.rank,
        "device": fault.device,
        "confidence": one.confidence,
        "attributed_to": str(fault.entry.attributed_to),
        "recommended_action": str(recommended_actions.of(fault)),
        "rules": one.reason,
        "evidence": [
            {"at": seen.at, "source": seen.source, "target": seen.target, "quote": seen.quote} for seen in one.evidence[:MAX_EVIDENCE]
        ],
        "explains": _counted(one.explains),
        "unexplained": _counted(unexplained_faults(one, recommended_actions)),
    }


def _counted(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return the number of faults of each kind, with some targets: ten thousand secondary failures are one line."""
    counts = Counter(fault.kind for fault in faults)
    targets = {kind: [fault.target for fault in faults if fault.kind == kind][:MAX_TARGETS] for kind in counts}
    return [{"kind": kind, "count": count, "targets": targets[kind]} for kind, count in counts.most_common()]
