"""Escalation of recovery actions: ordered rules from a case to a decision. The first decision wins; the last rule always decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.detectors.associations import belongs, follows_step, is_secondary
from holdfast.detectors.catalogue import (
    CATALOGUE,
    HARDWARE_OF_NODE,
    TAKES_NODE_OUT,
    Attribution,
    RecommendedAction,
    RecommendedActions,
)
from holdfast.detectors.correlation import BLAMED
from holdfast.detectors.training.losses import LOST
from holdfast.detectors.training.progress import NOT_ENDING
from holdfast.plurals import all_of, plural
from holdfast.policies.nodes.node_faults import UNSURE
from holdfast.policies.recovery.case import (
    Case,
    Decision,
    HotSpare,
    Noted,
    Pass,
    PastRecovery,
    Placement,
    RecoveryAction,
    RecoveryBudget,
    Rule,
)
from holdfast.policies.recovery.in_process import ReplaceRanks, RetryStep, ShrinkLive
from holdfast.policies.recovery.recurrence import ExcuseWhenCorrelated, LeaveWhenFlapping, LeaveWhenRecurring

__all__ = [
    "POLICIES",
    "Answer",
    "Case",
    "Decision",
    "HotSpare",
    "Noted",
    "Pass",
    "PastRecovery",
    "Placement",
    "RecoveryAction",
    "RecoveryBudget",
    "Rule",
    "Rules",
    "decide",
    "rules_of",
]


SUSPECT_BATCHES: Final = 2
"""Batches to skip: that of the first step with a non-finite loss, and the one before, whose update may have corrupted the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopForUserError:
    """Fail the job at once if the script is at fault: retries would waste time and count against nodes."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply to a user error."""
        if case.recommended_actions.of(case.diagnosis.root) is not RecommendedAction.USER_ERROR:
            return Pass("no user error")
        return Decision(action=RecoveryAction.FAIL, reason=case.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWithoutProgress:
    """Fail the job if recoveries make no progress; before that replace its node once, if a spare is free."""

    replace: bool = True
    """The policy may replace nodes."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if the newest `max_recoveries_without_progress` recoveries made no progress.

        A lost node is not the script's fault. A recovery that another node's hardware interrupted does not count.
        """
        if case.diagnosis.root.kind == NOT_ENDING.id and any(one.kind == NOT_ENDING.id for one in case.past):
            reason = f"{case.reason}; it happened before: all ranks were restarted for it, and another restart would not end them"
            return Decision(action=RecoveryAction.FAIL, reason=reason)
        if case.lost:
            return Pass(f"{', '.join(sorted(case.lost))} is lost, which is not the script's fault")
        streak = list[PastRecovery]()
        next_kind, next_node = case.diagnosis.root.kind, case.diagnosis.root.node
        for one in reversed(case.past):
            if one.made_progress:
                break
            streak += [] if one.interrupted or _broke_elsewhere(one, next_kind, next_node, case.recommended_actions) else [one]
            next_kind, next_node = one.kind, one.node
        if len(streak) < case.budget.max_recoveries_without_progress:
            return Pass(f"{len(streak)} of {case.budget.max_recoveries_without_progress} recoveries in a row without progress")
        summary = f"{len(streak)} recoveries in a row brought no progress (no new step; in a job without steps, no run that lasted)"
        return self._replace(case, streak, summary) or Decision(action=RecoveryAction.FAIL, reason=f"{summary}; last: {case.reason}")

    def _replace(self, case: Case, streak: list[PastRecovery], summary: str) -> Decision | None:
        """Replace the nodes of the fault by spares, once: a faulty node may look like a faulty script."""
        root, bad, add = case.diagnosis.root, case.bad, case.spares[: len(case.bad)]
        tried = RecoveryAction.REPLACE_NODE in case.tried or any(one.action is RecoveryAction.REPLACE_NODE for one in streak)
        spent = len(case.recent()) >= case.budget.max_recoveries
        if not self.replace or tried or spent or not bad or len(add) < len(bad) or root.entry.attributed_to is Attribution.USER_CODE:
            return None
        reason = f"{case.reason}; {summary}: before the job fails, {', '.join(add)} replaces {', '.join(bad)}"
        return Decision(action=RecoveryAction.REPLACE_NODE, reason=reason, drop=bad, add=add)


def _broke_elsewhere(recovery: PastRecovery, next_kind: str, next_node: str | None, actions: RecommendedActions) -> bool:
    """Return whether *recovery* made no progress because the hardware of another node failed meanwhile: neither it nor the script did."""
    kind = CATALOGUE.get(next_kind)
    if kind is None or not next_node or next_node == recovery.node:
        return False
    recommended = actions.changed.get(next_kind, kind.recommended_action)
    return belongs(next_kind, "node-gone") or (kind.attributed_to in HARDWARE_OF_NODE and recommended in TAKES_NODE_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhenSpent:
    """Fail the job if it has used up its recoveries."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if the window contains as many recoveries as the budget allows."""
        used, most = len(case.recent()), case.budget.max_recoveries
        if used < most:
            return Pass(f"{used} of {most} recoveries used")
        return Decision(
            action=RecoveryAction.FAIL,
            reason=f"{used} recoveries within {case.budget.recovery_window:.0f} s are the maximum; last: {case.reason}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWorkers:
    """Restart the workers on their nodes, until the node's budget is spent."""

    gpu: int = 1
    """Restarts on one node within the window for the same GPU fault, while other nodes could take its ranks."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply to a fault of a process whose node is reachable."""
        root = case.diagnosis.root
        if case.unfit:
            return Pass(f"{', '.join(case.unfit)} cannot hold ranks")
        if RecoveryAction.RESTART_WORKERS in case.tried:
            return Pass("tried already in this incident")
        if (
            root.kind == BLAMED.id
            and case.past
            and case.past[-1].action is RecoveryAction.RESTART_WORKERS
            and not case.past[-1].made_progress
        ):
            return Pass(f"a restart did not reconnect {root.target} to its peers: it is partitioned from them")
        counted = [one for one in case.recent() if one.action is RecoveryAction.RESTART_WORKERS and one.kind not in case.correlated]
        used = sum(one.node == root.node for one in counted)
        if used >= case.budget.max_restarts_in_place:
            return Pass(f"{used} restarts of {root.node or 'the job'} within {case.budget.recovery_window:.0f} s are the maximum")
        same = sum(one.node == root.node and one.kind == root.kind for one in counted)
        if (
            root.entry.attributed_to is Attribution.GPU
            and same >= self.gpu
            and (bool(case.spares) or len(case.members) - 1 >= max(1, case.least))
        ):
            return Pass(f"{plural(same, 'restart')} of {root.node} did not cure {root.kind}, and other nodes can take its ranks")
        rotate = follows_step(root.kind) and len(case.members) > 1
        reason = f"{case.reason}; restart {used + 1} of {case.budget.max_restarts_in_place} within {case.budget.recovery_window:.0f} s"
        if rotate:
            reason += ", with the ranks on other nodes to see whether the failure follows the step"
        return Decision(action=RecoveryAction.RESTART_WORKERS, reason=reason, rotate=rotate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAgain:
    """Restart again, with the ranks on other nodes, rather than fail a job on healthy nodes; the budget limits how often."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if a restart brought no step in time, all nodes can hold ranks, and no other action is left."""
        if RecoveryAction.RESTART_WORKERS not in case.tried:
            return Pass("no restart has failed in this incident")
        if case.unfit:
            return Pass(f"{', '.join(case.unfit)} cannot hold ranks")
        able = all_of(len(case.members), "node")
        reason = f"{case.reason}; no other action is left, and {able} can hold ranks, so all ranks restart again"
        rotate = len(case.members) > 1
        return Decision(action=RecoveryAction.RESTART_WORKERS, reason=reason + (", each on another node" if rotate else ""), rotate=rotate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceNode:
    """Replace bad nodes by spares."""

    on_secondary: bool = True
    """Also if the only fault of the node is a secondary failure, which another node may have caused."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if there are enough spares for all nodes to remove."""
        bad, add = case.bad, case.spares[: len(case.bad)]
        if not bad:
            return Pass("no node is at fault")
        if case.failed(RecoveryAction.REPLACE_NODE) and not self._broke_since(case):
            return Pass("tried already in this incident")
        if not self.on_secondary and is_secondary(case.diagnosis.root.kind):
            return Pass("a secondary failure does not yet show which node is at fault")
        if len(add) < len(bad):
            return Pass(f"{plural(len(add), 'spare')} for {plural(len(bad), 'node')}")
        reason = f"{case.reason}; {', '.join(add)} replaces {', '.join(bad)}"
        return Decision(action=RecoveryAction.REPLACE_NODE, reason=reason, drop=bad, add=add)

    def _broke_since(self, case: Case) -> bool:
        """Return whether another node cannot hold ranks than those that were replaced in vain: the last replacement was not about it."""
        streak = [one.node for one in case.past if one.action is RecoveryAction.REPLACE_NODE and not one.made_progress]
        return bool(streak) and any(node not in streak for node in case.unfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkRestart:
    """Restart on the remaining nodes, down to the job's minimum."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if at least *least* nodes remain, with the spares that replace some of them, but fewer than before."""
        bad, add = case.bad, case.spares[: max(0, len(case.bad) - 1)]
        left = len(case.members) - len(bad) + len(add)
        if not bad:
            return Pass("no node is at fault")
        if case.failed(RecoveryAction.SHRINK_RESTART):
            return Pass("tried already in this incident")
        if left < max(1, case.least):
            return Pass(f"{plural(left, 'node')} left, the job needs {case.least}")
        needed = f"at least {case.least} {'is' if case.least == 1 else 'are'} needed"
        reason = f"{case.reason}; continue without {', '.join(bad)} on {plural(left, 'node')}, {needed}"
        return Decision(action=RecoveryAction.SHRINK_RESTART, reason=reason, drop=bad, add=add)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForCapacity:
    """Wait until there are enough nodes: the job's minimum, or its full number."""

    full: bool = False

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if too few nodes are left: nodes may return or be added."""
        bad, add = case.bad, case.spares[: len(case.bad)]
        left, need = len(case.members) - len(bad) + len(add), len(case.members) if self.full else case.least
        if not bad:
            return Pass("no node is at fault")
        if RecoveryAction.WAIT_FOR_CAPACITY in case.tried:
            return Pass("the job waited already in this incident")
        if left >= need:
            return Pass(f"{plural(left, 'node is', 'nodes are')} left, and the job needs {need}")
        reason = f"{case.reason}; {plural(left, 'node is', 'nodes are')} left, so the job waits for {need}"
        return Decision(action=RecoveryAction.WAIT_FOR_CAPACITY, reason=reason, drop=bad, add=add, need=need)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Restore a state from before the loss diverged, a few times; then fail the job, as neither chance nor one batch is the cause."""

    retries_with_same_data: int = 1
    """Restores with the same data: a single wrong computation does not happen again."""
    retries_without_batches: int = 1
    """Further restores without the suspect batches."""
    max_step_gap: int = 100
    """Steps between two diverged losses that still count as the same problem."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if the loss has diverged, and the parameters with it."""
        root = case.diagnosis.root
        if root.kind != LOST.id or root.step is None:
            return Pass("the loss has not diverged")
        if case.lost:
            return Pass(f"{', '.join(sorted(case.lost))} is lost, which is handled first")
        step = root.step
        before = max(1, step - 1)  # the state after this step may be corrupt already
        count = sum(self._is_same(one, step) for one in case.past)
        if count >= self.retries_with_same_data + self.retries_without_batches:
            restores = f"{plural(count, 'restore')}, {self.retries_without_batches} without its batches"
            reason = f"{case.reason}; it happened again after {restores}"
            return Decision(action=RecoveryAction.FAIL, reason=reason)
        if count < self.retries_with_same_data:
            reason = f"{case.reason}; restore a state from before step {before}, with the same data"
            return Decision(action=RecoveryAction.ROLLBACK, reason=reason, before=before)
        skip = tuple(range(max(1, step - SUSPECT_BATCHES + 1), step + 1))
        batches = " and ".join(map(str, skip))
        again = "it happened again with the same data" if self.retries_with_same_data else "the data may be the cause"
        reason = f"{case.reason}; {again}: restore a state from before step {before}, without the batches of {batches}"
        return Decision(action=RecoveryAction.ROLLBACK, reason=reason, before=before, skip=skip)

    def _is_same(self, one: PastRecovery, step: int) -> bool:
        return one.action is RecoveryAction.ROLLBACK and one.step is not None and abs(one.step - step) <= self.max_step_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestApproval:
    """Request approval before nodes that still work are isolated and too few are left for the job."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if faults remove nodes that are not lost, and the job cannot train without them."""
        root = case.diagnosis.root
        suspect = {root.node} if root.kind in UNSURE else set()  # such a node is released, not isolated
        asked = tuple(node for node in case.unfit if node not in case.lost | case.approved | case.announced | suspect)
        left = len(case.members) - len(case.unfit) + min(len(case.spares), len(case.unfit))
        if not asked:
            return Pass("no node that still works would be isolated without approval")
        if left >= max(1, case.least):
            return Pass(f"{plural(left, 'node is', 'nodes are')} left, the job needs {case.least}")
        if left + len(asked) < max(1, case.least):
            return Pass(f"{plural(left + len(asked), 'node')} would be left even with {', '.join(asked)}, and the job needs {case.least}")
        if not case.approval_possible:
            return Pass("the cluster's settings request no approvals")
        remain = plural(left, "node is left", "nodes are left")
        reason = f"{case.reason}; without {', '.join(asked)} {remain} and the job needs {case.least}, so approval is requested"
        return Decision(action=RecoveryAction.REQUEST_APPROVAL, reason=reason, drop=asked, need=case.least)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailTheJob:
    """Fail the job: no other action is left."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Fail the job."""
        tried = f" (tried: {', '.join(case.tried)})" if case.tried else ""
        return Decision(action=RecoveryAction.FAIL, reason=f"{case.reason}; no recovery action is left{tried}")


Rules = tuple[Rule, ...]
"""Ordered rules, of which the last always decides."""
Noting = tuple[ExcuseWhenCorrelated, LeaveWhenRecurring, LeaveWhenFlapping]
"""Rules that add remarks from past faults, in this order: correlated faults count against no node."""

ORDERS: Final[dict[str, tuple[RecoveryAction, ...]]] = {
    # Waits for its full number of nodes rather than train on fewer.
    "patient": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.REPLACE_RANKS,
        RecoveryAction.RESTART_WORKERS,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.WAIT_FOR_CAPACITY,
        RecoveryAction.SHRINK_RESTART,
    ),
    "balanced": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.REPLACE_RANKS,
        RecoveryAction.SHRINK_LIVE,
        RecoveryAction.RESTART_WORKERS,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.SHRINK_RESTART,
        RecoveryAction.WAIT_FOR_CAPACITY,
    ),
    # Replaces a node at its first fault while there are spares.
    "aggressive": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.REPLACE_RANKS,
        RecoveryAction.SHRINK_LIVE,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.RESTART_WORKERS,
        RecoveryAction.SHRINK_RESTART,
        RecoveryAction.WAIT_FOR_CAPACITY,
    ),
}
"""Recovery actions of each named policy, in order; failing the job comes last implicitly."""

NOTING: Final[dict[str, Noting]] = {
    "patient": (ExcuseWhenCorrelated(), LeaveWhenRecurring(times=6), LeaveWhenFlapping(times=8)),
    "balanced": (ExcuseWhenCorrelated(), LeaveWhenRecurring(), LeaveWhenFlapping()),
    "aggressive": (ExcuseWhenCorrelated(), LeaveWhenRecurring(times=3), LeaveWhenFlapping(times=3)),
}


def rules_of(order: tuple[RecoveryAction, ...], noting: Noting, diverged_loss: RollBack = RollBack()) -> Rules:
    """Return the rules for the actions in *order*.

    If replacing a node comes before restarting, it applies only to faults that are surely the node's own; a secondary failure gets a
    restart first. A job that may shrink only after it has waited, or not at all, waits for its full number of nodes. Approval is requested
    before nodes that still work are removed for a wait, or for good.
    """
    fruitless = StopWithoutProgress(replace=RecoveryAction.REPLACE_NODE in order)
    rules: list[Rule] = [StopForUserError(), fruitless, StopWhenSpent(), *noting, diverged_loss]
    early = RecoveryAction.RESTART_WORKERS in order and RecoveryAction.REPLACE_NODE in order[: order.index(RecoveryAction.RESTART_WORKERS)]
    full = (
        RecoveryAction.SHRINK_RESTART not in order
        or RecoveryAction.WAIT_FOR_CAPACITY in order[: order.index(RecoveryAction.SHRINK_RESTART)]
    )
    rule_of: dict[RecoveryAction, Rule] = {
        RecoveryAction.RETRY_STEP: RetryStep(),
        RecoveryAction.REPLACE_RANKS: ReplaceRanks(),
        RecoveryAction.SHRINK_LIVE: ShrinkLive(),
        RecoveryAction.RESTART_WORKERS: RestartWorkers(),
        RecoveryAction.REPLACE_NODE: ReplaceNode(on_secondary=not early),
        RecoveryAction.SHRINK_RESTART: ShrinkRestart(),
        RecoveryAction.WAIT_FOR_CAPACITY: WaitForCapacity(full=full),
    }
    for action in order:
        rules += [rule_of[action], ReplaceNode()] if early and action is RecoveryAction.RESTART_WORKERS else [rule_of[action]]
    before_waiting = (index for index, rule in enumerate(rules) if isinstance(rule, WaitForCapacity))
    rules.insert(next(before_waiting, len(rules)), RequestApproval())
    again = (RestartAgain(),) if RecoveryAction.RESTART_WORKERS in order else ()
    return (*rules, *again, FailTheJob())


POLICIES: Final[dict[str, Rules]] = {name: rules_of(order, NOTING[name]) for name, order in ORDERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A decision with the rule that made it and the rules before it."""

    decision: Decision
    rule: str
    passed_over: dict[str, str]
    """Rule to the reason why it did not apply."""
    noted: dict[str, str]
    """Rule to its remark."""
    case: Case
    """The case with all remarks."""


def decide(rules: Rules, case: Case) -> Answer:
    """Return the first decision of *rules* about *case*."""
    passed: dict[str, str] = {}
    noted: dict[str, str] = {}
    for rule in rules:
        answer = rule(case)
        if isinstance(answer, Decision):
            return Answer(decision=answer, rule=repr(rule), passed_over=passed, noted=noted, case=case)
        if isinstance(answer, Noted):
            case, noted[type(rule).__name__] = answer.case, answer.why
        else:
            passed[type(rule).__name__] = answer.why
    raise AssertionError("the last rule of a policy must always decide")
