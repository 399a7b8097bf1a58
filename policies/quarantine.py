"""Quarantine: functions from a node and a request about it to the changed node, or to the reason why nothing changes.

A node's open cordons decide its state. Each has an owner, a reason, evidence, a number and perhaps an end. Only a person lifts a person's
cordon, unless it expires; a program's cordon is lifted by a burn-in that passed for it, or by a person. An outdated request (about a cordon
that is not open, or with evidence from before the node's last return to service) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from policies.cordons import (
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
from policies.node_states import NODE_MOVES, NodeEvent, NodeState, move_node
from policies.states import UnlistedTransition

# -- requests of programs ----------------------------------------------------------------------------------------------


def doubt(node: Node, request: OperatorRequest, limits: QuarantineLimits) -> Answer:
    """Make a node suspect; too many suspicions within the window quarantine it."""
    if request.evident <= node.back:
        return OutOfDate(f"{node.name} returned to service after that was seen")
    if node.is_isolated:
        return OutOfDate(f"{node.name} is {node.state} already")
    if node.doubts and request.evident <= node.doubts[-1]:
        return OutOfDate(f"{node.name} was suspect after that was seen")
    rules = limits.rules
    recent = [at for at in node.doubts if at > node.back and request.at - at < rules.doubt_window]
    node = replace(node, doubts=(*node.doubts, request.at))
    before = [fault for one in node.of_kind(CordonKind.DOUBT) for fault in one.faults]
    opened = _hold(node, CordonKind.DOUBT, replace(request, faults=_merged(before, request.faults)), until=request.at + rules.doubt_window)
    suspected = _after(node, (opened,), request, opened.number)
    if not rules.doubts or len(recent) + 1 < rules.doubts:
        return suspected
    times = replace(
        request,
        reason=f"suspect {len(recent) + 1} times within {rules.doubt_window / 3600:g} h, last: {request.reason}",
        faults=opened.faults,
    )
    answer = quarantine(node, times, limits)
    return answer if isinstance(answer, CordonChanged) else suspected


def quarantine(node: Node, request: OperatorRequest, limits: QuarantineLimits) -> Answer:
    """Quarantine a node for a fault of its own: each time for longer, and finally retire it."""
    if request.evident <= node.back:
        return OutOfDate(f"{node.name} returned to service after that was seen")
    present = node.of_kind(CordonKind.QUARANTINE, CordonKind.RETIREMENT)
    if present and not present[0].test:
        if any(fault not in present[0].faults for fault in request.faults):
            return _after(node, _with(node, _with_faults(present[0], request)), request, present[0].number)
        how = "retired" if node.of_kind(CordonKind.RETIREMENT) else "quarantined"
        return OutOfDate(f"{node.name} is {how} already, by cordon {present[0].number}")
    if present:
        return _failed(node, _with_faults(present[0], request), request, f"a fault came during the burn-in: {request.reason}", limits.rules)
    if not node.is_isolated and limits.isolated + 1 > limits.most and not request.approved:
        return NeedsPerson(
            f"{limits.isolated} of the cluster's {limits.size} node(s) are out of service, and programs may isolate {limits.most}"
        )
    rules = limits.rules
    count = sum(at > node.pardoned and request.at - at < rules.window for at in node.quarantines) + 1
    node = replace(node, quarantines=(*node.quarantines, request.at))
    kept = tuple(one for one in node.holds if one.kind not in {CordonKind.DOUBT, CordonKind.UNTESTED})
    if rules.retire and count >= rules.retire:
        changed = replace(request, reason=f"quarantine {count} within {rules.window / 86400:g} d: {request.reason}")
        opened = _hold(node, CordonKind.RETIREMENT, changed)
    else:
        opened = _hold(node, CordonKind.QUARANTINE, request, until=request.at + rules.cool * 2 ** (count - 1))
    return _after(node, (*kept, opened), request, opened.number)


def begin_burn_in(node: Node, request: OperatorRequest, number: int, *, seconds: float) -> Answer:
    """Start the burn-in that may lift cordon *number*; its result is valid for *seconds*."""
    hold = _open(node, number, TESTABLE)
    if hold is None:
        return OutOfDate(f"{node.name} has no open cordon {number} that a burn-in could lift")
    if hold.test:
        return TransitionRefused(f"burn-in {hold.test} runs on {node.name} already. Wait for its end")
    if node.state is NodeState.RETIRED:
        return TransitionRefused(f"{node.name} is retired. `holdfast node return {node.name} --reason ...` returns it to service")
    tested = replace(hold, test=node.number + 1, test_until=request.at + seconds)
    done = _after(replace(node, number=tested.test), _with(node, tested), request, number)
    return replace(done, test=tested.test)


def end_burn_in(node: Node, request: OperatorRequest, ran: BurnInAttempt, *, passed: bool | None, rules: Rules) -> Answer:
    """Apply the outcome of a burn-in: if *passed*, it lifts the cordon that it was started for.

    A failed burn-in counts against the node; one that could not run (None) does not.
    """
    hold = _open(node, ran.hold, TESTABLE)
    if hold is None or not ran.number or hold.test != ran.number:
        return OutOfDate(f"burn-in {ran.number} for cordon {ran.hold} of {node.name} is not the running one")
    if passed is None:
        return _untried(node, hold, request, request.reason, rules)
    if not passed:
        return _failed(node, hold, request, request.reason, rules)
    return _after(node, _without(node, hold), request, ran.hold, NodeEvent.PASSED)


def settle(node: Node, now: float, rules: Rules) -> CordonChanged | None:
    """Apply one thing that expired by *now*: a suspicion, a burn-in that never ended, or a person's cordon."""
    clock = Owner(name="the clock")
    for hold in node.holds:
        ends = hold.test_until if hold.test else hold.until
        if ends is None or ends > now:
            continue
        request = OperatorRequest(owner=clock, reason=f"cordon {hold.number} of {hold.owner.name} expired", at=max(ends, node.since))
        if hold.test:
            return _untried(node, hold, request, f"burn-in {hold.test} did not end in time", rules)
        if hold.kind is CordonKind.DOUBT:
            return _after(node, _without(node, hold), request, hold.number, NodeEvent.CLEARED)
        if hold.kind is CordonKind.PERSON:
            return _run_out(node, hold, request)
    return None


