"""Who may take a node out of service, and what brings it back: pure, from a node and a word about it to the node after it.

A node's holds decide its state; each has an owner, a reason, evidence, a number and perhaps an end. A person's hold is lifted by a person
alone, or ends when that person said; a program's by a burn-in passed for that very hold, or by a person. Word that is out of date (of a
hold that is not open, or of evidence from before the node's last return) changes nothing, and says so.
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
from policies.states import UnlistedMove

# -- what programs say --------------------------------------------------------------------------------------------------


def doubt(node: Node, word: OperatorRequest, ward: QuarantineLimits) -> Answer:
    """Take note of a fault that asks for a look; as many as the rules say within the window quarantine the node."""
    if word.evident <= node.back:
        return OutOfDate(f"{node.name} came back after that was seen")
    if node.is_isolated:
        return OutOfDate(f"{node.name} is {node.state} already")
    if node.doubts and word.evident <= node.doubts[-1]:
        return OutOfDate(f"{node.name} was doubted after that was seen")
    rules = ward.rules
    recent = [at for at in node.doubts if at > node.back and word.at - at < rules.doubt_window]
    node = replace(node, doubts=(*node.doubts, word.at))
    before = [fault for one in node.of_kind(CordonKind.DOUBT) for fault in one.faults]
    opened = _hold(node, CordonKind.DOUBT, replace(word, faults=_merged(before, word.faults)), until=word.at + rules.doubt_window)
    suspected = _after(node, (opened,), word, opened.number)
    if not rules.doubts or len(recent) + 1 < rules.doubts:
        return suspected
    times = replace(
        word,
        reason=f"doubted {len(recent) + 1} times within {rules.doubt_window / 3600:g} h, last: {word.reason}",
        faults=opened.faults,
    )
    answer = quarantine(node, times, ward)
    return answer if isinstance(answer, CordonChanged) else suspected


def quarantine(node: Node, word: OperatorRequest, ward: QuarantineLimits) -> Answer:
    """Take a node out for a fault of its own; a repeated offender stays out longer each time, and at last for good."""
    if word.evident <= node.back:
        return OutOfDate(f"{node.name} came back after that was seen")
    present = node.of_kind(CordonKind.QUARANTINE, CordonKind.RETIREMENT)
    if present and not present[0].test:
        if any(fault not in present[0].faults for fault in word.faults):
            return _after(node, _with(node, _with_faults(present[0], word)), word, present[0].number)
        how = "retired" if node.of_kind(CordonKind.RETIREMENT) else "quarantined"
        return OutOfDate(f"{node.name} is {how} already, by hold {present[0].number}")
    if present:
        return _failed(node, _with_faults(present[0], word), word, f"a fault came in between: {word.reason}", ward.rules)
    if not node.is_isolated and ward.isolated + 1 > ward.most and not word.approved:
        return NeedsPerson(
            f"{ward.isolated} of the cluster's {ward.size} node(s) are out of service, and programs may take out {ward.most}"
        )
    rules = ward.rules
    count = sum(at > node.pardoned and word.at - at < rules.window for at in node.quarantines) + 1
    node = replace(node, quarantines=(*node.quarantines, word.at))
    kept = tuple(one for one in node.holds if one.kind not in {CordonKind.DOUBT, CordonKind.UNTESTED})
    if rules.retire and count >= rules.retire:
        told = replace(word, reason=f"quarantine {count} within {rules.window / 86400:g} d: {word.reason}")
        opened = _hold(node, CordonKind.RETIREMENT, told)
    else:
        opened = _hold(node, CordonKind.QUARANTINE, word, until=word.at + rules.cool * 2 ** (count - 1))
    return _after(node, (*kept, opened), word, opened.number)


def begin_burn_in(node: Node, word: OperatorRequest, number: int, *, seconds: float) -> Answer:
    """Begin the burn-in that may lift hold *number*; what it tells counts for so many *seconds*."""
    hold = _open(node, number, TESTABLE)
    if hold is None:
        return OutOfDate(f"{node.name} has no open hold {number} that a burn-in could lift")
    if hold.test:
        return TransitionRefused(f"burn-in {hold.test} runs on {node.name} already. Wait for its end")
    if node.state is NodeState.RETIRED:
        return TransitionRefused(f"{node.name} is retired. `holdfast nodes readmit {node.name} --reason ...` takes it back")
    tested = replace(hold, test=node.number + 1, test_until=word.at + seconds)
    done = _after(replace(node, number=tested.test), _with(node, tested), word, number)
    return replace(done, test=tested.test)


def end_burn_in(node: Node, word: OperatorRequest, ran: BurnInAttempt, *, passed: bool | None, rules: Rules) -> Answer:
    """Take the outcome of a burn-in: passed, it lifts the hold that it was begun for, and no other one.

    Not *passed* counts against the node; where it could not be made (None), nothing does.
    """
    hold = _open(node, ran.hold, TESTABLE)
    if hold is None or not ran.number or hold.test != ran.number:
        return OutOfDate(f"burn-in {ran.number} for hold {ran.hold} of {node.name} is not the one that runs")
    if passed is None:
        return _untried(node, hold, word, word.reason, rules)
    if not passed:
        return _failed(node, hold, word, word.reason, rules)
    return _after(node, _without(node, hold), word, ran.hold, NodeEvent.PASSED)


def settle(node: Node, now: float, rules: Rules) -> CordonChanged | None:
    """Let what has run out by *now* come about, one thing at a time: a doubt, a burn-in that never ended, a person's hold."""
    clock = Owner(name="the clock")
    for hold in node.holds:
        ends = hold.test_until if hold.test else hold.until
        if ends is None or ends > now:
            continue
        word = OperatorRequest(owner=clock, reason=f"hold {hold.number} of {hold.owner.name} ran out", at=max(ends, node.since))
        if hold.test:
            return _untried(node, hold, word, f"burn-in {hold.test} did not end in time", rules)
        if hold.kind is CordonKind.DOUBT:
            return _after(node, _without(node, hold), word, hold.number, NodeEvent.CLEARED)
        if hold.kind is CordonKind.PERSON:
            return _run_out(node, hold, word)
    return None


