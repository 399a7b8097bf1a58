"""When a node is suspect, quarantined, quarantined for longer, and decommissioned: by numbers that a reader can check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.nodes.cordons import (
    Answer,
    CordonChanged,
    CordonedFault,
    NeedsPerson,
    Node,
    OperatorRequest,
    OutOfDate,
    Owner,
    QuarantineLimits,
    Rules,
    TransitionRefused,
    describe,
)
from holdfast.policies.nodes.node_faults import find_node_faults, isolating_fault
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import (
    begin_burn_in,
    cordon,
    decommission,
    end_burn_in,
    quarantine,
    return_to_service,
    settle,
    suspect,
    uncordon,
)
from tests.mentions import mentions
from tests.policies.cases import NOW, a_case

JOB, ANN, BOB = Owner(name="job gpt"), Owner(name="ann@desk", person=True), Owner(name="bob@desk", person=True)
WARD = QuarantineLimits(size=8, isolated=0)
FRESH = Node(name="a")


def word(at: float, owner: Owner = JOB, **fields: Any) -> OperatorRequest:
    """Return a word that *owner* says at that time."""
    return OperatorRequest(**{"owner": owner, "reason": "Xid 79", "at": at, **fields})


def done(answer: Answer) -> Node:
    """Return the node after a word that was carried out."""
    assert isinstance(answer, CordonChanged), answer
    return answer.node


def test_the_third_suspicion_within_a_day_quarantines() -> None:
    """Two make it suspect; one that is a day old does not count any more, nor one that was seen before the last was reported."""
    rules = Rules(suspicions=3, suspicion_window=100.0)
    ward = replace(WARD, rules=rules)
    once = done(suspect(FRESH, word(10.0), ward))
    assert (once.state, once.cordons[0].until) == (NodeState.SUSPECT, 110.0)
    assert isinstance(suspect(once, word(11.0, seen=9.0), ward), OutOfDate)
    twice = done(suspect(once, word(20.0), ward))
    assert twice.state is NodeState.SUSPECT
    assert len(twice.cordons) == 1, "the newer suspicion stands for both"
    third = done(suspect(twice, word(30.0), ward))
    assert third.state is NodeState.QUARANTINED
    assert "suspect 3 times" in third.cordons[0].reason
    assert done(suspect(twice, word(115.0), ward)).state is NodeState.SUSPECT, "the first is too old"
    assert done(suspect(twice, word(30.0), replace(ward, rules=replace(rules, suspicions=0)))).state is NodeState.SUSPECT
    assert done(suspect(twice, word(30.0), replace(ward, isolated=2))).state is NodeState.SUSPECT, "programs may take no more out"


def test_a_cordon_names_all_its_faults() -> None:
    """A further fault of a quarantined node joins its cordon, also while a burn-in runs; the same one again is nothing new."""
    gpu, disk, link = (
        CordonedFault(kind=kind, device=device)
        for kind, device in (("gpu-off-bus", "0000:18:00"), ("smart-failed", ""), ("link-down", "eth0"))
    )
    out = done(quarantine(FRESH, word(1.0, faults=(gpu,), evidence=("gpu-off-bus",)), WARD))
    assert isinstance(quarantine(out, word(2.0, faults=(gpu,)), WARD), OutOfDate)
    both = done(quarantine(out, word(3.0, faults=(disk,), evidence=("smart-failed",)), WARD))
    assert (both.state, len(both.cordons), both.transitions) == (NodeState.QUARANTINED, 1, out.transitions)
    assert (both.cordons[0].faults, both.cordons[0].evidence) == ((gpu, disk), ("gpu-off-bus", "smart-failed"))
    tested = done(begin_burn_in(both, word(4.0), 1, seconds=60.0))
    failed = done(quarantine(tested, word(5.0, faults=(link,)), WARD))
    assert (failed.state, failed.cordons[0].faults) == (NodeState.QUARANTINED, (gpu, disk, link))


def test_suspicions_that_add_up_to_a_quarantine_pass_their_faults_on() -> None:
    """Each of the three is to be tested."""
    node = FRESH
    faults = [CordonedFault(kind=kind) for kind in ("cuda-contained", "worker-sigill", "cuda-contained")]
    for at, fault in enumerate(faults, start=1):
        node = done(suspect(node, word(float(at), faults=(fault,)), WARD))
    assert node.state is NodeState.QUARANTINED
    assert node.cordons[0].faults == tuple(faults[:2])


def test_a_suspicion_expires() -> None:
    """Time alone clears it."""
    once = done(suspect(FRESH, word(10.0), WARD))
    assert settle(once, 10.0 + Rules().suspicion_window - 1, Rules()) is None
    cleared = settle(once, 10.0 + Rules().suspicion_window, Rules())
    assert cleared is not None
    assert (cleared.node.state, cleared.transitions[0].event) == (NodeState.HEALTHY, "cleared")


def test_a_repeated_offender_stays_out_twice_as_long_and_is_decommissioned_at_last() -> None:
    """The fourth quarantine within a month is the last; taken back from that, it begins anew."""
    node, at, lasting = FRESH, 0.0, []
    for _ in range(3):
        at += 10_000.0
        node = done(quarantine(node, word(at), WARD))
        until = node.cordons[0].until
        assert until is not None
        lasting.append(until - at)
        node = done(return_to_service(node, word(at + 1, ANN)))
    assert lasting == [3_600.0, 7_200.0, 14_400.0]
    gone = done(quarantine(node, word(at + 10), WARD))
    assert gone.state is NodeState.DECOMMISSIONED
    assert "quarantine 4 within 30 d" in gone.cordons[0].reason
    again = done(quarantine(done(return_to_service(gone, word(at + 20, ANN))), word(at + 30), WARD))
    assert (again.state, again.cordons[0].until) == (NodeState.QUARANTINED, at + 30 + 3_600.0)
    late = at + 31 * 86_400.0
    assert done(quarantine(node, word(late), WARD)).cordons[0].until == late + 3_600.0, "a month later nothing is counted"


@pytest.mark.parametrize(
    ("size", "isolated", "may"),
    [(1, 0, True), (3, 0, True), (3, 1, False), (8, 1, True), (8, 2, False), (100, 24, True), (100, 25, False)],
)
def test_programs_take_out_a_quarter_at_most_and_one_always(size: int, isolated: int, may: bool) -> None:  # noqa: FBT001 (a row of a table)
    """What goes beyond needs a person, who may."""
    answer = quarantine(FRESH, word(1.0), QuarantineLimits(size=size, isolated=isolated))
    assert isinstance(answer, CordonChanged if may else NeedsPerson)
    if not may:
        assert isinstance(answer, NeedsPerson)
        assert mentions(answer.why, isolated, size)
        approved = quarantine(FRESH, replace(word(1.0), approved="ann@desk"), QuarantineLimits(size=size, isolated=isolated))
        assert isinstance(approved, CordonChanged)
    assert isinstance(cordon(FRESH, word(1.0, ANN)), CordonChanged)


def test_a_persons_cordon_over_a_quarantine_outlives_the_burn_in() -> None:
    """The program's is lifted by the burn-in that was passed for it; the node stays cordoned."""
    both = done(cordon(done(quarantine(FRESH, word(1.0), WARD)), word(2.0, ANN)))
    begun = begin_burn_in(both, word(3.0), 1, seconds=60.0)
    assert isinstance(begun, CordonChanged)
    passed = done(end_burn_in(begun.node, word(4.0), begun.burn_in, passed=True, rules=Rules()))
    assert (passed.state, [one.owner for one in passed.cordons]) == (NodeState.CORDONED, [ANN])
    assert done(uncordon(passed, word(5.0, BOB))).state is NodeState.HEALTHY


