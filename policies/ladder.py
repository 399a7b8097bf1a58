"""The recovery ladder: ordered rules from a case to a decision. The first answer wins; the last rule always answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from detectors.catalogue import Level
from detectors.diagnosis import FOLLOWS_STEP
from detectors.exceptions import PEER_LOST
from policies.case import Budget, Case, Decision, Pass, Recovery, Rule, Rung, Seat, Standby
from policies.takeover import TakeOver

__all__ = ["POLICIES", "Answer", "Budget", "Case", "Decision", "Pass", "Policy", "Recovery", "Rule", "Rung", "Seat", "Standby", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopForUserError:
    """Stop at once when the script is at fault: retries would burn time and blame nodes."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer a user's error."""
        if case.diagnosis.root.entry.level is not Level.USER_ERROR:
            return Pass("no user error")
        return Decision(rung=Rung.GIVE_UP, because=case.diagnosis.because)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhenFruitless:
    """Stop when recoveries bring the job nowhere."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the newest *fruitless* recoveries all ended without a new step, and no lost node is the reason."""
        if case.lost:
            return Pass(f"{', '.join(sorted(case.lost))} is lost: that is no script's doing")
        run = 0
        for one in reversed(case.past):
            if one.gained:
                break
            run += not one.overtaken
        if run < case.budget.fruitless:
            return Pass(f"{run} of {case.budget.fruitless} recoveries in a row without a new step")
        return Decision(
            rung=Rung.GIVE_UP,
            because=f"{run} recoveries in a row brought no new step; last: {case.diagnosis.because}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhenSpent:
    """Stop when the job has used up its recoveries."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the window holds as many recoveries as the budget allows."""
        used, most = len(case.recent()), case.budget.recoveries
        if used < most:
            return Pass(f"{used} of {most} recoveries used")
        return Decision(
            rung=Rung.GIVE_UP,
            because=f"{used} recoveries within {case.budget.window:.0f} s are as many as the budget allows; last: {case.diagnosis.because}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartInPlace:
    """Restart the workers on the nodes they have, until the node's budget is spent."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer a fault of a process whose node still answers."""
        root = case.diagnosis.root
        if case.unfit:
            return Pass(f"{', '.join(case.unfit)} cannot hold ranks")
        if Rung.RESTART_IN_PLACE in case.tried:
            return Pass("tried already in this incident")
        used = sum(one.node == root.node and one.rung is Rung.RESTART_IN_PLACE for one in case.recent())
        if used >= case.budget.in_place:
            return Pass(f"{used} restarts of {root.node or 'the job'} within {case.budget.window:.0f} s are as many as the budget allows")
        rotate = root.kind in FOLLOWS_STEP and len(case.members) > 1
        because = f"{case.diagnosis.because}; restart {used + 1} of {case.budget.in_place} within {case.budget.window:.0f} s"
        if rotate:
            because += ", with the ranks on other nodes to see whether the failure follows the step"
        return Decision(rung=Rung.RESTART_IN_PLACE, because=because, rotate=rotate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceBySpare:
    """Give the places of bad nodes to spares."""

    on_echo: bool = True
    """Also when all that speaks against the node is an error that another one may have caused."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when there are enough spares for all that have to go."""
        bad, add = case.bad, case.spares[: len(case.bad)]
        if not bad:
            return Pass("no node is to blame")
        if case.failed(Rung.REPLACE_NODE):
            return Pass("tried already in this incident")
        if not self.on_echo and case.diagnosis.root.kind == PEER_LOST.id:
            return Pass("an error that only tells of a lost peer blames nobody yet")
        if len(add) < len(bad):
            return Pass(f"{len(add)} spare(s) for {len(bad)} node(s)")
        because = f"{case.diagnosis.because}; {', '.join(add)} takes the place of {', '.join(bad)}"
        return Decision(rung=Rung.REPLACE_NODE, because=because, drop=bad, add=add)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """Go on with what is left, down to the least width the job allows."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the nodes left, with the spares for some of them, are at least *least*, but fewer than before."""
        bad, add = case.bad, case.spares[: max(0, len(case.bad) - 1)]
        left = len(case.members) - len(bad) + len(add)
        if not bad:
            return Pass("no node is to blame")
        if case.failed(Rung.SHRINK):
            return Pass("tried already in this incident")
        if left < max(1, case.least):
            return Pass(f"{left} node(s) left, the job needs {case.least}")
        because = f"{case.diagnosis.because}; on without {', '.join(bad)} with {left} node(s), at least {case.least} are needed"
        return Decision(rung=Rung.SHRINK, because=because, drop=bad, add=add)


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
        if Rung.WAIT_FOR_CAPACITY in case.tried:
            return Pass("waited already in this incident")
        if left >= need:
            return Pass(f"{left} node(s) are there, waiting brings no more than the {need} needed")
        because = f"{case.diagnosis.because}; {left} node(s) are left, so the job waits until it has {need}"
        return Decision(rung=Rung.WAIT_FOR_CAPACITY, because=because, drop=bad, add=add, need=need)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Always answer: nothing else is left."""

    def __call__(self, case: Case) -> Decision | Pass:
        """End the job with a verdict."""
        tried = f" (tried: {', '.join(case.tried)})" if case.tried else ""
        return Decision(rung=Rung.GIVE_UP, because=f"{case.diagnosis.because}; no rung of the ladder is left{tried}")


Policy = tuple[Rule, ...]

_STOPS: Final = (StopForUserError(), StopWhenFruitless(), StopWhenSpent())

POLICIES: Final[dict[str, Policy]] = {
    # Waits for its full width rather than train on fewer nodes.
    "patient": (*_STOPS, TakeOver(), RestartInPlace(), ReplaceBySpare(), WaitForCapacity(full=True), Shrink(), GiveUp()),
    "balanced": (*_STOPS, TakeOver(), RestartInPlace(), ReplaceBySpare(), Shrink(), WaitForCapacity(), GiveUp()),
    # Leaves a node at its first fault while there are spares.
    "aggressive": (
        *_STOPS,
        TakeOver(),
        ReplaceBySpare(on_echo=False),
        RestartInPlace(),
        ReplaceBySpare(),
        Shrink(),
        WaitForCapacity(),
        GiveUp(),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A decision with the rule that made it and those that passed."""

    decision: Decision
    rule: str
    passed_over: dict[str, str]


def decide(policy: Policy, case: Case) -> Answer:
    """Return the first answer of *policy* to *case*."""
    passed: dict[str, str] = {}
    for rule in policy:
        answer = rule(case)
        if isinstance(answer, Decision):
            return Answer(decision=answer, rule=repr(rule), passed_over=passed)
        passed[type(rule).__name__] = answer.why
    raise AssertionError("a policy whose last rule does not always answer")
