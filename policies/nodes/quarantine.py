"""Quarantine: functions from a node and a request about it to the changed node, or to the reason why nothing changes.

A node's open cordons decide its state. Each has an owner, a reason, evidence, a number and perhaps an end. Only a person lifts a person's
cordon, unless it expires; a program's cordon is lifted by a burn-in that passed for it, or by a person. An outdated request (about a cordon
that is not open, or with evidence from before the node's last return to service) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.plurals import plural
from holdfast.policies.nodes.cordons import (
    PROGRAMS,
    TESTABLE,
    Answer,
    BurnInAttempt,
    Cordon,
    CordonChanged,
    CordonedFault,
    CordonKind,
    NeedsPerson,
    Node,
    NodeTransition,
    OperatorRequest,
    OutOfDate,
    Owner,
    QuarantineLimits,
    Rules,
    TransitionRefused,
    state_of,
)
from holdfast.policies.nodes.node_states import NODE_MOVES, NodeEvent, NodeState, move_node
from holdfast.policies.states import UnlistedTransition

# -- requests of programs ----------------------------------------------------------------------------------------------


def suspect(node: Node, request: OperatorRequest, limits: QuarantineLimits) -> Answer:
    """Make a node suspect; too many suspicions within the window quarantine it."""
    if request.evident <= node.back:
        return OutOfDate(f"{node.name} returned to service after that was seen")
    if node.is_isolated:
        return OutOfDate(f"{node.name} is {node.state} already")
    if node.suspicions and request.evident <= node.suspicions[-1]:
        return OutOfDate(f"{node.name} was suspect after that was seen")
    rules = limits.rules
    recent = [at for at in node.suspicions if at > node.back and request.at - at < rules.suspicion_window]
    node = replace(node, suspicions=(*node.suspicions, request.at))
    before = [fault for one in node.of_kind(CordonKind.SUSPICION) for fault in one.faults]
    opened = _new_cordon(
        node, CordonKind.SUSPICION, replace(request, faults=_merged(before, request.faults)), until=request.at + rules.suspicion_window
    )
    suspected = _after(node, (opened,), request, opened.number)
    if not rules.suspicions or len(recent) + 1 < rules.suspicions:
        return suspected
    times = replace(
        request,
        reason=f"suspect {len(recent) + 1} times within {rules.suspicion_window / 3600:g} h, last: {request.reason}",
        faults=opened.faults,
    )
    answer = quarantine(node, times, limits)
    return answer if isinstance(answer, CordonChanged) else suspected


def quarantine(node: Node, request: OperatorRequest, limits: QuarantineLimits) -> Answer:
    """Quarantine a node for a fault of its own: each time for longer, and finally decommission it."""
    if request.evident <= node.back:
        return OutOfDate(f"{node.name} returned to service after that was seen")
    present = node.of_kind(CordonKind.QUARANTINE, CordonKind.DECOMMISSION)
    if present and not present[0].test:
        if any(fault not in present[0].faults for fault in request.faults):
            return _after(node, _with(node, _with_faults(present[0], request)), request, present[0].number)
        how = "decommissioned" if node.of_kind(CordonKind.DECOMMISSION) else "quarantined"
        return OutOfDate(f"{node.name} is {how} already, by cordon {present[0].number}")
    if present:
        return _failed(node, _with_faults(present[0], request), request, f"a fault came during the burn-in: {request.reason}", limits.rules)
    if not node.is_isolated and limits.isolated + 1 > limits.most and not request.approved:
        of = f"of the cluster's {limits.size}"
        out = plural(limits.isolated, f"node {of} is out of service", f"nodes {of} are out of service")
        return NeedsPerson(f"{out}, and programs may isolate {limits.most}")
    rules = limits.rules
    count = sum(at > node.pardoned and request.at - at < rules.window for at in node.quarantines) + 1
    node = replace(node, quarantines=(*node.quarantines, request.at))
    kept = tuple(one for one in node.cordons if one.kind not in {CordonKind.SUSPICION, CordonKind.UNTESTED})
    if rules.decommission_after and count >= rules.decommission_after:
        changed = replace(request, reason=f"quarantine {count} within {rules.window / 86400:g} d: {request.reason}")
        opened = _new_cordon(node, CordonKind.DECOMMISSION, changed)
    else:
        opened = _new_cordon(node, CordonKind.QUARANTINE, request, until=request.at + rules.cool * 2 ** (count - 1))
    return _after(node, (*kept, opened), request, opened.number)


def begin_burn_in(node: Node, request: OperatorRequest, number: int, *, seconds: float) -> Answer:
    """Start the burn-in that may lift cordon *number*; its result is valid for *seconds*."""
    present = _open(node, number, TESTABLE)
    if present is None:
        return OutOfDate(f"{node.name} has no open cordon {number} that a burn-in could lift")
    if present.test:
        return TransitionRefused(f"burn-in {present.test} runs on {node.name} already. Wait for its end")
    if node.state is NodeState.DECOMMISSIONED:
        return TransitionRefused(f"{node.name} is decommissioned. `holdfast node return {node.name} --reason ...` returns it to service")
    tested = replace(present, test=node.number + 1, test_until=request.at + seconds)
    done = _after(replace(node, number=tested.test), _with(node, tested), request, number)
    return replace(done, test=tested.test)


def end_burn_in(node: Node, request: OperatorRequest, ran: BurnInAttempt, *, passed: bool | None, rules: Rules) -> Answer:
    """Apply the outcome of a burn-in: if *passed*, it lifts the cordon that it was started for.

    A failed burn-in counts against the node; one that could not run (None) does not.
    """
    present = _open(node, ran.cordon, TESTABLE)
    if present is None or not ran.number or present.test != ran.number:
        return OutOfDate(f"burn-in {ran.number} for cordon {ran.cordon} of {node.name} is not the running one")
    if passed is None:
        return _untried(node, present, request, request.reason, rules)
    if not passed:
        return _failed(node, present, request, request.reason, rules)
    return _after(node, _without(node, present), request, ran.cordon, NodeEvent.PASSED)


def settle(node: Node, now: float, rules: Rules) -> CordonChanged | None:
    """Apply one thing that expired by *now*: a suspicion, a burn-in that never ended, or a person's cordon."""
    clock = Owner(name="the clock")
    for present in node.cordons:
        ends = present.test_until if present.test else present.until
        if ends is None or ends > now:
            continue
        request = OperatorRequest(owner=clock, reason=f"cordon {present.number} of {present.owner.name} expired", at=max(ends, node.since))
        if present.test:
            return _untried(node, present, request, f"burn-in {present.test} did not end in time", rules)
        if present.kind is CordonKind.SUSPICION:
            return _after(node, _without(node, present), request, present.number, NodeEvent.CLEARED)
        if present.kind is CordonKind.PERSON:
            return _run_out(node, present, request)
    return None