def test_an_uncordon_during_a_burn_in_lets_it_go_on() -> None:
    """And without one the node waits for it."""
    both = done(cordon(done(quarantine(FRESH, word(1.0), WARD)), word(2.0, ANN)))
    assert done(uncordon(both, word(5.0, ANN))).state is NodeState.QUARANTINED
    begun = done(begin_burn_in(both, word(3.0), 1, seconds=60.0))
    assert done(uncordon(begun, word(5.0, ANN))).state is NodeState.IN_BURN_IN


def test_of_two_persons_cordons_one_must_be_named() -> None:
    """A person does not lift another one's by accident; the numbers are shown."""
    both = done(cordon(done(cordon(FRESH, word(1.0, ANN))), word(2.0, BOB)))
    answer = uncordon(both, word(3.0, ANN))
    assert isinstance(answer, TransitionRefused)
    assert mentions(answer.why, "1 (ann@desk", "2 (bob@desk")
    one = done(uncordon(both, word(3.0, ANN), 1))
    assert (one.state, [left.number for left in one.cordons]) == (NodeState.CORDONED, [2])
    assert isinstance(uncordon(one, word(4.0, ANN), 1), OutOfDate)


@pytest.mark.parametrize("verb", [cordon, uncordon, return_to_service, decommission])
def test_a_persons_request_needs_a_person_and_a_reason(verb: Any) -> None:
    """Both are said in the refusal."""
    both = done(cordon(done(quarantine(FRESH, word(1.0), WARD)), word(2.0, ANN)))
    for owner, reason, words in ((JOB, "well", "job gpt is a program"), (ANN, " ", "a reason is needed")):
        answer = verb(both, OperatorRequest(owner=owner, reason=reason, at=3.0))
        assert isinstance(answer, TransitionRefused)
        assert words in answer.why