def _run_out(node: Node, hold: Cordon, request: OperatorRequest) -> CordonChanged:
    """End an expired person's cordon, and require a burn-in."""
    rest = _without(node, hold)
    if any(one.kind in TESTABLE for one in rest):
        return _after(node, rest, request, hold.number, NodeEvent.RETURNED)
    changed = replace(request, reason=f"cordoned by {hold.owner.name} until then ({hold.reason}); a burn-in must pass")
    opened = _hold(node, CordonKind.UNTESTED, changed, until=request.at)
    return _after(node, (*rest, opened), changed, hold.number, NodeEvent.RETURNED)


def _failed(node: Node, hold: Cordon, request: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """Record a failed burn-in; the next one is due after twice the time, and after too many the node is retired."""
    changed = replace(request, reason=reason)
    count = sum(at > node.pardoned and request.at - at < rules.window for at in node.failures) + 1
    failed = replace(hold, test=0, test_until=None, until=request.at + rules.cool * 2 ** (count - 1))
    if rules.failures and count >= rules.failures:
        often = replace(request, reason=f"failed burn-in {count} within {rules.window / 86400:g} d: {reason}")
        opened = _hold(node, CordonKind.RETIREMENT, often)
        return _after(node, (*_with(node, failed), opened), often, opened.number)
    if node.state is NodeState.IN_BURN_IN:  # a node that a person cordoned keeps its state and counts no failures
        node = replace(node, failures=(*node.failures, request.at))
    return _after(node, _with(node, failed), changed, hold.number, NodeEvent.FAILED)


def _untried(node: Node, hold: Cordon, request: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """Record a burn-in that could not run; the next one is due after the time of a first quarantine."""
    changed = replace(request, reason=reason)
    ended = replace(hold, test=0, test_until=None, until=request.at + rules.cool)
    return _after(node, _with(node, ended), changed, hold.number, NodeEvent.UNTRIED)


# -- requests of persons -----------------------------------------------------------------------------------------------


def hold(node: Node, request: OperatorRequest, *, until: float | None = None) -> Answer:
    """Cordon a node for a person, perhaps *until* a time, in addition to its other cordons."""
    if refused := _not_a_person(request, "hold"):
        return refused
    opened = _hold(node, CordonKind.PERSON, request, until=until)
    kept = tuple(one for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), request, opened.number)


def drain(node: Node, request: OperatorRequest, *, leave_by: float | None = None) -> Answer:
    """Cordon a node for a person and drain it, perhaps by a deadline. A person lifts the cordon afterwards."""
    if refused := _not_a_person(request, "drain"):
        return refused
    mine = next((one for one in node.holds if one.drains and one.owner == request.owner), None)
    if mine is not None:  # a repeated request changes deadline and reason
        changed = replace(mine, reason=request.reason, leave_by=leave_by)
        return _after(node, _with(node, changed), request, mine.number)
    opened = replace(_hold(node, CordonKind.PERSON, request), drains=True, leave_by=leave_by)
    kept = tuple(one for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), request, opened.number)


def cancel_drain(node: Node, request: OperatorRequest) -> Answer:
    """Lift all cordons that drain a node; other cordons stay."""
    if refused := _not_a_person(request, "cancel the drain of"):
        return refused
    asked = [one for one in node.holds if one.drains]
    if not asked:
        return TransitionRefused(f"{node.name} is not being drained; it is {node.state}")
    return _after(node, tuple(one for one in node.holds if not one.drains), request, asked[-1].number)


