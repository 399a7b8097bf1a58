"""What is done about a loss that is no number for good: once with the same data, once without its batches, then no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from holdfast.policies.recovery.case import Case, Pass, RecoveryAction
from holdfast.policies.recovery.escalation import RollBack
from holdfast.policies.recovery.policy import NAMED, Policy
from tests.mentions import mentions
from tests.policies.cases import NOW, a_case, a_recovery


def lost_at(step: int, *before: int, **facts: Any) -> Case:
    """Return a case of a loss that is lost since *step*, after the job went back for the like at the steps *before*."""
    past = tuple(replace(a_recovery(RecoveryAction.ROLLBACK, None, NOW - 60), step=one, kind="loss-diverged") for one in before)
    case = a_case("loss-diverged", None, past=past, **facts)
    root = Fault(kind="loss-diverged", at=NOW - 1, step=step, quote="no number since")
    return replace(case, diagnosis=replace(case.diagnosis, root=root))


@pytest.mark.parametrize("name", NAMED)
def test_each_policy_goes_back_twice_and_then_stops_with_the_reason(name: str) -> None:
    """The state after the step before may be spoiled already: its loss was the last number."""
    first = NAMED[name].decide(lost_at(77)).decision
    assert (first.action, first.before, first.skip) == (RecoveryAction.ROLLBACK, 76, ())
    assert mentions(first.reason, "same data")
    second = NAMED[name].decide(lost_at(80, 77)).decision
    assert (second.action, second.before, second.skip) == (RecoveryAction.ROLLBACK, 79, (79, 80))
    assert mentions(second.reason, "79 and 80")
    third = NAMED[name].decide(lost_at(78, 77, 80)).decision
    assert third.action is RecoveryAction.FAIL
    assert mentions(third.reason, 2)


def test_a_distant_step_is_another_problem_and_the_policy_sets_the_numbers() -> None:
    """Two such losses far apart have nothing to do with each other."""
    policy = Policy(name="p", diverged_loss=RollBack(retries_with_same_data=0, retries_without_batches=1, max_step_gap=10))
    assert policy.decide(lost_at(77)).decision.skip == (76, 77)
    assert policy.decide(lost_at(300, 77)).decision.skip == (299, 300)
    assert policy.decide(lost_at(80, 77)).decision.action is RecoveryAction.FAIL
    assert policy.decide(lost_at(1)).decision.before == 1


def test_levels_say_whether_anything_is_done() -> None:
    """As a user's error the job stops at once; a lost node comes first."""
    stops = replace(NAMED["balanced"], recommended_actions={"loss-diverged": RecommendedAction.USER_ERROR})
    assert stops.decide(lost_at(77)).decision.action is RecoveryAction.FAIL
    assert not RecommendedActions(changed={"loss-diverged": RecommendedAction.MONITOR}).needs_action(lost_at(77).diagnosis.root)
    assert isinstance(RollBack()(lost_at(77, lost="a")), Pass)