def test_a_fault_in_a_burn_in_fails_it() -> None:
    """It counts as no further quarantine, and the late word of that burn-in is out of date."""
    begun = begin_burn_in(done(quarantine(FRESH, word(1.0), WARD)), word(2.0), 1, seconds=60.0)
    assert isinstance(begun, CordonChanged)
    failed = done(quarantine(begun.node, word(3.0), WARD))
    assert (failed.state, len(failed.quarantines), failed.cordons[0].number) == (NodeState.QUARANTINED, 1, 1)
    assert isinstance(end_burn_in(failed, word(4.0), begun.burn_in, passed=True, rules=Rules()), OutOfDate)


def test_a_decommissioned_node_is_not_tested() -> None:
    """The cure is a person's word."""
    gone = done(decommission(done(quarantine(FRESH, word(1.0), WARD)), word(2.0, ANN)))
    answer = begin_burn_in(gone, word(3.0), 1, seconds=60.0)
    assert isinstance(answer, TransitionRefused)
    assert mentions(answer.why, "holdfast node return a --reason")
    assert done(return_to_service(gone, word(4.0, ANN))).state is NodeState.HEALTHY


def test_failed_burn_ins_come_less_often_and_decommission_at_last() -> None:
    """Twice as long each time; one that could not be made is tried again soon, and counts for nothing."""
    rules, at, waits = Rules(cool=100.0, failures=3), 1_000.0, []
    node = done(quarantine(FRESH, word(at), replace(WARD, rules=rules)))
    for passed in (False, None, False, None, False):
        at += 1_000.0
        begun = begin_burn_in(node, word(at), 1, seconds=60.0)
        assert isinstance(begun, CordonChanged)
        node = done(end_burn_in(begun.node, word(at), begun.burn_in, passed=passed, rules=rules))
        waits.append((node.cordons[0].until or 0.0) - at)
    assert waits[:4] == [100.0, 100.0, 200.0, 100.0]
    assert node.state is NodeState.DECOMMISSIONED
    assert mentions(node.cordons[-1].reason, "burn-in 3", "30 d", "Xid 79")
    assert [one.kind for one in node.cordons] == ["quarantine", "decommission"], "what it was quarantined for stays on record"


