"""Before a diagnosis: check silent agents again, and wait for evidence that is still on its way."""

from __future__ import annotations

import time
from typing import Final

from detectors.associations import follows_step, is_secondary
from detectors.catalogue import CATALOGUE, Fault
from detectors.diagnosis import evidence_wait_seconds, see
from detectors.evidence import AgentUnreachable, Unknown
from detectors.groups import GROUP_BROKEN, REPLACE_RANKS_FAILED
from detectors.hang_analysis import STUCK
from detectors.progress import OVERRUN, STALLS
from holdfast.control.faults import network
from holdfast.control.faults.diagnosis import context_faults, diagnose_faults, lost_nodes, recovery_case
from holdfast.control.state.generation import hang_limits
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import WorldError
from policies.case import RecoveryAction

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
    if not faults or state.any_stepped() or nodes >= set(run.generations.members):
        return 0.0
    if not all(follows_step(fault.kind) for fault in faults):
        return 0.0
    return FIRST_STEP_SECONDS if state.all_started() else START_SECONDS


def _seconds_for_notice(run: JobController) -> float:
    """Return how long to wait for the agents of ranks that SIGTERM ended: a batch system that preempts nodes signals them too."""
    has_notice = run.nodes.eligibility.has_preemption_notice
    return LIVENESS_SECONDS if any(not has_notice(node) for node in run.generations.state.terminated) else 0.0