def _run_out(node: Node, hold: Cordon, word: OperatorRequest) -> CordonChanged:
    """End a person's hold when that person said, and leave the node to a burn-in."""
    rest = _without(node, hold)
    if any(one.kind in TESTABLE for one in rest):
        return _after(node, rest, word, hold.number, NodeEvent.RETURNED)
    told = replace(word, reason=f"held by {hold.owner.name} until then ({hold.reason}); a burn-in has to be passed")
    opened = _hold(node, CordonKind.UNTESTED, told, until=word.at)
    return _after(node, (*rest, opened), told, hold.number, NodeEvent.RETURNED)


def _failed(node: Node, hold: Cordon, word: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """End the burn-in of *hold* without having passed; the next one is due after twice as long each time, and none after the last."""
    told = replace(word, reason=reason)
    count = sum(at > node.pardoned and word.at - at < rules.window for at in node.failures) + 1
    failed = replace(hold, test=0, test_until=None, until=word.at + rules.cool * 2 ** (count - 1))
    if rules.failures and count >= rules.failures:
        often = replace(word, reason=f"failed burn-in {count} within {rules.window / 86400:g} d: {reason}")
        opened = _hold(node, CordonKind.RETIREMENT, often)
        return _after(node, (*_with(node, failed), opened), often, opened.number)
    if node.state is NodeState.IN_BURN_IN:  # while a person holds it nothing moves, and nothing is counted: that person decides
        node = replace(node, failures=(*node.failures, word.at))
    return _after(node, _with(node, failed), told, hold.number, NodeEvent.FAILED)


def _untried(node: Node, hold: Cordon, word: OperatorRequest, reason: str, rules: Rules) -> CordonChanged:
    """End the burn-in of *hold* that could not be made; the next one is due after the time that a first quarantine takes."""
    told = replace(word, reason=reason)
    ended = replace(hold, test=0, test_until=None, until=word.at + rules.cool)
    return _after(node, _with(node, ended), told, hold.number, NodeEvent.UNTRIED)


# -- what persons say ---------------------------------------------------------------------------------------------------


def hold(node: Node, word: OperatorRequest, *, until: float | None = None) -> Answer:
    """Take a node out by a person's word, perhaps *until* a time; beside whatever is held against it already."""
    if refused := _not_a_person(word, "hold"):
        return refused
    opened = _hold(node, CordonKind.PERSON, word, until=until)
    kept = tuple(one for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), word, opened.number)


def drain(node: Node, word: OperatorRequest, *, leave_by: float | None = None) -> Answer:
    """Take a node out by a person's word, and have the jobs on it leave, by a time if there is one. A person releases it afterwards."""
    if refused := _not_a_person(word, "drain"):
        return refused
    mine = next((one for one in node.holds if one.drains and one.owner == word.owner), None)
    if mine is not None:  # said again, it is another time or another reason, and no second wish
        changed = replace(mine, reason=word.reason, leave_by=leave_by)
        return _after(node, _with(node, changed), word, mine.number)
    opened = replace(_hold(node, CordonKind.PERSON, word), drains=True, leave_by=leave_by)
    kept = tuple(one for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), word, opened.number)


def cancel_drain(node: Node, word: OperatorRequest) -> Answer:
    """Lift the holds by which jobs were to leave a node, whoever asked for them; what else is held against it stays."""
    if refused := _not_a_person(word, "cancel the drain of"):
        return refused
    asked = [one for one in node.holds if one.drains]
    if not asked:
        return TransitionRefused(f"nobody drains {node.name}, which is {node.state}")
    return _after(node, tuple(one for one in node.holds if not one.drains), word, asked[-1].number)


