"""A policy as a value: its actions, its levels and its budget decide, whatever the case came with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.detectors.catalogue import RecommendedAction
from holdfast.policies.recovery.case import RecoveryAction, RecoveryBudget
from holdfast.policies.recovery.escalation import ORDERS, POLICIES
from holdfast.policies.recovery.policy import NAMED, TIMEOUT_OF, Pace, Policy, PolicyTimeouts
from tests.policies.cases import a_case, a_recovery


@pytest.mark.parametrize("name", NAMED)
def test_a_named_policy_is_its_rules(name: str) -> None:
    """Both ways to ask give the same answer."""
    assert NAMED[name].rules == POLICIES[name]
    assert NAMED[name].based_on == NAMED[name].name == name


def test_a_level_acts_wherever_a_rule_reads_one() -> None:
    """A kill that asks for another node, a GPU that asks for nothing of the kind, an exit that is the user's own."""
    killer = Policy(name="p", recommended_actions={"worker-sigkill": RecommendedAction.EVICT})
    assert killer.decide(a_case(spares=("s",))).decision.drop == ("a",)
    calm = Policy(name="p", recommended_actions={"gpu-off-bus": RecommendedAction.RESTART})
    assert calm.decide(a_case("gpu-off-bus", spares=("s",))).decision.action is RecoveryAction.RESTART_WORKERS
    reset = Policy(name="p", recommended_actions={"gpu-off-bus": RecommendedAction.RESET_GPU})
    assert reset.decide(a_case("gpu-off-bus")).decision.action is RecoveryAction.WAIT_FOR_CAPACITY
    again = Policy(name="p", recommended_actions={"cuda-uncorrectable-ecc": RecommendedAction.RESTART})
    assert again.decide(a_case("cuda-uncorrectable-ecc")).decision.action is RecoveryAction.RESTART_WORKERS
    assert reset.decide(a_case("gpu-off-bus", spares=("s",))).decision.drop == ("a",)
    strict = Policy(name="p", recommended_actions={"worker-sigkill": RecommendedAction.USER_ERROR})
    assert strict.decide(a_case(spares=("s",))).decision.action is RecoveryAction.FAIL


def test_the_budget_is_the_policys_not_the_cases() -> None:
    """A case of another policy can be decided by this one."""
    case = a_case(past=(a_recovery(),), spares=("s",), budget=RecoveryBudget(max_restarts_in_place=9))
    assert Policy(name="p", budget=RecoveryBudget(max_restarts_in_place=1)).decide(case).decision.action is RecoveryAction.REPLACE_NODE


def test_only_rungs_that_are_listed_are_tried_in_their_order() -> None:
    """Failing the job comes last by itself."""
    only = Policy(name="p", order=(RecoveryAction.REPLACE_NODE,))
    assert only.decide(a_case(spares=("s",))).decision.action is RecoveryAction.REPLACE_NODE
    assert only.decide(a_case()).decision.action is RecoveryAction.FAIL
    first = Policy(name="p", order=(RecoveryAction.REPLACE_NODE, RecoveryAction.RESTART_WORKERS))
    assert first.decide(a_case("worker-peer-lost", spares=("s",))).decision.action is RecoveryAction.RESTART_WORKERS, (
        "a secondary failure gets its restart first"
    )


def test_a_job_that_must_not_shrink_waits_for_its_full_width() -> None:
    """Fewer nodes are no answer where the policy has no such action."""
    never = Policy(name="p", order=tuple(action for action in ORDERS["balanced"] if action is not RecoveryAction.SHRINK_RESTART))
    decision = never.decide(a_case("node-lost", lost="a", least=1)).decision
    assert (decision.action, decision.need) == (RecoveryAction.WAIT_FOR_CAPACITY, 3)


def test_every_rung_that_brings_ranks_back_has_a_deadline() -> None:
    """After a wait the job has as long as after a replacement."""
    deadlines = replace(PolicyTimeouts(), replace_node=7.0)
    assert all(
        deadlines.of(action) > 0 for action in RecoveryAction if action not in {RecoveryAction.FAIL, RecoveryAction.REQUEST_APPROVAL}
    )
    assert deadlines.of(RecoveryAction.WAIT_FOR_CAPACITY) == 7.0


def test_without_a_stated_timeout_an_action_may_take_as_long_as_the_job_needs() -> None:
    """A model that loads for ten minutes is not cut off after two; a number that somebody wrote down holds."""
    slow, quick = Pace(start=600.0, step=40.0, startup=1800.0), Pace(start=3.0, step=0.1, startup=1800.0)
    usual, stated = PolicyTimeouts(), PolicyTimeouts(restart_workers=120.0, stated=frozenset({"restart_workers"}))
    assert [usual.of(action, slow) for action in (RecoveryAction.RETRY_STEP, RecoveryAction.RESTART_WORKERS)] == [1320.0, 1320.0]
    assert [stated.of(action, slow) for action in (RecoveryAction.ROLLBACK, RecoveryAction.REPLACE_NODE)] == [120.0, 1320.0]
    assert all(usual.of(action, quick) == usual.of(action) for action in TIMEOUT_OF)
    assert usual.of(RecoveryAction.RESTART_WORKERS, Pace(startup=1800.0)) == 1800.0, "nothing is known of its start"
    assert usual.of(RecoveryAction.REPLACE_RANKS, Pace(step=30.0, startup=1800.0)) == 90.0
