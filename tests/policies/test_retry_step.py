"""When doing the step again is enough."""

from __future__ import annotations

import pytest

from holdfast.detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from holdfast.policies.recovery.case import Case, Decision, Pass, RecoveryAction
from holdfast.policies.recovery.escalation import POLICIES, decide
from holdfast.policies.recovery.in_process import RetryStep
from tests.mentions import mentions
from tests.policies.cases import NOW, a_recovery
from tests.policies.test_replace_ranks import a_loss


def why_not(case: Case) -> str:
    """Return why the step is not done again."""
    answer = RetryStep()(case)
    assert isinstance(answer, Pass), answer
    return answer.why


@pytest.mark.parametrize("policy", POLICIES)
def test_groups_that_broke_while_all_live_are_built_anew_and_nothing_else_happens(policy: str) -> None:
    """The finest action comes first, and moves nobody."""
    decision = decide(POLICIES[policy], a_loss("group-broken")).decision
    assert (decision.action, decision.seats, decision.drop) == (RecoveryAction.RETRY_STEP, (), ())
    assert mentions(decision.reason, "all 4")


def test_a_policy_may_have_a_hang_answered_by_a_retry_first() -> None:
    """The rank that it names is spared once; the next action replaces it."""
    recommended_actions = RecommendedActions(changed={"job-hang": RecommendedAction.RETRY_STEP})
    assert isinstance(RetryStep()(a_loss("job-hang", recommended_actions=recommended_actions)), Decision)
    answer = decide(POLICIES["balanced"], a_loss("job-hang", recommended_actions=recommended_actions, tried=(RecoveryAction.RETRY_STEP,)))
    assert (answer.decision.action, [seat.rank for seat in answer.decision.seats]) == (RecoveryAction.REPLACE_RANKS, [1])


def test_what_only_explains_why_the_groups_broke_does_not_keep_the_step_from_being_done_again() -> None:
    """A full disk is to be watched, and may be the cause; what it caused asks for a retry, as long as nothing asks for more."""
    broken = Fault(kind="group-broken", at=NOW, node="a")
    assert isinstance(RetryStep()(a_loss("checkpoint-disk-full", None, broken)), Decision)
    died = Fault(kind="worker-sigkill", at=NOW, node="a")
    assert "asks for restart" in why_not(a_loss("checkpoint-disk-full", None, broken, died))
    assert "asks for monitor" in why_not(a_loss("checkpoint-disk-full", None))


REFUSALS: dict[str, tuple[Case, str]] = {
    "groups of torch": (a_loss("group-broken", blocked_reason="the groups are torch's"), "torch's"),
    "a killed rank": (a_loss(), "asks for restart"),
    "a rank that has ended meanwhile": (a_loss("group-broken", dead=frozenset({3})), "rank 3 must be replaced"),
    "a lost node": (a_loss("group-broken", lost=frozenset("b")), "b cannot hold ranks"),
    "a node that a fault asks to leave": (
        a_loss("group-broken", 1, Fault(kind="gpu-off-bus", at=NOW, node="b")), "b cannot hold ranks",
    ),
    "a second time": (a_loss("group-broken", tried=(RecoveryAction.RETRY_STEP,)), "tried already"),
    "a retry that brought nothing": (
        a_loss("group-broken", past=(a_recovery(RecoveryAction.RETRY_STEP, made_progress=False),)), "brought no new step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_step_is_not_done_again_where_that_cannot_help(name: str) -> None:
    """The next action reads why."""
    case, words = REFUSALS[name]
    assert words in why_not(case)


def test_a_failed_retry_is_not_repeated_as_a_replacement_of_no_rank() -> None:
    """It would be the same thing under another name."""
    answer = decide(POLICIES["balanced"], a_loss("group-broken", tried=(RecoveryAction.RETRY_STEP,)))
    assert answer.decision.action is RecoveryAction.RESTART_WORKERS
    assert mentions(answer.passed_over["ReplaceRanks"], "tried already")