def release(node: Node, word: OperatorRequest, number: int | None = None) -> Answer:
    """Lift a person's hold: the only one, or that of this *number*. What programs hold against the node stays."""
    if refused := _not_a_person(word, "release"):
        return refused
    held = node.of_kind(CordonKind.PERSON)
    if number is not None:
        held = tuple(one for one in held if one.number == number)
        if not held:
            return OutOfDate(f"{node.name} has no open hold {number} of a person")
    if not held:
        cure = "" if node.state is NodeState.HEALTHY else f". `holdfast nodes readmit {node.name} --reason ...` takes it back"
        return TransitionRefused(f"{node.name} is {node.state}: no person holds it{cure}")
    if len(held) > 1:
        which = ", ".join(f"{one.number} ({one.owner.name}: {one.reason})" for one in held)
        return TransitionRefused(f"{node.name} is held {len(held)} times: {which}. Name one by `--number`")
    return _after(node, _without(node, held[0]), word, held[0].number)


def readmit(node: Node, word: OperatorRequest, number: int | None = None) -> Answer:
    """Take a node back without a burn-in: lifts what programs hold against it, and a retirement; a person's hold stays."""
    if refused := _not_a_person(word, "readmit"):
        return refused
    mine = node.of_kind(*PROGRAMS)
    if number is not None and all(one.number != number for one in mine):
        return OutOfDate(f"{node.name} has no open hold {number} of a program")
    if not mine:
        cure = f". `holdfast nodes release {node.name} --reason ...` lifts it" if node.state is NodeState.HELD else ""
        return TransitionRefused(f"{node.name} is {node.state}: no program holds it{cure}")
    if node.of_kind(CordonKind.RETIREMENT):
        node = replace(node, pardoned=word.at)
    kept = node.of_kind(CordonKind.PERSON)
    event = NodeEvent.CLEARED if node.state is NodeState.SUSPECT else NodeEvent.READMITTED
    return _after(node, kept, word, mine[-1].number, event)


def retire(node: Node, word: OperatorRequest) -> Answer:
    """Give a node up by a person's word."""
    if refused := _not_a_person(word, "retire"):
        return refused
    if node.state is NodeState.RETIRED:
        return TransitionRefused(f"{node.name} is retired already, by hold {node.of_kind(CordonKind.RETIREMENT)[0].number}")
    opened = _hold(node, CordonKind.RETIREMENT, word)
    kept = tuple(replace(one, test=0, test_until=None) for one in node.holds if one.kind is not CordonKind.DOUBT)
    return _after(node, (*kept, opened), word, opened.number)


def _not_a_person(word: OperatorRequest, verb: str) -> TransitionRefused | None:
    if not word.owner.person:
        return TransitionRefused(f"{word.owner.name} is a program, and to {verb} a node is a person's word")
    return None if word.reason.strip() else TransitionRefused(f"to {verb} a node needs a reason. Say it by `--reason`")


# -- holds and moves ----------------------------------------------------------------------------------------------------


def _hold(node: Node, kind: CordonKind, word: OperatorRequest, *, until: float | None = None) -> Cordon:
    return Cordon(
        number=node.number + 1,
        kind=kind,
        owner=word.owner,
        reason=word.reason,
        evidence=word.evidence,
        faults=word.faults,
        at=word.at,
        until=until,
    )


def _with_faults(hold: Cordon, word: OperatorRequest) -> Cordon:
    """Return *hold* with the faults of *word* too: a burn-in has to exercise the parts of all of them."""
    evidence = (*hold.evidence, *(one for one in word.evidence if one not in hold.evidence))
    return replace(hold, evidence=evidence, faults=_merged(hold.faults, word.faults))


def _merged(first: Iterable[CordonedFault], second: Iterable[CordonedFault]) -> tuple[CordonedFault, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _open(node: Node, number: int, kinds: frozenset[CordonKind]) -> Cordon | None:
    return next((one for one in node.holds if one.number == number and one.kind in kinds), None)


def _with(node: Node, changed: Cordon) -> tuple[Cordon, ...]:
    return tuple(changed if one.number == changed.number else one for one in node.holds)


def _without(node: Node, gone: Cordon) -> tuple[Cordon, ...]:
    return tuple(one for one in node.holds if one.number != gone.number)


def _after(node: Node, holds: tuple[Cordon, ...], word: OperatorRequest, number: int, event: NodeEvent | None = None) -> CordonChanged:
    """Return the node with these *holds*, and the move that they ask for, if any."""
    state = state_of(holds)
    newest = max([node.number, *(one.number for one in holds)])
    after = replace(node, holds=holds, number=newest)
    if state is not node.state:
        named = _event(node.state, state, event)
        after = replace(
            after,
            state=move_node(node.state, named),
            since=word.at,
            moves=node.moves + 1,
            back=word.at if state is NodeState.HEALTHY else node.back,
        )
        move = NodeTransition(at=word.at, before=node.state, event=named, after=state, owner=word.owner, reason=word.reason, hold=number)
        return CordonChanged(node=after, moves=(move,), owner=word.owner, reason=word.reason, at=word.at, hold=number)
    return CordonChanged(node=after, owner=word.owner, reason=word.reason, at=word.at, hold=number)


def _event(before: NodeState, after: NodeState, wanted: NodeEvent | None) -> NodeEvent:
    """Return the event by which the table leads from one state to the other; *wanted* where it lists several."""
    listed = [event for (state, event), to in NODE_MOVES.items() if (state, to) == (before, after)]
    if wanted in listed:
        return wanted
    if not listed:
        raise UnlistedMove(before, after)
    return listed[0]
