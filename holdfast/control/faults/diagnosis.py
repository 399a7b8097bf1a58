"""From faults to the diagnosis of an incident and the policy's case.

Silent agents are checked again, evidence on its way is awaited, then the faults are diagnosed; the record is made here too.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from holdfast.control.faults import network
from holdfast.control.faults.node_faults import machine_of
from holdfast.control.state.generation import hang_limits
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from holdfast.detectors.associations import follows_step, is_secondary
from holdfast.detectors.catalogue import CATALOGUE, CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.causes import Candidate
from holdfast.detectors.confirmation import why_it_acts
from holdfast.detectors.diagnosis import (
    Diagnosis,
    FirstStart,
    all_ranks_failed,
    diagnose,
    evidence_wait_seconds,
    see,
    start_error,
    unexplained_faults,
)
from holdfast.detectors.evidence import AgentUnreachable, Unknown
from holdfast.detectors.log_lines.classification import warm
from holdfast.detectors.log_lines.outputs import read
from holdfast.detectors.training.groups import GROUP_BROKEN, REPLACE_RANKS_FAILED
from holdfast.detectors.training.hang_analysis import STUCK
from holdfast.detectors.training.process import START_FAILED
from holdfast.detectors.training.progress import OVERRUN, STALLS
from holdfast.errors import WorldError
from holdfast.history import models
from holdfast.plurals import plural
from holdfast.policies import uptime
from holdfast.policies.nodes.placement import nodes_needed
from holdfast.policies.recovery.case import IN_PROCESS, Case, PastFault, RecoveryAction
from holdfast.policies.recovery.in_process import complete_copies
from holdfast.report.text import wording

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


def without_repeats(earlier: Iterable[PastFault], unusable: Iterable[Fault], cluster_kind: str) -> tuple[PastFault, ...]:
    """Return *earlier* without what other nodes of the same machine reported of an *unusable* GPU: the fault is not theirs."""
    node_of = {_identity(fault, cluster_kind): fault.node for fault in unusable}
    return tuple(one for one in earlier if node_of.get(_identity(one, cluster_kind), one.node) == one.node)


def read_last_output(run: JobController) -> list[Fault]:
    """Return the faults in the workers' last output: read once, when the evidence is complete, and only briefly, as ranks wait."""
    end = time.monotonic() + READ_SECONDS
    found, unread = read(run.generations.state.evidence, lambda: time.monotonic() >= end)
    if unread:
        run.log.record_event(
            f"the last output of {plural(len(unread), 'rank')} ({wording.ranks(unread)}) was not read within {READ_SECONDS:g} s, "
            f"for which a recovery waits. `holdfast logs {run.job.name}` shows it, `holdfast faults find` reads it"
        )
    return found


def places(run: JobController) -> dict[str, str]:
    """Return the node of every name that a fault may use for a peer."""
    ranks = {f"rank {rank}": view.node for rank, view in run.generations.state.ranks.items()}
    return ranks | {node: node for node in run.generations.members}


def diagnose_faults(run: JobController, faults: list[Fault]) -> Diagnosis:
    """Return the diagnosis of *faults*, with the job's past and places."""
    return diagnose(
        faults,
        tuple(run.incidents.failures_before),
        len(run.generations.members),
        places(run),
        run.recommended_actions,
        first_start=first_start(run, faults) if run.policy.fail_on_start_errors else None,
    )


def first_start(run: JobController, faults: Iterable[Fault]) -> FirstStart | None:
    """Return the first start of the job, if *faults* came before it had made progress; else None."""
    generations, state = run.generations, run.generations.state
    if run.incidents.attempts or generations.number != 1 or generations.best or state.any_stepped() or not state.ranks:
        return None
    began = state.first_step_at()  # of a script without steps: when its last rank started
    failed_at = min((fault.at for fault in faults if fault.rank is not None), default=None)
    if began is not None and failed_at is not None and uptime.counts_as_progress(failed_at - began, state.startup()):
        return None
    return FirstStart(ranks=frozenset(state.ranks), spares=len(run.nodes.spares()))


# -- the policy's case -----------------------------------------------------------------------------------------------------


def lost_nodes(faults: list[Fault], silences: list[AgentUnreachable]) -> set[str]:
    """Return the nodes that are lost by this evidence."""
    lost = {silence.node for silence in silences if silence.node_answers is not True}
    return lost | {fault.node for fault in faults if fault.kind == START_FAILED.id and fault.node}


