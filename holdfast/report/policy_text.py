"""Policies and their rules in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Final

from holdfast.report.wording import duration, plural, share
from policies import escalation
from policies.case import RecoveryAction, Rule
from policies.escalation import AskAPerson, GoBack
from policies.in_process import ReplaceRanks, RetryStep, ShrinkLive
from policies.policy import Policy
from policies.recurrence import ExcuseWhenCorrelated, LeaveWhenFlapping, LeaveWhenRecurring
from policies.slowness import MigrateStraggler


def _common(rule: Any, _policy: Policy) -> str:  # noqa: ANN401 (each of these takes a rule of its own class)
    numbers = [plural(rule.nodes, "node")] if rule.nodes else []
    numbers += [f"{share(rule.share)} of the job's nodes"] if rule.share else []
    if not numbers:
        return "switched off: a fault that comes on many nodes is held against each"
    return f"hold a fault against no node when the same kind came on {' or '.join(numbers)} within {duration(rule.window)}"


def _frequent(rule: Any, _policy: Policy) -> str:  # noqa: ANN401
    numbers = [f"number {rule.times} of one kind that speaks against its parts"] if rule.times else []
    numbers += [f"number {rule.processes} of one kind that ends processes"] if rule.processes else []
    if not numbers:
        return "switched off: incidents of one kind on one node are not counted"
    return f"have a node leave, while there are spares, at its incident {' or '.join(numbers)} within {duration(rule.window)}"


def _flapping(rule: Any, _policy: Policy) -> str:  # noqa: ANN401
    if not rule.times:
        return "switched off: how often a fault comes and goes is not counted"
    return (
        f"have a node leave, while there are spares, on which a fault of its parts came {rule.times} times within {duration(rule.window)}, "
        f"{duration(rule.apart)} apart at least"
    )


def _deadline(action: RecoveryAction) -> Callable[[Policy], str]:
    return lambda policy: f"; at most {duration(policy.deadlines.of(action))}"


def _replace(rule: Any, policy: Policy) -> str:  # noqa: ANN401
    what = "give the places of nodes that have to go to spares"
    but = "" if rule.on_echo else ", not yet for an error that may be the echo of another one"
    return what + but + _deadline(RecoveryAction.REPLACE_NODE)(policy)


def _wait(rule: Any, policy: Policy) -> str:  # noqa: ANN401
    width = "the job has its full width" if rule.full else "the job has as many nodes as it needs at least"
    most = duration(policy.deadlines.wait_for_capacity)
    return f"wait until {width}, at most {most}; once they are there{_deadline(RecoveryAction.WAIT_FOR_CAPACITY)(policy)[1:]}"


def _in_place(_rule: Any, policy: Policy) -> str:  # noqa: ANN401
    budget = policy.budget
    often = f"{plural(budget.in_place, 'time')} on one node within {duration(budget.window)}"
    return f"restart the workers on the nodes they have, {often}{_deadline(RecoveryAction.RESTART_IN_PLACE)(policy)}"


WORDS: Final[dict[type, Callable[[Any, Policy], str]]] = {
    escalation.StopForUserError: lambda _rule, _policy: "give up at once when the script is at fault",
    escalation.StopWithoutProgress: lambda rule, policy: (
        f"give up after {plural(policy.budget.fruitless, 'recovery', 'recoveries')} in a row without a new step, unless a node is lost"
        + ("; a spare takes the place of the node in question before that" if rule.replace else "")
    ),
    escalation.StopWhenSpent: lambda _rule, policy: (
        f"give up after {plural(policy.budget.recoveries, 'recovery', 'recoveries')} within {duration(policy.budget.window)}"
    ),
    ExcuseWhenCorrelated: _common,
    LeaveWhenRecurring: _frequent,
    LeaveWhenFlapping: _flapping,
    GoBack: lambda rule, policy: (
        f"the loss is no number for good: back to a state from before, {plural(rule.same_data, 'time')} with the same data, then "
        f"{plural(rule.without_batch, 'time')} without the batches in question, then give up{_deadline(RecoveryAction.GO_BACK)(policy)}"
    ),
    RetryStep: lambda _rule, policy: (
        "nobody is lost and the fault asks for no more: build the groups anew and do the step again"
        f"{_deadline(RecoveryAction.RETRY_STEP)(policy)}"
    ),
    ReplaceRanks: lambda rule, policy: (
        "keep the ranks that live, and give lost ones to standbys or fresh processes, "
        f"{plural(rule.most, 'time')} in one incident{_deadline(RecoveryAction.TAKE_OVER)(policy)}"
    ),
    ShrinkLive: lambda _rule, policy: (
        "keep the ranks that live, and go on with fewer copies of the model and the same samples in each step, where the script shares "
        f"them out, not below `nodes.least`{_deadline(RecoveryAction.NARROW)(policy)}"
    ),
    escalation.RestartWorkers: _in_place,
    escalation.ReplaceNode: _replace,
    escalation.ShrinkRestart: lambda _rule, policy: (
        f"go on with fewer nodes, not below `nodes.least`{_deadline(RecoveryAction.SHRINK)(policy)}"
    ),
    AskAPerson: lambda _rule, _policy: (
        "an unhealthy node still works, and too few would be left without it: ask a person, as long as the cluster's `quarantine.ask` says"
    ),
    escalation.WaitForCapacity: _wait,
    escalation.RestartAgain: lambda _rule, _policy: (
        "a restart failed, and nothing else is left: start all ranks once more, each on another node"
    ),
    escalation.FailTheJob: lambda _rule, _policy: "give up: nothing else is left",
}
"""Rule to its sentence under a policy."""


def describe(rule: Rule, policy: Policy) -> str:
    """Say what *rule* does under *policy*, with all its numbers."""
    known = WORDS.get(type(rule))
    return known(rule, policy) if known is not None else repr(rule)


def of_slowness(rule: MigrateStraggler) -> str:
    """Say when a rank that holds the others up is moved."""
    return (
        f"move one under `auto` when staying costs {rule.factor:g} times as much as moving, {duration(rule.least)} at least; looks "
        f"{duration(rule.horizon)} on where nobody knows how many steps are left; at most {plural(rule.each, 'move')} of one rank or away "
        f"from one node, and {rule.most} in all, within {duration(rule.window)}"
    )


def changes(before: Policy, after: Policy) -> list[str]:
    """Say in what *after* differs from *before*: one phrase for each value, in the words of a policy file."""
    return [*_actions(before, after), *_recommended_actions(before, after), *_numbers(before, after)]


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
    """Return every number of *policy* by its name in a policy file; times in seconds."""
    parts = dict(zip(("common", "frequent", "flapping"), policy.noting, strict=True))
    loss, slow = {"bad_loss": policy.bad_loss}, {"slowness": policy.slowness}
    named: dict[str, Any] = {**parts, **loss, "budget": policy.budget, "deadlines": policy.deadlines, **slow}
    return [(f"{part}.{one.name}", getattr(value, one.name)) for part, value in named.items() for one in fields(value)]


def number(name: str, value: float) -> str:
    """Return a number of a policy as people read it."""
    if name.startswith("deadlines.") or name.endswith((".window", ".apart", ".horizon", ".least")):
        return duration(value)
    return share(value) if name.endswith(".share") else str(value)
