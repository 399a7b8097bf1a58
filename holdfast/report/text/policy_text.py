"""Policies and their rules as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Final

from holdfast.plurals import plural
from holdfast.policies.recovery import escalation
from holdfast.policies.recovery.case import RecoveryAction, Rule
from holdfast.policies.recovery.escalation import RequestApproval, RollBack
from holdfast.policies.recovery.in_process import ReplaceRanks, RetryStep, ShrinkLive
from holdfast.policies.recovery.policy import Policy
from holdfast.policies.recovery.recurrence import ExcuseWhenCorrelated, LeaveWhenFlapping, LeaveWhenRecurring
from holdfast.policies.slowness import MigrateStraggler
from holdfast.report.text.wording import duration, share


def _correlated(rule: Any, _policy: Policy) -> str:  # noqa: ANN401 (each of these functions takes a rule of its own class)
    numbers = [plural(rule.min_nodes, "node")] if rule.min_nodes else []
    numbers += [f"{share(rule.min_share)} of the job's nodes"] if rule.min_share else []
    if not numbers:
        return "off: a fault that occurs on many nodes counts against each of them"
    broken = f"; broken hardware only if on more than {share(rule.hardware_share)} of them" if rule.hardware_share else ""
    return f"attribute a fault to no node if the same kind occurred on {' or '.join(numbers)} within {duration(rule.window)}{broken}"


def _recurring(rule: Any, _policy: Policy) -> str:  # noqa: ANN401
    numbers = [f"number {rule.times} of one kind attributed to its hardware"] if rule.times else []
    numbers += [f"number {rule.process_times} of one kind that ends processes"] if rule.process_times else []
    if not numbers:
        return "off: incidents of one kind on one node are not counted"
    return f"replace a node, if there are spares, at its incident {' or '.join(numbers)} within {duration(rule.window)}"


def _flapping(rule: Any, _policy: Policy) -> str:  # noqa: ANN401
    if not rule.times:
        return "off: intermittent faults are not counted"
    return (
        f"replace a node, if there are spares, on which a hardware fault occurred {rule.times} times within {duration(rule.window)}, "
        f"at least {duration(rule.min_gap)} apart"
    )


def _deadline(action: RecoveryAction) -> Callable[[Policy], str]:
    """Return how long *action* may take, as the end of a sentence."""

    def text(policy: Policy) -> str:
        longer = "" if policy.timeouts.is_stated(action) else ", longer for a job that starts or steps slowly"
        return f"; at most {duration(policy.timeouts.of(action))}{longer}"

    return text


def _replace(rule: Any, policy: Policy) -> str:  # noqa: ANN401
    but = "" if rule.on_secondary else ", not yet for an error that may be a secondary failure"
    return f"replace nodes that have to leave with spares{but}{_deadline(RecoveryAction.REPLACE_NODE)(policy)}"


def _wait(rule: Any, policy: Policy) -> str:  # noqa: ANN401
    width = "the job has its full size" if rule.full else "the job has its minimum number of nodes"
    most = duration(policy.timeouts.wait_for_capacity)
    return f"wait until {width}, at most {most}; then{_deadline(RecoveryAction.WAIT_FOR_CAPACITY)(policy)[1:]}"


def _in_place(_rule: Any, policy: Policy) -> str:  # noqa: ANN401
    budget = policy.budget
    often = f"{plural(budget.max_restarts_in_place, 'time')} on one node within {duration(budget.recovery_window)}"
    return f"restart the workers on the same nodes, {often}{_deadline(RecoveryAction.RESTART_WORKERS)(policy)}"


RULE_TEXT: Final[dict[type, Callable[[Any, Policy], str]]] = {
    escalation.StopForUserError: lambda _rule, policy: (
        "fail the job at once if the script is at fault"
        + ("" if policy.fail_on_start_errors else "; an error at its first start is restarted first")
    ),
    escalation.StopWithoutProgress: lambda rule, policy: (
        f"fail the job after {plural(policy.budget.max_recoveries_without_progress, 'recovery', 'recoveries')} in a row without a new "
        "step, unless a node is lost" + ("; replace the node with a spare before that" if rule.replace else "")
    ),
    escalation.StopWhenSpent: lambda _rule, policy: (
        f"fail the job after {plural(policy.budget.max_recoveries, 'recovery', 'recoveries')} within "
        f"{duration(policy.budget.recovery_window)}"
    ),
    ExcuseWhenCorrelated: _correlated,
    LeaveWhenRecurring: _recurring,
    LeaveWhenFlapping: _flapping,
    RollBack: lambda rule, policy: (
        f"if the loss stays NaN or infinite, go back to an earlier state, {plural(rule.retries_with_same_data, 'time')} with the same "
        f"data, then {plural(rule.retries_without_batches, 'time')} without these batches, then fail the job"
        f"{_deadline(RecoveryAction.ROLLBACK)(policy)}"
    ),
    RetryStep: lambda _rule, policy: (
        "if no rank is lost and the fault needs no more: rebuild the process groups and retry the step"
        f"{_deadline(RecoveryAction.RETRY_STEP)(policy)}"
    ),
    ReplaceRanks: lambda rule, policy: (
        "keep the surviving ranks, and replace lost ones with hot spares or new processes, "
        f"{plural(rule.most, 'time')} in one incident{_deadline(RecoveryAction.REPLACE_RANKS)(policy)}"
    ),
    ShrinkLive: lambda _rule, policy: (
        "keep the surviving ranks, and continue with fewer copies of the model and the same samples in each step, if the script "
        f"distributes them, not below the minimum of `nnodes`{_deadline(RecoveryAction.SHRINK_LIVE)(policy)}"
    ),
    escalation.RestartWorkers: _in_place,
    escalation.ReplaceNode: _replace,
    escalation.ShrinkRestart: lambda _rule, policy: (
        f"restart on fewer nodes, not below the minimum of `nnodes`{_deadline(RecoveryAction.SHRINK_RESTART)(policy)}"
    ),
    RequestApproval: lambda _rule, _policy: (
        "if an unhealthy node still works and too few would remain without it: request an approval, "
        "for the time in the cluster's `quarantine.approval_timeout`"
    ),
    escalation.WaitForCapacity: _wait,
    escalation.RestartAgain: lambda _rule, _policy: (
        "if a restart failed and no other action remains: restart all ranks once more, each on another node"
    ),
    escalation.FailTheJob: lambda _rule, _policy: "fail the job: no other action remains",
}
"""Rule to its text under a policy."""


def describe(rule: Rule, policy: Policy) -> str:
    """Return what *rule* does under *policy*, with all its numbers."""
    describe = RULE_TEXT.get(type(rule))
    return describe(rule, policy) if describe is not None else repr(rule)


def describe_slowness(rule: MigrateStraggler) -> str:
    """Return when a straggling rank is migrated."""
    return (
        f"under `auto`, migrate a rank if staying costs {rule.min_cost_ratio:g} times as much as migrating, and at least "
        f"{duration(rule.min_saving)}; plan for {duration(rule.horizon)} if the number of remaining steps is unknown; at most "
        f"{plural(rule.max_migrations_per_rank, 'migration')} of one rank or away from one node, "
        f"and {rule.max_migrations} in all, within {duration(rule.window)}"
    )


def changes(before: Policy, after: Policy) -> list[str]:
    """Return the differences from *before* to *after*: one phrase per value, with the names of a policy file."""
    return [*_actions(before, after), *_recommended_actions(before, after), *_numbers(before, after), *_start_errors(before, after)]


def _start_errors(before: Policy, after: Policy) -> Iterator[str]:
    was, now = before.fail_on_start_errors, after.fail_on_start_errors
    if was != now:
        yield f"fail_on_start_errors: {str(now).lower()} (was: {str(was).lower()})"


def _actions(before: Policy, after: Policy) -> Iterator[str]:
    if before.order != after.order:
        yield f"actions: {', '.join(after.order)} (was: {', '.join(before.order)})"


def _recommended_actions(before: Policy, after: Policy) -> Iterator[str]:
    for kind in sorted({*before.recommended_actions, *after.recommended_actions}):
        was, now = before.recommended_actions.get(kind), after.recommended_actions.get(kind)
        if was != now:
            yield f"recommended_actions.{kind}: {now or 'as in the catalogue'} (was: {was or 'as in the catalogue'})"


def _numbers(before: Policy, after: Policy) -> Iterator[str]:
    for (name, was), (_, now) in zip(values(before), values(after), strict=True):
        if was != now:
            yield f"{name}: {number(name, now)} (was: {number(name, was)})"


def values(policy: Policy) -> list[tuple[str, float]]:
    """Return every number of *policy* by its name in a policy file; durations in seconds."""
    parts = dict(zip(("correlated", "recurring", "flapping"), policy.noting, strict=True))
    loss, slow = {"diverged_loss": policy.diverged_loss}, {"stragglers": policy.stragglers}
    named: dict[str, Any] = {**parts, **loss, "": policy.budget, "timeouts": policy.timeouts, **slow}
    return [
        (f"{part}.{one.name}".removeprefix("."), getattr(value, one.name))
        for part, value in named.items()
        for one in fields(value)
        if one.name != "stated"
    ]


def number(name: str, value: float) -> str:
    """Return a number of a policy as people read it."""
    if name.startswith("timeouts.") or name.endswith(("window", ".min_gap", ".horizon", ".min_saving")):
        return duration(value)
    return share(value) if name.endswith("share") else str(value)