def recovery_case(run: JobController, incident: IncidentInWork | None, diagnosis: Diagnosis, lost: frozenset[str] = frozenset()) -> Case:
    """Return everything that the policy may know."""
    now, generations, state = time.time(), run.generations, run.generations.state
    lost |= frozenset(incident.lost if incident is not None else ()) & set(generations.members)
    members = nodes_needed(state.membership, run.generations.ranks_per_node, lost)
    seen = (diagnosis.root, *diagnosis.secondary_failures)
    actions = replace(run.recommended_actions, confirmed=diagnosis.confirmed)
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
        recommended_actions=actions,
        earlier=without_repeats(earlier, state.unusable, run.cluster.kind),
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
        kept=run.nodes.eligibility.kept(seen, actions),
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
    root, recommended_actions = diagnosis.root, replace(recommended_actions, confirmed=diagnosis.confirmed)
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
        "proof": why_it_acts(fault, recommended_actions),
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


# -- before the diagnosis: silent agents are checked again, and evidence on its way is awaited --------------------------------

MAX_GROUP_FAULTS: Final = 128
"""Failed groups that a diagnosis gets."""
UNEXPLAINED: Final = STALLS | {
    GROUP_BROKEN.id,
    REPLACE_RANKS_FAILED.id,
    OVERRUN.id,
    *(kind for kind in CATALOGUE if is_secondary(kind)),
}
"""What ranks show when their peers do not reach them."""
LIVENESS_SECONDS: Final = 0.5
"""How long agents may take to say which ranks run: an exit that failed a group, or a node's preemption notice, is awaited as long."""
START_SECONDS: Final = 10.0
"""How long a worker may take to start after the first one failed, before that failure is diagnosed without it."""
FIRST_STEP_SECONDS: Final = 3.0
"""How long a started worker may take to fail at its first step in the same way: ranks that start are not synchronized."""


def confirm_faults(run: JobController) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Return the faults to act on and the agents that stay unreachable, once enough is known."""
    faults, silences = settled_faults(run, recheck_silent(run))
    if not silences:
        partitioned, pairs = _partitioned_nodes(run, faults)
        faults, silences = _wait_out_hang(run, faults + partitioned)
        if pairs and faults and not silences:
            faults += _node_to_drop(run, faults)
    return faults, silences


def recheck_silent(run: JobController) -> list[AgentUnreachable]:
    """Check the nodes of silent agents by a second way that does not need the agent; return those that are still silent."""
    missing = run.faults.missing_members()
    at = {node: run.agents.lost_at(node) for node in missing}
    answers = run.agents.each(missing, run.agents.recheck)
    for node in missing:
        if answers[node] is not None:
            run.generations.sent_to.pop(node, None)  # a new agent knows no generation
    return [
        AgentUnreachable(
            node=node,
            at=at[node],
            why=run.nodes.allocations.explained(node, missing[node]),
            node_answers=Unknown(str(answer)) if isinstance(answer, WorldError) else answer,
            step=run.generations.state.step_before,
        )
        for node, answer in answers.items()
        if answer is not None  # it answers again: only the connection was lost
    ]


def settled_faults(run: JobController, silences: list[AgentUnreachable]) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Return the faults and unreachable agents once enough is known.

    A secondary failure alone waits for its cause, a correlated failure for the same one on other nodes, a stall for an agent that may have
    been lost with its node.
    """
    begin, silence, checked = time.monotonic(), run.spec.timeouts.heartbeat.total_seconds(), False
    while True:
        found = run.faults.acting() + see(silences, hang_limits(run.spec.timeouts))
        faults, nodes = limit_group_faults(found), _nodes_to_expect(run, found)
        uncertain = run.faults.uncertain() or not run.faults.missing_members().keys() <= {silence.node for silence in silences}
        if faults and not uncertain and _can_replace_ranks(run, faults, silences):
            return faults, silences
        if only_group_faults(faults) and not uncertain and not checked:
            checked = True
            if _all_ranks_run(run) and only_group_faults(faults := limit_group_faults(run.faults.acting())):
                return faults, silences
            continue
        waited = time.monotonic() - begin
        wait = evidence_wait_seconds(faults, nodes, silence=silence, recommended_actions=run.recommended_actions)
        if not uncertain and waited >= max(wait, _seconds_for_same_failure(run, faults), _seconds_for_notice(run)):
            return faults, silences
        run.pump(0.02)
        if run.faults.missing_members():
            silences = silences + recheck_silent(run)


def _partitioned_nodes(run: JobController, faults: list[Fault]) -> tuple[list[Fault], bool]:
    """Return the nodes that are cut off from the others, if ranks wait for each other and no agent is lost; and if two others are.

    gloo itself finds that out after half a minute at best. A failed group is first recovered in process: that is faster than to check.
    """
    kinds = {fault.kind for fault in faults}
    if not kinds or not kinds <= UNEXPLAINED or (kinds == {GROUP_BROKEN.id} and run.incidents.current is None):
        return [], False
    nodes = [*run.generations.members, *run.nodes.spares()]
    found, pairs = network.check_connections(run.agents.source, faults, nodes)
    if pairs:
        run.log.record_event(f"{network.describe(pairs)}; this does not show which of them is cut off")
    return see(found, hang_limits(run.spec.timeouts)), bool(pairs)