def _run_out(node: Node, present: Cordon, request: OperatorRequest) -> CordonChanged:
    """End an expired person's cordon, and require a burn-in."""
    rest = _without(node, present)
    if any(one.kind in TESTABLE for one in rest):
        return _after(node, rest, request, present.number, NodeEvent.BURN_IN_DUE)
    changed = replace(request, reason=f"cordoned by {present.owner.name} until then ({present.reason}); a burn-in must pass")
    opened = _new_cordon(node, CordonKind.UNTESTED, changed, until=request.at)
    return _after(node, (*rest, opened), changed, present.number, NodeEvent.BURN_IN_DUE)


def _failed(node: Node, present: Cordon, request: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """Record a failed burn-in; the next one is due after twice the time, and after too many the node is decommissioned."""
    changed = replace(request, reason=reason)
    count = sum(at > node.pardoned and request.at - at < rules.window for at in node.failures) + 1
    failed = replace(present, test=0, test_until=None, until=request.at + rules.cool * 2 ** (count - 1))
    if rules.failures and count >= rules.failures:
        often = replace(request, reason=f"failed burn-in {count} within {rules.window / 86400:g} d: {reason}")
        opened = _new_cordon(node, CordonKind.DECOMMISSION, often)
        return _after(node, (*_with(node, failed), opened), often, opened.number)
    if node.state is NodeState.IN_BURN_IN:  # a node that a person cordoned keeps its state and counts no failures
        node = replace(node, failures=(*node.failures, request.at))
    return _after(node, _with(node, failed), changed, present.number, NodeEvent.FAILED)


def _untried(node: Node, present: Cordon, request: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """Record a burn-in that could not run; the next one is due after the time of a first quarantine."""
    changed = replace(request, reason=reason)
    ended = replace(present, test=0, test_until=None, until=request.at + rules.cool)
    return _after(node, _with(node, ended), changed, present.number, NodeEvent.UNTRIED)


# -- requests of persons -----------------------------------------------------------------------------------------------


def cordon(node: Node, request: OperatorRequest, *, until: float | None = None) -> Answer:
    """Cordon a node for a person, perhaps *until* a time, in addition to its other cordons."""
    if refused := _not_a_person(request, "cordon"):
        return refused
    opened = _new_cordon(node, CordonKind.PERSON, request, until=until)
    kept = tuple(one for one in node.cordons if one.kind is not CordonKind.SUSPICION)
    return _after(node, (*kept, opened), request, opened.number)


def drain(node: Node, request: OperatorRequest, *, leave_by: float | None = None) -> Answer:
    """Cordon a node for a person and drain it, perhaps by a deadline. A person lifts the cordon afterwards."""
    if refused := _not_a_person(request, "drain"):
        return refused
    mine = next((one for one in node.cordons if one.drains and one.owner == request.owner), None)
    if mine is not None:  # a repeated request changes deadline and reason
        changed = replace(mine, reason=request.reason, leave_by=leave_by)
        return _after(node, _with(node, changed), request, mine.number)
    opened = replace(_new_cordon(node, CordonKind.PERSON, request), drains=True, leave_by=leave_by)
    kept = tuple(one for one in node.cordons if one.kind is not CordonKind.SUSPICION)
    return _after(node, (*kept, opened), request, opened.number)


def cancel_drain(node: Node, request: OperatorRequest) -> Answer:
    """Lift all cordons that drain a node; other cordons stay."""
    if refused := _not_a_person(request, "cancel the drain of"):
        return refused
    asked = [one for one in node.cordons if one.drains]
    if not asked:
        return TransitionRefused(f"{node.name} is not being drained; it is {node.state}")
    return _after(node, tuple(one for one in node.cordons if not one.drains), request, asked[-1].number)


def uncordon(node: Node, request: OperatorRequest, number: int | None = None) -> Answer:
    """Lift a person's cordon: the only one, or the one with this *number*. Cordons of programs stay."""
    if refused := _not_a_person(request, "uncordon"):
        return refused
    mine = node.of_kind(CordonKind.PERSON)
    if number is not None:
        mine = tuple(one for one in mine if one.number == number)
        if not mine:
            return OutOfDate(f"{node.name} has no open cordon {number} of a person")
    if not mine:
        cure = "" if node.state is NodeState.HEALTHY else f". `holdfast node return {node.name} --reason ...` returns it to service"
        return TransitionRefused(f"{node.name} is {node.state}: no person cordoned it{cure}")
    if len(mine) > 1:
        which = ", ".join(f"{one.number} ({one.owner.name}: {one.reason})" for one in mine)
        return TransitionRefused(f"{node.name} has {len(mine)} cordons of persons: {which}. Select one with `--number`")
    return _after(node, _without(node, mine[0]), request, mine[0].number)


def return_to_service(node: Node, request: OperatorRequest, number: int | None = None) -> Answer:
    """Return a node to service without a burn-in: lift all cordons but those of kind `PERSON`."""
    if refused := _not_a_person(request, "return"):
        return refused
    mine = node.of_kind(*PROGRAMS)
    if number is not None and all(one.number != number for one in mine):
        return OutOfDate(f"{node.name} has no open cordon {number} of a program")
    if not mine:
        cure = f". `holdfast node uncordon {node.name} --reason ...` lifts it" if node.state is NodeState.CORDONED else ""
        return TransitionRefused(f"{node.name} is {node.state}: no program cordoned it{cure}")
    if node.of_kind(CordonKind.DECOMMISSION):
        node = replace(node, pardoned=request.at)
    kept = node.of_kind(CordonKind.PERSON)
    event = NodeEvent.CLEARED if node.state is NodeState.SUSPECT else NodeEvent.RETURNED_TO_SERVICE
    return _after(node, kept, request, mine[-1].number, event)


def decommission(node: Node, request: OperatorRequest) -> Answer:
    """Decommission a node for a person."""
    if refused := _not_a_person(request, "decommission"):
        return refused
    if node.state is NodeState.DECOMMISSIONED:
        return TransitionRefused(f"{node.name} is decommissioned already, by cordon {node.of_kind(CordonKind.DECOMMISSION)[0].number}")
    opened = _new_cordon(node, CordonKind.DECOMMISSION, request)
    kept = tuple(replace(one, test=0, test_until=None) for one in node.cordons if one.kind is not CordonKind.SUSPICION)
    return _after(node, (*kept, opened), request, opened.number)


def _not_a_person(request: OperatorRequest, verb: str) -> TransitionRefused | None:
    if not request.owner.person:
        return TransitionRefused(f"{request.owner.name} is a program, and only a person may {verb} a node")
    return None if request.reason.strip() else TransitionRefused(f"a reason is needed to {verb} a node. Give one with `--reason`")


# -- cordons and states -------------------------------------------------------------------------------------------------


def _new_cordon(node: Node, kind: CordonKind, request: OperatorRequest, *, until: float | None = None) -> Cordon:
    return Cordon(
        number=node.number + 1,
        kind=kind,
        owner=request.owner,
        reason=request.reason,
        evidence=request.evidence,
        faults=request.faults,
        at=request.at,
        until=until,
    )


def _with_faults(present: Cordon, request: OperatorRequest) -> Cordon:
    """Return *present* with the faults of *request* added: a burn-in must exercise the parts of all of them."""
    evidence = (*present.evidence, *(one for one in request.evidence if one not in present.evidence))
    return replace(present, evidence=evidence, faults=_merged(present.faults, request.faults))


def _merged(first: Iterable[CordonedFault], second: Iterable[CordonedFault]) -> tuple[CordonedFault, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _open(node: Node, number: int, kinds: frozenset[CordonKind]) -> Cordon | None:
    return next((one for one in node.cordons if one.number == number and one.kind in kinds), None)


def _with(node: Node, changed: Cordon) -> tuple[Cordon, ...]:
    return tuple(changed if one.number == changed.number else one for one in node.cordons)


def _without(node: Node, gone: Cordon) -> tuple[Cordon, ...]:
    return tuple(one for one in node.cordons if one.number != gone.number)


def _after(node: Node, cordons: tuple[Cordon, ...], request: OperatorRequest, number: int, event: NodeEvent | None = None) -> CordonChanged:
    """Return the node with these *cordons*, and the state change that results, if any."""
    state = state_of(cordons)
    newest = max([node.number, *(one.number for one in cordons)])
    after = replace(node, cordons=cordons, number=newest)
    if state is not node.state:
        named = _event(node.state, state, event)
        after = replace(
            after,
            state=move_node(node.state, named),
            since=request.at,
            transitions=node.transitions + 1,
            back=request.at if state is NodeState.HEALTHY else node.back,
        )
        change = NodeTransition(
            at=request.at, before=node.state, event=named, after=state, owner=request.owner, reason=request.reason, cordon=number
        )
        return CordonChanged(node=after, transitions=(change,), owner=request.owner, reason=request.reason, at=request.at, cordon=number)
    return CordonChanged(node=after, owner=request.owner, reason=request.reason, at=request.at, cordon=number)


def _event(before: NodeState, after: NodeState, wanted: NodeEvent | None) -> NodeEvent:
    """Return the event of the transition between two states; *wanted* if the table lists several."""
    listed = [event for (state, event), to in NODE_MOVES.items() if (state, to) == (before, after)]
    if wanted in listed:
        return wanted
    if not listed:
        raise UnlistedTransition(before, after)
    return listed[0]
