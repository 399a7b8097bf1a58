"""What holds for every order of words about nodes: tried out by hypothesis against the invariants that people trust quarantine for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.policies.nodes import quarantine as needs_action
from holdfast.policies.nodes.cordons import (
    TESTABLE,
    Answer,
    BurnInAttempt,
    CordonChanged,
    CordonKind,
    NeedsPerson,
    Node,
    OperatorRequest,
    OutOfDate,
    Owner,
    QuarantineLimits,
    Rules,
    TransitionRefused,
    state_of,
)
from holdfast.policies.nodes.node_states import IN_SERVICE, NODE_MOVES, NodeState

NAMES = ("a", "b", "c", "d", "e")
A_NODE = st.sampled_from(NAMES)
PERSON, PROGRAM = Owner(name="ann@desk", person=True), Owner(name="job gpt")
WHO = st.sampled_from([PERSON, PROGRAM])
A_NUMBER = st.integers(0, 12)
"""Of a cordon or a burn-in: open, closed, or never given."""
AN_OUTCOME = st.sampled_from([True, False, None])
"""Of a burn-in: passed, failed, could not be made."""
RULES = Rules(max_unavailable=0.4, suspicions=2, suspicion_window=50.0, cool=10.0, decommission_after=3, failures=2, window=200.0)
KEPT = frozenset({CordonKind.QUARANTINE, CordonKind.UNTESTED, CordonKind.DECOMMISSION})


class Wards(RuleBasedStateMachine):
    """Words of programs and persons in any order, late ones and wrong ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.nodes = {name: Node(name=name) for name in NAMES}

    # -- where nodes are kept -------------------------------------------------------------------------------------------

    def read(self, name: str) -> Node:
        """Return the node as it is."""
        return self.nodes[name]

    def ward(self, name: str) -> QuarantineLimits:
        """Return the cluster around a node."""
        return QuarantineLimits(size=len(NAMES), isolated=sum(self.read(one).is_isolated for one in NAMES if one != name), rules=RULES)

    def say(self, name: str, act: Callable[[Node, QuarantineLimits], Answer]) -> Answer:
        """Say a word about a node, and keep what comes of it."""
        answer = act(self.read(name), self.ward(name))
        if isinstance(answer, CordonChanged):
            self.nodes[name] = answer.node
        return answer

    def run_out(self, name: str) -> int:
        """Let come about what has run out; return how many moves that were: a person's cordon and a burn-in may run out at once."""
        moves = 0
        while (done := needs_action.settle(self.read(name), self.now, RULES)) is not None:
            self.moves_are_listed(self.read(name), done)
            self.nodes[name] = done.node
            moves += len(done.transitions)
        return moves

    # -- what must never happen -----------------------------------------------------------------------------------------

    def say_and_check(
        self, name: str, act: Callable[[Node, QuarantineLimits], Answer], *, person: bool = False, lifts: Iterable[int] = ()
    ) -> Answer:
        """Say a word; hold what came of it against what must never happen. A word may lift the cordons *lifts* and no other one."""
        before, out, rights = self.read(name), self.isolated(), frozenset(lifts)
        answer = self.say(name, act)
        after = self.read(name)
        if not isinstance(answer, CordonChanged):
            assert answer.why
            assert after == before, "a word that came to nothing left something behind"
            return answer
        self.moves_are_listed(before, answer)
        self.no_hold_is_lost(before, after, rights)
        self.counters_never_fall(before, after)
        if before.is_isolated and not after.is_isolated:
            assert rights, "it came back, and nobody had a right to bring it back"
        if not person and self.isolated() > out:
            assert self.isolated() <= max(1, int(RULES.max_unavailable * len(NAMES))), "a program took out more than its share"
        return answer

    def isolated(self) -> int:
        """Return how many nodes are out of service."""
        return sum(self.read(name).is_isolated for name in NAMES)

    def moves_are_listed(self, before: Node, done: CordonChanged) -> None:
        """Every move is one of the table, and explains the state that the node is in now."""
        assert [(one.before, one.after) for one in done.transitions] == (
            [(before.state, done.node.state)] if before.state is not done.node.state else []
        )
        assert all(NODE_MOVES[one.before, one.event] is one.after and one.reason for one in done.transitions)

    def no_hold_is_lost(self, before: Node, after: Node, lifts: frozenset[int]) -> None:
        """See that a cordon which keeps a node out goes only by a word that may lift it, or into a stronger one of a program."""
        left = {one.number for one in after.cordons}
        for cordon in before.cordons:
            if cordon.number in left or cordon.number in lifts or cordon.kind is CordonKind.SUSPICION:
                continue
            assert cordon.kind is CordonKind.UNTESTED, f"cordon {cordon.number} was lost"
            assert {one.kind for one in after.cordons} & {CordonKind.QUARANTINE, CordonKind.DECOMMISSION}

    def counters_never_fall(self, before: Node, after: Node, moves: int | None = None) -> None:
        """No number is given twice, and nothing that was counted is forgotten."""
        assert after.number >= before.number
        assert after.transitions == before.transitions + ((before.state is not after.state) if moves is None else moves)
        assert after.suspicions[: len(before.suspicions)] == before.suspicions
        assert after.quarantines[: len(before.quarantines)] == before.quarantines
        assert after.failures[: len(before.failures)] == before.failures
        assert all(one.number > before.number for one in after.cordons if one.number not in {old.number for old in before.cordons})

    # -- words ----------------------------------------------------------------------------------------------------------

    def word(self, owner: Owner, late: float = 0.0) -> OperatorRequest:
        """Return a word of *owner*, whose evidence is so many seconds old."""
        return OperatorRequest(owner=owner, reason="it was seen", at=self.now, seen=self.now - late)

    @rule(seconds=st.floats(0.5, 60.0))
    def time_passes(self, seconds: float) -> None:
        """Let what runs out run out, on every node: it brings nobody back."""
        self.now += seconds
        for name in NAMES:
            before = self.read(name)
            moves = self.run_out(name)
            ended = {one.number for one in before.of_kind(CordonKind.PERSON) if one.until is not None and one.until <= self.now}
            assert self.read(name).is_isolated == before.is_isolated
            self.no_hold_is_lost(before, self.read(name), frozenset(ended))
            self.counters_never_fall(before, self.read(name), moves)

    @rule(name=A_NODE, late=st.floats(0.0, 80.0))
    def suspect(self, name: str, late: float) -> None:
        """See a soft fault."""
        stale = self.now - late <= self.read(name).back
        answer = self.say_and_check(name, lambda node, ward: needs_action.suspect(node, self.word(PROGRAM, late), ward))
        assert not stale or isinstance(answer, OutOfDate)

    @rule(name=A_NODE, late=st.floats(0.0, 80.0))
    def quarantine(self, name: str, late: float) -> None:
        """See a fault that takes the node out."""
        node, out = self.read(name), self.isolated()
        answer = self.say_and_check(name, lambda node, ward: needs_action.quarantine(node, self.word(PROGRAM, late), ward))
        if self.now - late <= node.back:
            assert isinstance(answer, OutOfDate)
        elif not node.is_isolated:
            assert isinstance(answer, NeedsPerson) == (out >= 2)

    @rule(name=A_NODE)
    def quarantine_by_a_persons_leave(self, name: str) -> None:
        """See a fault that takes the node out, though more are out than programs may take: a person said so."""
        said = replace(self.word(PROGRAM), approved=PERSON.name)
        before = self.read(name)
        answer = self.say_and_check(name, lambda node, ward: needs_action.quarantine(node, said, ward), person=True)
        assert not isinstance(answer, NeedsPerson)
        assert before.is_isolated or self.now <= before.back or self.read(name).is_isolated

    @rule(name=A_NODE, number=A_NUMBER, seconds=st.floats(1.0, 30.0))
    def begin_burn_in(self, name: str, number: int, seconds: float) -> None:
        """Begin a burn-in, perhaps for a cordon that is not open."""
        is_open = number in {one.number for one in self.read(name).of_kind(*TESTABLE)}
        answer = self.say_and_check(name, lambda node, _: needs_action.begin_burn_in(node, self.word(PROGRAM), number, seconds=seconds))
        assert is_open or isinstance(answer, OutOfDate)

    @precondition(lambda self: any(self.read(name).of_kind(*TESTABLE) for name in NAMES))
    @rule(data=st.data())
    def the_right_burn_in_begins(self, data: st.DataObject) -> None:
        """Begin one for a cordon that is open."""
        due = [(name, one.number) for name in NAMES for one in self.read(name).of_kind(*TESTABLE)]
        name, number = data.draw(st.sampled_from(due))
        self.begin_burn_in(name, number, 20.0)

    @rule(name=A_NODE, cordon=A_NUMBER, number=A_NUMBER, passed=AN_OUTCOME)
    def a_late_burn_in_ends(self, name: str, cordon: int, number: int, passed: bool | None) -> None:  # noqa: FBT001 (hypothesis names it)
        """Receive the result of a burn-in that is mostly not the one that runs."""
        self.end(name, BurnInAttempt(cordon=cordon, number=number), passed=passed)

    @precondition(lambda self: any(one.test for name in NAMES for one in self.read(name).cordons))
    @rule(data=st.data(), passed=AN_OUTCOME)
    def the_burn_in_ends(self, data: st.DataObject, passed: bool | None) -> None:  # noqa: FBT001
        """Receive that of one that runs."""
        running = [
            (name, BurnInAttempt(cordon=one.number, number=one.test)) for name in NAMES for one in self.read(name).cordons if one.test
        ]
        name, ran = data.draw(st.sampled_from(running))
        self.end(name, ran, passed=passed)

    def end(self, name: str, ran: BurnInAttempt, *, passed: bool | None) -> None:
        """End a burn-in; only the one that runs may lift anything."""
        runs = {(one.number, one.test) for one in self.read(name).of_kind(*TESTABLE) if one.test}
        is_it = (ran.cordon, ran.number) in runs
        answer = self.say_and_check(
            name,
            lambda node, _: needs_action.end_burn_in(node, self.word(PROGRAM), ran, passed=passed, rules=RULES),
            lifts={ran.cordon} if passed and is_it else (),
        )
        assert isinstance(answer, CordonChanged if is_it else OutOfDate)

    @rule(name=A_NODE, who=WHO, lasts=st.none() | st.floats(1.0, 60.0))
    def cordon(self, name: str, who: Owner, lasts: float | None) -> None:
        """Hold a node; a program may not."""
        until = None if lasts is None else self.now + lasts
        answer = self.say_and_check(name, lambda node, _: needs_action.cordon(node, self.word(who), until=until), person=who.person)
        assert isinstance(answer, CordonChanged) == who.person

    @rule(name=A_NODE, who=WHO, number=st.none() | A_NUMBER)
    def uncordon(self, name: str, who: Owner, number: int | None) -> None:
        """Lift a person's cordon; a program may not, and where there are several it has to be named."""
        theirs = {one.number for one in self.read(name).of_kind(CordonKind.PERSON)}
        wanted = theirs if number is None else theirs & {number}
        answer = self.say_and_check(
            name, lambda node, _: needs_action.uncordon(node, self.word(who), number), person=True, lifts=wanted if who.person else ()
        )
        assert isinstance(answer, CordonChanged) == (who.person and len(wanted) == 1)

    @rule(name=A_NODE, who=WHO, seconds=st.none() | st.floats(-5.0, 60.0))
    def drain(self, name: str, who: Owner, seconds: float | None) -> None:
        """Have jobs leave a node; a program may not, and who says it again opens no second cordon."""
        leave_by = None if seconds is None else self.now + seconds
        before = self.read(name)
        answer = self.say_and_check(name, lambda node, _: needs_action.drain(node, self.word(who), leave_by=leave_by), person=who.person)
        assert isinstance(answer, CordonChanged) == who.person
        if who.person:
            after = self.read(name)
            assert after.is_isolated
            assert leave_by in {one.leave_by for one in after.cordons if one.drains}
            assert sum(one.drains for one in after.cordons) == max(1, sum(one.drains for one in before.cordons))

    @rule(name=A_NODE, who=WHO)
    def cancel_drain(self, name: str, who: Owner) -> None:
        """Let jobs stay on a node; a program may not, and cordons that do not drain stay."""
        before = self.read(name)
        asked = {one.number for one in before.cordons if one.drains}
        lifts = asked if who.person else ()
        answer = self.say_and_check(name, lambda node, _: needs_action.cancel_drain(node, self.word(who)), person=True, lifts=lifts)
        assert isinstance(answer, CordonChanged) == (who.person and bool(asked))
        assert self.read(name).drain is None or not who.person

    @rule(name=A_NODE, who=WHO, number=st.none() | A_NUMBER)
    def return_to_service(self, name: str, who: Owner, number: int | None) -> None:
        """Take a node back; a program may not, and a person's cordon stays."""
        before = self.read(name)
        lifts = [one.number for one in before.of_kind(*KEPT)] if who.person else []
        answer = self.say_and_check(
            name, lambda node, _: needs_action.return_to_service(node, self.word(who), number), person=True, lifts=lifts
        )
        if isinstance(answer, CordonChanged):
            assert who.person
            assert self.read(name).of_kind(CordonKind.PERSON) == before.of_kind(CordonKind.PERSON)

    @rule(name=A_NODE, who=WHO)
    def decommission(self, name: str, who: Owner) -> None:
        """Give a node up; a program may not by its word alone."""
        answer = self.say_and_check(name, lambda node, _: needs_action.decommission(node, self.word(who)), person=True)
        assert who.person or isinstance(answer, TransitionRefused)

    # -- always -----------------------------------------------------------------------------------------------------------

    @invariant()
    def every_node_is_in_the_one_state_that_its_holds_ask_for(self) -> None:
        """No node in two states, no two cordons with one number, at most one burn-in."""
        for name in NAMES:
            node = self.read(name)
            assert node.state is state_of(node.cordons)
            assert (node.state in IN_SERVICE) == (not node.is_isolated)
            assert len({one.number for one in node.cordons}) == len(node.cordons)
            assert sum(one.kind in TESTABLE for one in node.cordons) <= 1
            assert sum(bool(one.test) for one in node.cordons) <= 1
            assert max([0, *(max(one.number, one.test) for one in node.cordons)]) <= node.number


Wards.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWards = Wards.TestCase


def test_a_node_is_never_changed_in_place() -> None:
    """A word that comes to nothing cannot leave anything behind."""
    node = Node(name="a")
    answer = needs_action.quarantine(node, OperatorRequest(owner=PROGRAM, reason="Xid 79", at=5.0), QuarantineLimits(size=4, isolated=0))
    assert isinstance(answer, CordonChanged)
    assert node == Node(name="a")
    assert replace(answer.node, cordons=()).state is NodeState.QUARANTINED
