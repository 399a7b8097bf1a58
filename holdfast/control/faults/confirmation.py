"""What is to be known before a diagnosis: look again at who is silent, and wait for evidence that may still come."""

from __future__ import annotations

import time
from typing import Final

from detectors.associations import follows_step, is_secondary
from detectors.catalogue import CATALOGUE, Fault
from detectors.diagnosis import evidence_wait_seconds, see
from detectors.evidence import AgentUnreachable, Unknown
from detectors.groups import GROUP_BROKEN, TAKE_OVER_FAILED
from detectors.hang_analysis import STUCK
from detectors.progress import OVERRUN, STANDSTILLS
from holdfast.control.faults import reachability
from holdfast.control.faults.diagnosis_inputs import context_faults
from holdfast.control.faults.recovery_case import diagnose_faults, lost_nodes, recovery_case
from holdfast.control.state.generation import hang_limits
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import WorldError
from policies.case import RecoveryAction

MOST_BROKEN: Final = 128
"""Broken groups that are weighed."""

UNEXPLAINED: Final = STANDSTILLS | {GROUP_BROKEN.id, TAKE_OVER_FAILED.id, OVERRUN.id, *(kind for kind in CATALOGUE if is_secondary(kind))}
"""What ranks say, or do not, when their peers do not reach them."""

ANSWER_SECONDS: Final = 0.5
"""How long agents may take to say who lives: so long an end that broke a group is waited for in any case, and so is a node's notice."""

STRAGGLERS: Final = 10.0
"""Seconds that a worker may take to start after the first one failed, before the failure is judged without it."""

SLOW_STARTERS: Final = 3.0
"""Seconds that a worker which has started may take to fail at its first step the same way: ranks that start do not keep pace."""


def confirm_faults(run: JobController) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Return the faults to act on and the agents that stay silent, once enough is known."""
    silences = look_twice(run)
    faults, silences = settled(run, silences)
    if not silences:
        cut_off, pairs = cut_from_peers(run, faults)
        faults, silences = given_time(run, faults + cut_off)
        faults += kept_apart(run, faults) if pairs and faults and not silences else []
    return faults, silences


def look_twice(run: JobController) -> list[AgentUnreachable]:
    """Look at the nodes whose agents do not speak, by a second way that does not need the agent."""
    missing = run.faults.missing_members()
    at = {node: run.agents.gone_at(node) for node in missing}
    answers = run.agents.each(missing, run.agents.recheck)
    for node in missing:
        if answers[node] is not None:
            run.generations.sent_to.pop(node, None)  # a new agent knows of no generation
    return [
        AgentUnreachable(
            node=node,
            at=at[node],
            why=run.nodes.allocations.explained(node, missing[node]),
            node_answers=Unknown(str(answer)) if isinstance(answer, WorldError) else answer,
            step=run.generations.state.step_before,
        )
        for node, answer in answers.items()
        if answer is not None  # it speaks again: it was the connection alone
    ]


def settled(run: JobController, silences: list[AgentUnreachable]) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Return the faults and silences once enough is known.

    An echo alone waits for its cause, a shared failure for its twins, a standstill for an agent that may have gone with its node.
    """
    begin, silence, asked = time.monotonic(), run.spec.limits.agent_silence.total_seconds(), False
    while True:
        heard = run.faults.acting() + see(silences, hang_limits(run.spec.limits))
        faults, members = few(heard), _members(run, heard)
        doubtful = run.faults.uncertain() or not run.faults.missing_members().keys() <= {silence.node for silence in silences}
        if faults and not doubtful and can_be_taken_over(run, faults, silences):
            return faults, silences
        if only_groups(faults) and not doubtful and not asked:
            asked = True
            if all_live(run) and only_groups(faults := few(run.faults.acting())):
                return faults, silences
            continue
        waited = time.monotonic() - begin
        settles = evidence_wait_seconds(faults, members, silence=silence, recommended_actions=run.recommended_actions)
        if not doubtful and waited >= max(settles, _seconds_for_twins(run, faults), _seconds_for_notice(run)):
            return faults, silences
        run.pump(0.02)
        if run.faults.missing_members():
            silences = silences + look_twice(run)