def release(node: Node, request: OperatorRequest, number: int | None = None) -> Answer:
    """Lift a person's cordon: the only one, or the one with this *number*. Cordons of programs stay."""
    if refused := _not_a_person(request, "release"):
        return refused
    held = node.of_kind(CordonKind.PERSON)
    if number is not None:
        held = tuple(one for one in held if one.number == number)
        if not held:
            return OutOfDate(f"{node.name} has no open cordon {number} of a person")
    if not held:
        cure = "" if node.state is NodeState.HEALTHY else f". `holdfast node return {node.name} --reason ...` returns it to service"
        return TransitionRefused(f"{node.name} is {node.state}: no person cordoned it{cure}")
    if len(held) > 1:
        which = ", ".join(f"{one.number} ({one.owner.name}: {one.reason})" for one in held)
        return TransitionRefused(f"{node.name} has {len(held)} cordons of persons: {which}. Select one with `--number`")
    return _after(node, _without(node, held[0]), request, held[0].number)


def readmit(node: Node, request: OperatorRequest, number: int | None = None) -> Answer:
    """Return a node to service without a burn-in: lift the cordons of programs and a retirement; a person's cordon stays."""
    if refused := _not_a_person(request, "readmit"):
        return refused
    mine = node.of_kind(*PROGRAMS)
    if number is not None and all(one.number != number for one in mine):
        return OutOfDate(f"{node.name} has no open cordon {number} of a program")
    if not mine:
        cure = f". `holdfast node uncordon {node.name} --reason ...` lifts it" if node.state is NodeState.HELD else ""
        return TransitionRefused(f"{node.name} is {node.state}: no program cordoned it{cure}")
    if node.of_kind(CordonKind.RETIREMENT):
        node = replace(node, pardoned=request.at)
    kept = node.of_kind(CordonKind.PERSON)
    event = NodeEvent.CLEARED if node.state is NodeState.SUSPECT else NodeEvent.READMITTED
    return _after(node, kept, request, mine[-1].number, event)


def retire(node: Node, request: OperatorRequest) -> Answer:
    """Retire a node for a person."""
    if refused := _not_a_person(request, "retire"):
        return refused
    if node.state is NodeState.RETIRED:
        return TransitionRefused(f"{node.name} is retired already, by cordon {node.of_kind(CordonKind.RETIREMENT)[0].number}")
    opened = _hold(node, CordonKind.RETIREMENT, request)
    kept = tuple(replace(one, test=0, test_until=None) for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), request, opened.number)


def _not_a_person(request: OperatorRequest, verb: str) -> TransitionRefused | None:
    if not request.owner.person:
        return TransitionRefused(f"{request.owner.name} is a program, and only a person may {verb} a node")
    return None if request.reason.strip() else TransitionRefused(f"a reason is needed to {verb} a node. Give one with `--reason`")


# -- cordons and states -------------------------------------------------------------------------------------------------


def _hold(node: Node, kind: CordonKind, request: OperatorRequest, *, until: float | None = None) -> Cordon:
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


def _with_faults(hold: Cordon, request: OperatorRequest) -> Cordon:
    """Return *hold* with the faults of *request* added: a burn-in must exercise the parts of all of them."""
    evidence = (*hold.evidence, *(one for one in request.evidence if one not in hold.evidence))
    return replace(hold, evidence=evidence, faults=_merged(hold.faults, request.faults))


def _merged(first: Iterable[CordonedFault], second: Iterable[CordonedFault]) -> tuple[CordonedFault, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _open(node: Node, number: int, kinds: frozenset[CordonKind]) -> Cordon | None:
    return next((one for one in node.holds if one.number == number and one.kind in kinds), None)


def _with(node: Node, changed: Cordon) -> tuple[Cordon, ...]:
    return tuple(changed if one.number == changed.number else one for one in node.holds)


def _without(node: Node, gone: Cordon) -> tuple[Cordon, ...]:
    return tuple(one for one in node.holds if one.number != gone.number)


def _after(node: Node, holds: tuple[Cordon, ...], request: OperatorRequest, number: int, event: NodeEvent | None = None) -> CordonChanged:
    """Return the node with these *holds*, and the state change that results, if any."""
    state = state_of(holds)
    newest = max([node.number, *(one.number for one in holds)])
    after = replace(node, holds=holds, number=newest)
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
            at=request.at, before=node.state, event=named, after=state, owner=request.owner, reason=request.reason, hold=number
        )
        return CordonChanged(node=after, transitions=(change,), owner=request.owner, reason=request.reason, at=request.at, hold=number)
    return CordonChanged(node=after, owner=request.owner, reason=request.reason, at=request.at, hold=number)


def _event(before: NodeState, after: NodeState, wanted: NodeEvent | None) -> NodeEvent:
    """Return the event of the transition between two states; *wanted* if the table lists several."""
    listed = [event for (state, event), to in NODE_MOVES.items() if (state, to) == (before, after)]
    if wanted in listed:
        return wanted
    if not listed:
        raise UnlistedTransition(before, after)
    return listed[0]