def _node_to_drop(run: JobController, faults: list[Fault]) -> list[Fault]:
    """Return which node has to leave if two of the job still do not reach each other, and nothing but the stall is wrong."""
    if not {fault.kind for fault in faults} <= UNEXPLAINED:
        return []
    members = run.generations.members
    _, pairs = network.check_connections(run.agents.source, faults, members)
    return see(network.nodes_to_drop(pairs, members, time.time()), hang_limits(run.spec.timeouts))


def _wait_out_hang(run: JobController, faults: list[Fault]) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Wait for the minimum time of a hang, if all ranks are in a collective that does not end and no node is cut off.

    TCP sends lost packets again after longer and longer pauses (RFC 6298), and a busy machine is late.
    """
    end, silences = time.monotonic() + run.spec.timeouts.hang_min.total_seconds(), list[AgentUnreachable]()
    while {fault.kind for fault in faults} == {STUCK.id} and not silences and time.monotonic() < end:
        run.pump(0.02)
        faults = limit_group_faults(run.faults.acting())
        silences = recheck_silent(run) if run.faults.missing_members() else []
    return faults + see(silences, hang_limits(run.spec.timeouts)), silences


def limit_group_faults(faults: list[Fault]) -> list[Fault]:
    """Return *faults* with only the first failed groups: thousands of ranks that lost one peer say no more than some of them."""
    failed = [fault for fault in faults if fault.kind == GROUP_BROKEN.id]
    if len(failed) <= MAX_GROUP_FAULTS:
        return faults
    dropped = {id(fault) for fault in sorted(failed, key=lambda fault: fault.at)[MAX_GROUP_FAULTS:]}
    return [fault for fault in faults if id(fault) not in dropped]


def only_group_faults(faults: list[Fault]) -> bool:
    """Return whether nothing but failed groups is known."""
    return bool(faults) and all(fault.kind == GROUP_BROKEN.id for fault in faults)


def _nodes_to_expect(run: JobController, faults: list[Fault]) -> int:
    """Return on how many nodes faults are expected before all have reported: no more than those of `limit_group_faults`."""
    members = len(run.generations.members)
    if len({fault.node for fault in faults if fault.node}) < members:
        return members
    return len({fault.node for fault in limit_group_faults(faults) if fault.node})


def _can_replace_ranks(run: JobController, faults: list[Fault], silences: list[AgentUnreachable]) -> bool:
    """Return whether the policy replaces ranks for what is known: then waiting gains nothing, as later faults are decided anew."""
    diagnosis = diagnose_faults(run, [*faults, *context_faults(run)])
    if is_secondary(diagnosis.root.kind):
        return False
    case = recovery_case(run, run.incidents.current, diagnosis, lost=frozenset(lost_nodes(faults, silences)))
    return run.policy.decide(case).decision.action is RecoveryAction.REPLACE_RANKS


def _all_ranks_run(run: JobController) -> bool:
    """Return whether every rank runs, as the agents answer now: then no exit that failed a group is on its way."""
    answers = run.agents.send_command(run.generations.members, "living", seconds=LIVENESS_SECONDS)
    run.pump(0.0)  # handle the agents' earlier events
    current = [one for one in answers.values() if not isinstance(one, WorldError) and one["generation"] == run.generations.number]
    return {rank for one in current for rank in one["ranks"]} >= run.generations.state.ranks.keys()


def _seconds_for_same_failure(run: JobController, faults: list[Fault]) -> float:
    """Return how long to wait for the other nodes when a script fails before its first step: they may be about to fail in the same way."""
    state, nodes = run.generations.state, {fault.node for fault in faults}
    if not faults or state.any_stepped():
        return 0.0
    if nodes >= set(run.generations.members) and not _more_ranks_may_fail(run, faults):
        return 0.0
    if not all(follows_step(fault.kind) for fault in faults):
        return 0.0
    return FIRST_STEP_SECONDS if state.all_started() else START_SECONDS


def _more_ranks_may_fail(run: JobController, faults: list[Fault]) -> bool:
    """Return whether an error of the script's start has ended some ranks of its first start, and others are about to meet it."""
    start = first_start(run, faults) if run.policy.fail_on_start_errors else None
    errors = [fault for fault in faults if start_error(fault) is not None]
    return start is not None and bool(errors) and not all_ranks_failed(errors[0], faults, start.ranks)


def _seconds_for_notice(run: JobController) -> float:
    """Return how long to wait for the agents of ranks that SIGTERM ended: a batch system that preempts nodes signals them too."""
    has_notice = run.nodes.eligibility.has_preemption_notice
    return LIVENESS_SECONDS if any(not has_notice(node) for node in run.generations.state.terminated) else 0.0