def cut_from_peers(run: JobController, faults: list[Fault]) -> tuple[list[Fault], bool]:
    """Return who is cut off from the other nodes, where ranks wait for each other and nobody is known to be gone; and if two others are.

    gloo itself finds that out after half a minute at best. A group that broke is mended first: that is faster than to look.
    """
    kinds = {fault.kind for fault in faults}
    if not kinds or not kinds <= UNEXPLAINED or (kinds == {GROUP_BROKEN.id} and run.incidents.current is None):
        return [], False
    found, pairs = reachability.check_connections(run.agents.source, faults, [*run.generations.members, *run.nodes.spares()])
    if pairs:
        run.log.record_event(f"{reachability.describe(pairs)}; which of them is cut off cannot be told from that")
    return see(found, hang_limits(run.spec.limits)), bool(pairs)


def kept_apart(run: JobController, faults: list[Fault]) -> list[Fault]:
    """Return which node is to leave when two of the job still do not reach each other, and standing still is all that is wrong."""
    if not {fault.kind for fault in faults} <= UNEXPLAINED:
        return []
    _, pairs = reachability.check_connections(run.agents.source, faults, run.generations.members)
    return see(reachability.apart(pairs, run.generations.members, time.time()), hang_limits(run.spec.limits))


def given_time(run: JobController, faults: list[Fault]) -> tuple[list[Fault], list[AgentUnreachable]]:
    """Wait for as long as a hang takes at least, where all ranks have come to a collective, it does not end and nobody is cut off.

    Lost packets are sent again after longer and longer pauses (RFC 6298), and a busy machine comes to it late.
    """
    end, silences = time.monotonic() + run.spec.limits.hang_least.total_seconds(), list[AgentUnreachable]()
    while {fault.kind for fault in faults} == {STUCK.id} and not silences and time.monotonic() < end:
        run.pump(0.02)
        faults = few(run.faults.acting())
        silences = look_twice(run) if run.faults.missing_members() else []
    return faults + see(silences, hang_limits(run.spec.limits)), silences


def few(faults: list[Fault]) -> list[Fault]:
    """Return *faults*, of those groups that broke only the first: thousands of ranks that lost one peer say no more than some of them."""
    broken = [fault for fault in faults if fault.kind == GROUP_BROKEN.id]
    if len(broken) <= MOST_BROKEN:
        return faults
    left = {id(fault) for fault in sorted(broken, key=lambda fault: fault.at)[MOST_BROKEN:]}
    return [fault for fault in faults if id(fault) not in left]


def _members(run: JobController, faults: list[Fault]) -> int:
    """Return on how many nodes faults are to be expected before all have told: of `few` not more than those have."""
    told = {fault.node for fault in faults if fault.node}
    return (
        len({fault.node for fault in few(faults) if fault.node})
        if len(told) >= len(run.generations.members)
        else len(run.generations.members)
    )


def can_be_taken_over(run: JobController, faults: list[Fault], silences: list[AgentUnreachable]) -> bool:
    """Tell whether a take-over answers what is known already: then nothing is gained by waiting, as what comes next is decided anew."""
    diagnosis = diagnose_faults(run, [*faults, *context_faults(run)])
    if is_secondary(diagnosis.root.kind):
        return False
    case = recovery_case(run, run.incidents.current, diagnosis, lost=frozenset(lost_nodes(faults, silences)))
    return run.policy.decide(case).decision.action is RecoveryAction.TAKE_OVER


def only_groups(faults: list[Fault]) -> bool:
    """Tell whether all that is known is that groups broke."""
    return bool(faults) and all(fault.kind == GROUP_BROKEN.id for fault in faults)


def all_live(run: JobController) -> bool:
    """Tell whether every rank lives, as its agent says that has been asked: then no end is on its way that broke a group."""
    answers = run.agents.send_command(run.generations.members, "living", seconds=ANSWER_SECONDS)
    run.pump(0.0)  # what agents had told before
    told = [answer for answer in answers.values() if not isinstance(answer, WorldError)]
    return {
        rank for one in told if one["generation"] == run.generations.number for rank in one["ranks"]
    } >= run.generations.state.ranks.keys()


def _seconds_for_twins(run: JobController, faults: list[Fault]) -> float:
    """Return how long to wait for the other nodes when a script fails before its first step: they may be about to fail the same way."""
    told = {fault.node for fault in faults}
    if (
        not faults
        or run.generations.state.any_stepped()
        or told >= set(run.generations.members)
        or not all(follows_step(fault.kind) for fault in faults)
    ):
        return 0.0
    return SLOW_STARTERS if run.generations.state.all_started() else STRAGGLERS


def _seconds_for_notice(run: JobController) -> float:
    """Return how long to wait for the agents of ranks that SIGTERM ended: they got it as well where a batch system takes the nodes away."""
    return (
        ANSWER_SECONDS if any(not run.nodes.eligibility.has_preemption_notice(node) for node in run.generations.state.terminated) else 0.0
    )
