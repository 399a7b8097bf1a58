"""What the three policies decide, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.associations import follows_step
from holdfast.detectors.catalogue import RecommendedAction, RecommendedActions
from holdfast.policies.recovery.escalation import POLICIES, Case, Decision, Pass, RecoveryAction, RecoveryBudget, decide
from holdfast.policies.recovery.policy import BASE, NAMED
from holdfast.spec import TrainingJob
from holdfast.spec.job import POLICIES as NAMES
from tests.each import each
from tests.mentions import mentions
from tests.policies.cases import NOW, a_case, a_diagnosis, a_recovery, decided

RETRY, REPLACE_RANKS, SHRINK_LIVE, RESTART, ROLLBACK, REPLACE, SHRINK, ASK, WAIT, FAIL = RecoveryAction
SPENT = tuple(a_recovery(node="a", at=NOW - 100 * n) for n in range(1, 4))
"""As many restarts in place of node a as its budget allows."""
FRUITLESS = (a_recovery(), *(a_recovery(node=node, made_progress=False) for node in "abc"))

BURST = tuple(replace(a_recovery(node=node, made_progress=False), kind="gpu-off-bus") for node in ("b", "c", "b"))
"""Recoveries in a burst: before each brought a step, the GPU of another node failed."""

ECC, LAUNCH = "cuda-uncorrectable-ecc", "cuda-launch-failure"
AGAIN = replace(a_recovery(), kind=LAUNCH)
"""A restart in place of node a for a failed CUDA launch."""

Row = tuple[Case, dict[str, RecoveryAction]]


def all_say(action: RecoveryAction) -> dict[str, RecoveryAction]:
    """Return that every policy decides the same."""
    return dict.fromkeys(POLICIES, action)


def they_say(patient: RecoveryAction, balanced: RecoveryAction, aggressive: RecoveryAction) -> dict[str, RecoveryAction]:
    """Return what each policy decides."""
    return {"patient": patient, "balanced": balanced, "aggressive": aggressive}


CASES: dict[str, Row] = {
    "a killed rank, no spare": (a_case(), all_say(RESTART)),
    "a killed rank, a spare": (a_case(spares=("s",)), they_say(RESTART, RESTART, REPLACE)),
    "a secondary failure alone, a spare": (a_case("worker-peer-lost", spares=("s",)), all_say(RESTART)),
    "a secondary failure alone while a node is lost, a spare": (a_case("worker-peer-lost", "b", lost="a", spares=("s",)), all_say(REPLACE)),
    "echoes until the budget is spent, a spare": (a_case("worker-peer-lost", spares=("s",), past=SPENT), all_say(REPLACE)),
    "a hang of no node, a spare": (a_case("job-hang", None, spares=("s",)), all_say(RESTART)),
    "a lost agent on a living node": (a_case("agent-lost", spares=("s",)), they_say(RESTART, RESTART, REPLACE)),
    "a worker restart that failed, a spare": (a_case(tried=(RESTART,), spares=("s",)), all_say(REPLACE)),
    "a worker restart that failed, no spare": (a_case(tried=(RESTART,)), all_say(WAIT)),
    "a worker restart that failed, no spare, fewer do": (a_case(tried=(RESTART,), least=2), they_say(WAIT, SHRINK, SHRINK)),
    "a restart in place of no node's fault that failed": (
        a_case("recovery-overrun", None, tried=(RESTART,), spares=("s",)), all_say(RESTART),
    ),
    "the node's budget spent, a spare": (a_case(past=SPENT, spares=("s",)), all_say(REPLACE)),
    "another node's budget spent": (a_case(node="b", past=SPENT), all_say(RESTART)),
    "the node's budget spent by other actions": (
        a_case(past=tuple(a_recovery(REPLACE, "a") for _ in range(3))), all_say(RESTART),
    ),
    "the node's budget spent before the window": (
        a_case(past=tuple(a_recovery(at=NOW - 3600.0) for _ in range(3))), all_say(RESTART),
    ),
    "no restarts in place allowed, a spare": (a_case(budget=RecoveryBudget(max_restarts_in_place=0), spares=("s",)), all_say(REPLACE)),
    "a GPU that has to be reset, a spare": (a_case("gpu-memory-double-bit", spares=("s",)), all_say(REPLACE)),
    "a GPU that has to be reset, no spare": (a_case("gpu-memory-double-bit"), all_say(WAIT)),
    "a GPU that has to be reset, no spare, fewer do": (a_case("gpu-memory-double-bit", least=2), they_say(WAIT, SHRINK, SHRINK)),
    "a GPU that has to be reset, no spare, a person can be asked": (a_case("gpu-memory-double-bit", approval_possible=True), all_say(ASK)),
    "an uncorrectable ECC error that a script reports, a spare": (a_case(ECC, spares=("s",)), all_say(REPLACE)),
    "an uncorrectable ECC error that a script reports, no spare": (a_case(ECC), all_say(WAIT)),
    "an uncorrectable ECC error that a script reports, a job of one node": (a_case(ECC, members=("a",), least=1), all_say(WAIT)),
    "an uncorrectable ECC error after the wait for another node": (a_case(ECC, members=("a",), least=1, tried=(WAIT,)), all_say(FAIL)),
    "an ECC error of memory beside a killed rank on another node, no spare": (
        a_case("worker-sigkill", "b", ("gpu-memory-double-bit", "a")), all_say(RESTART),
    ),
    "a broken disk that ended a rank, a spare": (a_case("ext4-error", spares=("s",)), all_say(REPLACE)),
    "a broken disk that ended a rank, no spare": (a_case("ext4-error"), all_say(RESTART)),
    "a failed CUDA launch, a spare": (a_case(LAUNCH, spares=("s",)), they_say(RESTART, RESTART, REPLACE)),
    "a failed CUDA launch a second time, a spare": (a_case(LAUNCH, spares=("s",), past=(AGAIN,)), all_say(REPLACE)),
    "a failed CUDA launch a second time, fewer do": (a_case(LAUNCH, least=2, past=(AGAIN,)), they_say(WAIT, SHRINK, SHRINK)),
    "a failed CUDA launch a second time, no other node": (a_case(LAUNCH, past=(AGAIN,)), all_say(RESTART)),
    "a killed rank a second time, a spare": (a_case(spares=("s",), past=(a_recovery(),)), they_say(RESTART, RESTART, REPLACE)),
    "a GPU that has to be reset beside a lost node, one spare": (
        a_case("node-lost", "b", ("gpu-memory-double-bit", "a"), spares=("s",)), all_say(REPLACE),
    ),
    "a GPU off the bus beside the process that died first elsewhere, a spare": (
        a_case("gpu-off-bus", "c", ("worker-exception", "a"), spares=("s",)), all_say(REPLACE),
    ),
    "a lost node, a spare": (a_case("node-lost", lost="a", spares=("s",)), all_say(REPLACE)),
    "a lost node, no spare": (a_case("node-lost", lost="a"), all_say(WAIT)),
    "a lost node, no spare, fewer do": (a_case("node-lost", lost="a", least=2), they_say(WAIT, SHRINK, SHRINK)),
    "a lost node beside a killed rank": (a_case(node="b", lost="a", spares=("s", "t")), all_say(REPLACE)),
    "a lost node that only the diagnosis knows": (a_case("node-lost", spares=("s",)), all_say(REPLACE)),
    "two lost nodes that only the diagnosis knows": (a_case("node-lost", "a", ("node-lost", "b"), spares=("s", "t")), all_say(REPLACE)),
    "two lost nodes, two spares": (a_case("node-lost", lost="ab", spares=("s", "t")), all_say(REPLACE)),
    "two lost nodes, one spare": (a_case("node-lost", lost="ab", spares=("s",)), all_say(WAIT)),
    "two lost nodes, one spare, two do": (a_case("node-lost", lost="ab", spares=("s",), least=2), they_say(WAIT, SHRINK, SHRINK)),
    "all nodes lost, no spare, one does": (a_case("node-lost", lost="abc", least=1), all_say(WAIT)),
    "all nodes lost, three spares": (a_case("node-lost", lost="abc", spares=("s", "t", "u")), all_say(REPLACE)),
    "a start that failed, a spare": (a_case("worker-start-failed", lost="a", spares=("s",)), all_say(REPLACE)),
    "a replacement that failed, another spare, fewer do": (
        a_case(tried=(RESTART, REPLACE), spares=("t",), least=2), all_say(SHRINK),
    ),
    "a replacement that failed, another spare, all are needed": (a_case(tried=(RESTART, REPLACE), spares=("t",)), all_say(RESTART)),
    "a replacement whose new node was lost, another spare": (
        a_case("node-lost", lost="a", tried=(REPLACE,), spares=("t",)), all_say(REPLACE),
    ),
    "a replacement in which the hardware of another node broke, another spare": (
        a_case("gpu-off-bus", "b", tried=(REPLACE,), spares=("t",), past=(a_recovery(REPLACE, "a", made_progress=False),)),
        all_say(REPLACE),
    ),
    "a replacement after which the same node is broken, another spare": (
        a_case("gpu-off-bus", "a", tried=(REPLACE,), spares=("t",), past=(a_recovery(REPLACE, "a", made_progress=False),)), all_say(FAIL),
    ),
    "a shrink that failed, fewer would do": (a_case(tried=(RESTART, SHRINK), least=1), they_say(WAIT, RESTART, RESTART)),
    "a shrink in which a node was lost, fewer would do": (
        a_case("node-lost", lost="a", tried=(SHRINK,), least=1), they_say(WAIT, SHRINK, SHRINK),
    ),
    "a wait that failed": (a_case("node-lost", lost="a", tried=(WAIT,)), all_say(FAIL)),
    "a wait that failed, fewer do": (a_case("node-lost", lost="a", tried=(WAIT,), least=2), all_say(SHRINK)),
    "everything failed": (a_case(tried=(RESTART, REPLACE, SHRINK, WAIT), spares=("s",), least=1), all_say(RESTART)),
    "everything failed, three times without a step": (
        a_case(tried=(RESTART, REPLACE, SHRINK, WAIT), spares=("s",), least=1, past=FRUITLESS), all_say(FAIL),
    ),
    "everything failed, and a node cannot hold ranks": (
        a_case("gpu-off-bus", tried=(RESTART, REPLACE, SHRINK, WAIT), spares=("s",), least=1), all_say(FAIL),
    ),
    "three recoveries without a step": (a_case(past=FRUITLESS), all_say(FAIL)),
    "three recoveries without a step, a spare": (a_case(past=FRUITLESS, spares=("s",)), all_say(REPLACE)),
    "three recoveries without a step, a spare, no node in question": (a_case(node=None, past=FRUITLESS, spares=("s",)), all_say(FAIL)),
    "three recoveries without a step, a spare, the script in question": (
        a_case("worker-exit-early", past=FRUITLESS, spares=("s",)), all_say(FAIL),
    ),
    "three recoveries without a step, a spare was tried": (
        a_case(past=(*FRUITLESS, a_recovery(REPLACE, made_progress=False)), spares=("t",)), all_say(FAIL),
    ),
    "three recoveries without a step, each interrupted by the hardware of the next node": (
        a_case("gpu-off-bus", "a", past=BURST, spares=("s",)), all_say(REPLACE),
    ),
    "three recoveries without a step, each interrupted by what the policy does not take for broken hardware": (
        a_case("gpu-off-bus", "a", past=BURST, recommended_actions=RecommendedActions(changed={"gpu-off-bus": RecommendedAction.RESTART})),
        all_say(FAIL),
    ),
    "three recoveries without a step, the hardware of one node each time": (
        a_case("gpu-off-bus", "a", past=tuple(replace(one, node="a") for one in BURST)), all_say(FAIL),
    ),
    "ranks that do not end": (a_case("job-end-stuck", None), all_say(RESTART)),
    "ranks that do not end, again": (
        a_case("job-end-stuck", None, past=(replace(a_recovery(), kind="job-end-stuck"),)), all_say(FAIL),
    ),
    "two recoveries without a step": (a_case(node="b", past=FRUITLESS[:3]), all_say(RESTART)),
    "three recoveries without a step, then one with": (a_case(past=(*FRUITLESS[1:], a_recovery(node="b"))), all_say(RESTART)),
    "three recoveries without a step, all by lost nodes": (
        a_case("node-lost", lost="a", past=FRUITLESS, spares=("s",)), all_say(REPLACE),
    ),
    "twenty recoveries within the hour": (a_case(past=tuple(a_recovery(node=str(n)) for n in range(20))), all_say(FAIL)),
    "twenty recoveries, one of them before the hour": (
        a_case(past=tuple(a_recovery(node=str(n), at=NOW - 3599.0 - (n == 0)) for n in range(20))), all_say(RESTART),
    ),
    "twenty recoveries within the hour, and a lost node": (
        a_case("node-lost", lost="a", spares=("s",), past=tuple(a_recovery(node=str(n)) for n in range(20))), all_say(FAIL),
    ),
    "the user's error": (a_case("user-error", spares=("s",)), all_say(FAIL)),
    "the user's error while a node is lost": (a_case("user-error", lost="b", spares=("s",)), all_say(FAIL)),
    "a job of one node": (a_case(members=("a",), least=1), all_say(RESTART)),
    "a job of one node that is lost": (a_case("node-lost", members=("a",), lost="a", least=1), all_say(WAIT)),
    "a GPU off the bus, no spare, nobody is asked": (a_case("gpu-off-bus"), all_say(WAIT)),
    "a GPU off the bus, no spare": (a_case("gpu-off-bus", approval_possible=True), all_say(ASK)),
    "a GPU off the bus, no spare, a person agreed": (a_case("gpu-off-bus", approval_possible=True, approved=frozenset("a")), all_say(WAIT)),
    "a GPU off the bus, no spare, fewer do": (a_case("gpu-off-bus", approval_possible=True, least=2), they_say(WAIT, SHRINK, SHRINK)),
    "a GPU off the bus, a spare": (a_case("gpu-off-bus", approval_possible=True, spares=("s",)), all_say(REPLACE)),
    "a GPU off the bus beside a lost node, without which too few are left": (
        a_case("gpu-off-bus", "a", ("node-lost", "b"), lost="b", approval_possible=True), all_say(WAIT),
    ),
    "two nodes that do not meet, no spare": (a_case("pairwise-partition", "c", approval_possible=True), all_say(WAIT)),
    "two nodes that do not meet, a spare": (a_case("pairwise-partition", "c", approval_possible=True, spares=("s",)), all_say(REPLACE)),
    "two nodes that do not meet, fewer do": (
        a_case("pairwise-partition", "c", approval_possible=True, least=2), they_say(WAIT, SHRINK, SHRINK),
    ),
    "a fault on a node that has left": (a_case(node="gone", tried=(RESTART,), spares=("s",)), all_say(RESTART)),
}  # fmt: skip


@each("policy", POLICIES)
@each("name", CASES)
def test_each_policy_takes_its_rung(name: str, policy: str) -> None:
    """The first rule that has an answer decides."""
    case, actions = CASES[name]
    assert decided(policy, case).action is actions[policy], decided(policy, case).reason


MEMBERSHIPS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "in place keeps everybody": ("balanced", a_case(spares=("s",)), {"drop": (), "add": ()}),
    "a replacement takes the first spare": (
        "balanced", a_case("node-lost", "b", lost="b", spares=("s", "t")), {"drop": ("b",), "add": ("s",)},
    ),
    "a killed rank does not leave its node because another node is lost": (
        "balanced", a_case(node="c", lost="a", spares=("s", "t")), {"drop": ("a",), "add": ("s",)},
    ),
    "a replacement takes all that are asked to leave": (
        "balanced", a_case("node-lost", "c", ("worker-start-failed", "a"), spares=("s", "t")), {"drop": ("a", "c"), "add": ("s", "t")},
    ),
    "a secondary failure of a lost node is not blamed": (
        "aggressive", a_case("node-lost", "a", ("worker-peer-lost", "b"), spares=("s", "t")), {"drop": ("a",), "add": ("s",)},
    ),
    "a shrink takes what spares there are": (
        "balanced", a_case("node-lost", lost="ab", spares=("s",), least=1), {"drop": ("a", "b"), "add": ("s",)},
    ),
    "a shrink after a failed replacement takes none": (
        "balanced", a_case(tried=(RESTART, REPLACE), spares=("s",), least=2), {"drop": ("a",), "add": ()},
    ),
    "the balanced wait is for the least": ("balanced", a_case("node-lost", lost="abc", least=2), {"need": 2, "drop": ("a", "b", "c")}),
    "the patient wait is for all": ("patient", a_case("node-lost", lost="a", least=2), {"need": 3, "drop": ("a",)}),
    "a wait holds on to the spares": (
        "balanced", a_case("node-lost", lost="ab", spares=("s",)), {"need": 3, "drop": ("a", "b"), "add": ("s",)},
    ),
}  # fmt: skip


@each("name", MEMBERSHIPS)
def test_a_decision_names_dropped_and_added_nodes(name: str) -> None:
    """In the order of ranks and of spares."""
    policy, case, facts = MEMBERSHIPS[name]
    decision = decided(policy, case)
    assert {field: getattr(decision, field) for field in facts} == facts


@each("kind", sorted(CATALOGUE))
def test_ranks_change_nodes_exactly_when_the_failure_may_follow_the_step(kind: str) -> None:
    """What comes again with the rank on another node is the script; a kill shows nothing that way, and one node has no other."""
    decision = decided("balanced", a_case(kind))
    assert decision.rotate is follows_step(kind)
    assert mentions(decision.reason, "other nodes") is follows_step(kind)
    assert not decided("balanced", a_case(kind, members=("a",), least=1)).rotate


def test_a_node_that_its_peers_do_not_reach_after_a_restart_either_is_replaced() -> None:
    """Restarts would go on to fail until the job fails; one that helped is no such sign."""
    for made_progress, action, dropped in ((False, REPLACE, ("a",)), (True, RESTART, ())):
        case = a_case("peer-blamed", spares=("s",), past=(a_recovery(node=None, made_progress=made_progress),))
        decision = decided("balanced", case)
        assert (decision.action, decision.drop) == (action, dropped)
    assert decided("balanced", a_case("peer-blamed", spares=("s",))).action is RESTART, "the first time may be chance"


def test_a_decision_repeats_the_diagnosis_and_counts() -> None:
    """A person reads why, and how much is left."""
    second = decided("balanced", a_case(past=SPENT[:1], budget=RecoveryBudget(max_restarts_in_place=5)))
    assert second.reason == f"{a_diagnosis().reason}; restart 2 of 5 within 3600 s"
    for case, actions in CASES.values():
        for policy, action in actions.items():
            assert (case.diagnosis.reason in decided(policy, case).reason) or action is FAIL


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("three recoveries without a step", ("3 recoveries", "no new step")),
        ("twenty recoveries within the hour", ("20 recoveries", "3600 s", "maximum")),
        ("a wait that failed", ("no recovery action", "wait-for-capacity")),
        ("the user's error", ("user-error", "node a")),
    ],
)
def test_failing_the_job_states_a_clear_reason(name: str, words: tuple[str, ...]) -> None:
    """It says what was tried and what was seen last."""
    reason = decided("balanced", CASES[name][0]).reason
    assert mentions(reason, *words, a_diagnosis().root.quote)


def test_a_person_can_read_which_rules_were_passed_over_and_why() -> None:
    """Each rule that has no answer says why, and the one that had prints itself."""
    answer = decide(POLICIES["patient"], a_case("node-lost", lost="a"))
    assert answer.rule == "WaitForCapacity(full=True)"
    assert list(answer.passed_over) == [
        "StopForUserError",
        "StopWithoutProgress",
        "StopWhenSpent",
        "ExcuseWhenCorrelated",
        "LeaveWhenRecurring",
        "LeaveWhenFlapping",
        "RollBack",
        "RetryStep",
        "ReplaceRanks",
        "RestartWorkers",
        "ReplaceNode",
        "RequestApproval",
    ]
    assert all(answer.passed_over.values())


def test_a_policy_that_does_not_always_answer_is_a_mistake_of_ours() -> None:
    """Silence must not pass for a decision."""

    def never(_case: Case) -> Decision | Pass:
        return Pass("never mine")

    with pytest.raises(AssertionError, match="must always decide"):
        decide((never,), a_case())


def test_the_policies_are_those_that_a_job_can_name() -> None:
    """What a user may write and what the escalation knows must not drift apart."""
    assert set(NAMES) == set(POLICIES) == set(NAMED)
    assert TrainingJob.model_fields["policy"].default == BASE


def test_recovery_actions_are_strings_of_the_history() -> None:
    """They are stored, and must not change."""
    assert [str(action) for action in RecoveryAction] == [
        *(
            "retry-step",
            "replace-ranks",
            "shrink-live",
            "restart-workers",
            "rollback",
            "replace-node",
            "shrink-restart",
            "request-approval",
        ),
        *("wait-for-capacity", "fail"),
    ]


@pytest.mark.parametrize(("spares", "dropped"), [(("s", "t"), ("a", "b")), (("s",), ("a",)), ((), ())])
def test_nodes_to_drain_at_the_same_moment_are_replaced_together_if_there_are_spares_for_all(
    spares: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    """The job stops for the first one anyway; with a spare for one alone, the node of the root cause goes; without any, both stay."""
    case = a_case("gpu-recovery-drain", "a", ("gpu-recovery-drain", "b"), spares=spares)
    assert case.unfit == dropped
    decision = decided("balanced", case)
    assert decision.drop == dropped
    assert decision.add == spares[: len(dropped)]
    assert a_case("worker-sigkill", "c", ("gpu-recovery-drain", "b"), spares=spares).unfit == (), "ranks on it go on"