def test_a_failed_burn_in_below_a_persons_cordon_leaves_that_cordon() -> None:
    """Nothing moves, nothing is counted: the person decides."""
    both = done(cordon(done(quarantine(FRESH, word(1.0), WARD)), word(2.0, ANN)))
    begun = begin_burn_in(both, word(3.0), 1, seconds=60.0)
    assert isinstance(begun, CordonChanged)
    failed = done(end_burn_in(begun.node, word(4.0), begun.burn_in, passed=False, rules=Rules()))
    assert (failed.state, failed.failures) == (NodeState.CORDONED, ())
    assert [one.owner for one in failed.cordons] == [JOB, ANN]


def test_the_reason_names_owner_number_and_cure() -> None:
    """Whoever meets the node knows whom to ask and what to do."""
    assert describe(FRESH) == ""
    assert describe(done(suspect(FRESH, word(1.0), WARD))) == ""
    out = done(quarantine(FRESH, word(1.0), WARD))
    assert mentions(describe(out), NodeState.QUARANTINED, "job gpt", "cordon 1", "Xid 79", "holdfast node return a --reason")
    assert mentions(describe(done(cordon(out, word(2.0, ANN)))), "cordoned", "ann@desk", "cordon 2", "Xid 79", "holdfast node uncordon a")
    assert mentions(describe(done(decommission(out, word(2.0, ANN)))), "decommissioned", "ann@desk", "cordon 2")


# -- what a node has to answer for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "severe"),
    [
        ("gpu-off-bus", True),
        ("node-lost", None),
        ("worker-start-failed", None),
        ("agent-lost", None),
        ("worker-sigkill", None),
        ("worker-exception", None),
        ("worker-oom-killed", False),
        ("node-partitioned", True),
        ("pairwise-partition", False),
    ],
)
def test_a_node_answers_for_its_own_faults_and_not_for_having_ended(kind: str, severe: bool | None) -> None:  # noqa: FBT001
    """What asks for it to leave is grave, what speaks against it is a suspicion, what the script did is neither."""
    assert [(one.node, one.severe) for one in find_node_faults(a_case(kind, "a"), ("a",))] == ([] if severe is None else [("a", severe)])


def test_what_was_done_to_a_node_is_not_its_own() -> None:
    """A fault that another one explains is excused; a node that stays is not asked."""
    root = Fault(kind="gpu-off-bus", at=NOW, node="a", quote="Xid 79")
    other = Fault(kind="gpu-off-bus", at=NOW, node="b", quote="Xid 79")
    case = replace(a_case(), diagnosis=Diagnosis(root=root, secondary_failures=(other,), reason="", excused=(other,)))
    assert [one.node for one in find_node_faults(case, ("a", "b"))] == ["a"]
    assert find_node_faults(case, ("c",)) == []
    (found,) = find_node_faults(case, ("a",))
    assert (found.evidence, found.seen) == ((found.reason,), NOW)
    assert mentions(found.reason, "gpu-off-bus", "Xid 79")


def test_a_lost_node_whose_gpu_fell_off_before_answers_for_that() -> None:
    """The root is that it is gone; the evidence is what it said before."""
    (found,) = find_node_faults(a_case("node-lost", "a", ("gpu-off-bus", "a")), ("a",))
    assert found.severe
    assert mentions(found.reason, "gpu-off-bus")
    assert isolating_fault([], CATALOGUE_ACTIONS) is None


def test_correlated_faults_count_against_no_node_and_recurring_ones_against_theirs() -> None:
    """What the rules of the policy noted counts; so do the levels of a policy file."""
    case = a_case("gpu-off-bus", "a")
    assert find_node_faults(replace(case, correlated=frozenset({"gpu-off-bus"})), ("a",)) == []
    soft = replace(case, recommended_actions=RecommendedActions(changed={"gpu-off-bus": RecommendedAction.MONITOR}))
    assert [one.severe for one in find_node_faults(soft, ("a",))] == [False]
    worn = replace(soft, worn=frozenset({"a"}), notes=("gpu-off-bus for time 4 within 86400 s on a: too often, the node is replaced",))
    (found,) = find_node_faults(worn, ("a",))
    assert (found.severe, found.reason) == (True, worn.notes[0])
