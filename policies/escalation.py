"""The recovery ladder: ordered rules from a case to a decision. The first answer wins; the last rule always answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from detectors.associations import follows_step, is_secondary
from detectors.catalogue import Blame, RecommendedAction
from detectors.correlation import BLAMED
from detectors.progress import NOT_ENDING
from policies.approval import AskAPerson
from policies.bad_loss import GoBack
from policies.case import Case, Decision, HotSpare, Noted, Pass, PastRecovery, Placement, RecoveryAction, RecoveryBudget, Rule
from policies.recurrence import ExcuseWhenCorrelated, LeaveWhenFlapping, LeaveWhenRecurring
from policies.replace_ranks import ReplaceRanks
from policies.retry import RetryStep
from policies.shrink_live import ShrinkLive

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StopForUserError:
    """Stop at once when the script is at fault: retries would burn time and blame nodes."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer a user's error."""
        if case.recommended_actions.of(case.diagnosis.root) is not RecommendedAction.USER_ERROR:
            return Pass("no user error")
        return Decision(action=RecoveryAction.GIVE_UP, reason=case.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWithoutProgress:
    """Stop when recoveries bring the job nowhere; before that its node is given up, if another can take its place."""

    replace: bool = True
    """The policy may replace nodes."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the newest *fruitless* recoveries all ended without progress, and no lost node is the reason."""
        if case.diagnosis.root.kind == NOT_ENDING.id and any(one.kind == NOT_ENDING.id for one in case.past):
            reason = f"{case.reason}; that came before: all ranks were started again for it, and to do so once more would not end them"
            return Decision(action=RecoveryAction.GIVE_UP, reason=reason)
        if case.lost:
            return Pass(f"{', '.join(sorted(case.lost))} is lost: that is no script's doing")
        run = list[PastRecovery]()
        for one in reversed(case.past):
            if one.made_progress:
                break
            run += [] if one.interrupted else [one]
        if len(run) < case.budget.fruitless:
            return Pass(f"{len(run)} of {case.budget.fruitless} recoveries in a row without a new step")
        said = f"{len(run)} recoveries in a row brought no new step"
        return self._replace(case, run, said) or Decision(action=RecoveryAction.GIVE_UP, reason=f"{said}; last: {case.reason}")

    def _replace(self, case: Case, run: list[PastRecovery], said: str) -> Decision | None:
        """Give the places of the nodes that the fault speaks against to spares, once: a node's doing may look like the script's."""
        root, bad, add = case.diagnosis.root, case.bad, case.spares[: len(case.bad)]
        tried = RecoveryAction.REPLACE_NODE in case.tried or any(one.action is RecoveryAction.REPLACE_NODE for one in run)
        spent = len(case.recent()) >= case.budget.recoveries
        if not self.replace or tried or spent or not bad or len(add) < len(bad) or root.entry.blame is Blame.USER_CODE:
            return None
        reason = f"{case.reason}; {said}: before the job is given up, {', '.join(add)} takes the place of {', '.join(bad)}"
        return Decision(action=RecoveryAction.REPLACE_NODE, reason=reason, drop=bad, add=add)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhenSpent:
    """Stop when the job has used up its recoveries."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the window holds as many recoveries as the budget allows."""
        used, most = len(case.recent()), case.budget.recoveries
        if used < most:
            return Pass(f"{used} of {most} recoveries used")
        return Decision(
            action=RecoveryAction.GIVE_UP,
            reason=f"{used} recoveries within {case.budget.window:.0f} s are as many as the budget allows; last: {case.reason}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWorkers:
    """Restart the workers on the nodes they have, until the node's budget is spent."""

    gpu: int = 1
    """Restarts in place on one node within the window for the same GPU fault, while other nodes could take its ranks."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer a fault of a process whose node still answers."""
        root = case.diagnosis.root
        if case.unfit:
            return Pass(f"{', '.join(case.unfit)} cannot hold ranks")
        if RecoveryAction.RESTART_IN_PLACE in case.tried:
            return Pass("tried already in this incident")
        if (
            root.kind == BLAMED.id
            and case.past
            and case.past[-1].action is RecoveryAction.RESTART_IN_PLACE
            and not case.past[-1].made_progress
        ):
            return Pass(f"a restart has not brought its peers to {root.subject}: it is cut off from them")
        counted = [one for one in case.recent() if one.action is RecoveryAction.RESTART_IN_PLACE and one.kind not in case.common]
        used = sum(one.node == root.node for one in counted)
        if used >= case.budget.in_place:
            return Pass(f"{used} restarts of {root.node or 'the job'} within {case.budget.window:.0f} s are as many as the budget allows")
        same = sum(one.node == root.node and one.kind == root.kind for one in counted)
        if root.entry.blame is Blame.GPU and same >= self.gpu and (bool(case.spares) or len(case.members) - 1 >= max(1, case.least)):
            return Pass(f"{same} restart(s) of {root.node} did not cure {root.kind}, and other nodes can take its ranks")
        rotate = follows_step(root.kind) and len(case.members) > 1
        reason = f"{case.reason}; restart {used + 1} of {case.budget.in_place} within {case.budget.window:.0f} s"
        if rotate:
            reason += ", with the ranks on other nodes to see whether the failure follows the step"
        return Decision(action=RecoveryAction.RESTART_IN_PLACE, reason=reason, rotate=rotate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAgain:
    """Restart once more, with the ranks on other nodes, rather than give up healthy ones: as often as the budget lets nothing be gained."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when a restart brought no step in time, all nodes can hold ranks, and nothing else is left to do."""
        if RecoveryAction.RESTART_IN_PLACE not in case.tried:
            return Pass("no restart has failed in this incident")
        if case.unfit:
            return Pass(f"{', '.join(case.unfit)} cannot hold ranks")
        reason = f"{case.reason}; nothing else is left, and all {len(case.members)} node(s) can hold ranks, so they are started once more"
        rotate = len(case.members) > 1
        return Decision(action=RecoveryAction.RESTART_IN_PLACE, reason=reason + (", each on another node" if rotate else ""), rotate=rotate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceNode:
    """Give the places of bad nodes to spares."""

    on_echo: bool = True
    """Also when all that speaks against the node is an error that another one may have caused."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when there are enough spares for all that have to go."""
        bad, add = case.bad, case.spares[: len(case.bad)]
        if not bad:
            return Pass("no node is to blame")
        if case.failed(RecoveryAction.REPLACE_NODE):
            return Pass("tried already in this incident")
        if not self.on_echo and is_secondary(case.diagnosis.root.kind):
            return Pass("an error that only tells of a lost peer blames nobody yet")
        if len(add) < len(bad):
            return Pass(f"{len(add)} spare(s) for {len(bad)} node(s)")
        reason = f"{case.reason}; {', '.join(add)} takes the place of {', '.join(bad)}"
        return Decision(action=RecoveryAction.REPLACE_NODE, reason=reason, drop=bad, add=add)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkRestart:
    """Go on with what is left, down to the least width the job allows."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the nodes left, with the spares for some of them, are at least *least*, but fewer than before."""
        bad, add = case.bad, case.spares[: max(0, len(case.bad) - 1)]
        left = len(case.members) - len(bad) + len(add)
        if not bad:
            return Pass("no node is to blame")
        if case.failed(RecoveryAction.SHRINK):
            return Pass("tried already in this incident")
        if left < max(1, case.least):
            return Pass(f"{left} node(s) left, the job needs {case.least}")
        reason = f"{case.reason}; on without {', '.join(bad)} with {left} node(s), at least {case.least} are needed"
        return Decision(action=RecoveryAction.SHRINK, reason=reason, drop=bad, add=add)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForCapacity:
    """Wait until enough nodes are back: as many as the job needs at least, or its full width."""

    full: bool = False

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when too few nodes are left: they may come back, or others may."""
        bad, add = case.bad, case.spares[: len(case.bad)]
        left, need = len(case.members) - len(bad) + len(add), len(case.members) if self.full else case.least
        if not bad:
            return Pass("no node is to blame")
        if RecoveryAction.WAIT_FOR_CAPACITY in case.tried:
            return Pass("waited already in this incident")
        if left >= need:
            return Pass(f"{left} node(s) are there, waiting brings no more than the {need} needed")
        reason = f"{case.reason}; {left} node(s) are left, so the job waits until it has {need}"
        return Decision(action=RecoveryAction.WAIT_FOR_CAPACITY, reason=reason, drop=bad, add=add, need=need)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailTheJob:
    """Always answer: nothing else is left."""

    def __call__(self, case: Case) -> Decision | Pass:
        """End the job with a verdict."""
        tried = f" (tried: {', '.join(case.tried)})" if case.tried else ""
        return Decision(action=RecoveryAction.GIVE_UP, reason=f"{case.reason}; no recovery action is left{tried}")


Rules = tuple[Rule, ...]
"""Ordered rules, of which the last always answers."""

Noting = tuple[ExcuseWhenCorrelated, LeaveWhenRecurring, LeaveWhenFlapping]
"""Rules that count what the past holds; in this order, as what is common is held against no node."""

ORDERS: Final[dict[str, tuple[RecoveryAction, ...]]] = {
    # Waits for its full width rather than train on fewer nodes.
    "patient": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.TAKE_OVER,
        RecoveryAction.RESTART_IN_PLACE,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.WAIT_FOR_CAPACITY,
        RecoveryAction.SHRINK,
    ),
    "balanced": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.TAKE_OVER,
        RecoveryAction.NARROW,
        RecoveryAction.RESTART_IN_PLACE,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.SHRINK,
        RecoveryAction.WAIT_FOR_CAPACITY,
    ),
    # Leaves a node at its first fault while there are spares.
    "aggressive": (
        RecoveryAction.RETRY_STEP,
        RecoveryAction.TAKE_OVER,
        RecoveryAction.NARROW,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.RESTART_IN_PLACE,
        RecoveryAction.SHRINK,
        RecoveryAction.WAIT_FOR_CAPACITY,
    ),
}
"""The actions of each policy that has a name, in the order in which they are tried; giving up comes last by itself."""

NOTING: Final[dict[str, Noting]] = {
    "patient": (ExcuseWhenCorrelated(), LeaveWhenRecurring(times=6), LeaveWhenFlapping(times=8)),
    "balanced": (ExcuseWhenCorrelated(), LeaveWhenRecurring(), LeaveWhenFlapping()),
    "aggressive": (ExcuseWhenCorrelated(), LeaveWhenRecurring(times=3), LeaveWhenFlapping(times=3)),
}


def rules_of(order: tuple[RecoveryAction, ...], noting: Noting, bad_loss: GoBack = GoBack()) -> Rules:  # noqa: B008 (a value that nothing changes)
    """Return the rules that try the actions of *order*, each at most once named there.

    A node is replaced before anything is restarted only for what is surely its own; what may be the echo of another fault gets its restart
    first. A job that may shrink only after it has waited, or not at all, waits for its full width. A person is asked before unhealthy nodes
    that still work are given up for a wait, or for good.
    """
    fruitless = StopWithoutProgress(replace=RecoveryAction.REPLACE_NODE in order)
    rules: list[Rule] = [StopForUserError(), fruitless, StopWhenSpent(), *noting, bad_loss]
    early = (
        RecoveryAction.RESTART_IN_PLACE in order and RecoveryAction.REPLACE_NODE in order[: order.index(RecoveryAction.RESTART_IN_PLACE)]
    )
    full = RecoveryAction.SHRINK not in order or RecoveryAction.WAIT_FOR_CAPACITY in order[: order.index(RecoveryAction.SHRINK)]
    made: dict[RecoveryAction, Rule] = {
        RecoveryAction.RETRY_STEP: RetryStep(),
        RecoveryAction.TAKE_OVER: ReplaceRanks(),
        RecoveryAction.NARROW: ShrinkLive(),
        RecoveryAction.RESTART_IN_PLACE: RestartWorkers(),
        RecoveryAction.REPLACE_NODE: ReplaceNode(on_echo=not early),
        RecoveryAction.SHRINK: ShrinkRestart(),
        RecoveryAction.WAIT_FOR_CAPACITY: WaitForCapacity(full=full),
    }
    for action in order:
        rules += [made[action], ReplaceNode()] if early and action is RecoveryAction.RESTART_IN_PLACE else [made[action]]
    waiting = (place for place, rule in enumerate(rules) if isinstance(rule, WaitForCapacity))
    rules.insert(next(waiting, len(rules)), AskAPerson())
    again = (RestartAgain(),) if RecoveryAction.RESTART_IN_PLACE in order else ()
    return (*rules, *again, FailTheJob())


POLICIES: Final[dict[str, Rules]] = {name: rules_of(order, NOTING[name]) for name, order in ORDERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A decision with the rule that made it and those that passed."""

    decision: Decision
    rule: str
    passed_over: dict[str, str]
    """Rule to the reason why it did not answer."""
    noted: dict[str, str]
    """Rule to what it noted for those after it."""
    case: Case
    """What was decided from, with what was noted."""


def decide(rules: Rules, case: Case) -> Answer:
    """Return the first answer of *rules* to *case*."""
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
    raise AssertionError("a policy whose last rule does not always answer")
