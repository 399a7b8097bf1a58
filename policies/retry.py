"""The finest action: nobody is lost, so the ranks build their groups anew and do the step again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from detectors.catalogue import NO_ACTION_NEEDED, RecommendedAction
from policies.case import Case, Decision, Pass, RecoveryAction
from policies.replace_ranks import first_true, unhealthy_ranks

LEVELS: Final = tuple(RecommendedAction)
"""By how much they ask for, the least first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStep:
    """Have all ranks stay in their processes, build their groups anew, and do the open step again."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer a fault that asks for no more, when no rank is lost and no node has to leave."""
        why = self._why_not(case)
        if why:
            return Pass(why)
        ranks = sum(map(len, case.ranks.values()))
        reason = f"{case.reason}; no rank is lost: all {ranks} stay in their processes, build their groups anew and do the step again"
        return Decision(action=RecoveryAction.RETRY_STEP, reason=reason)

    def _asked_for(self, case: Case) -> RecommendedAction:
        """Return how much is asked for: by the root, or where that only explains what happened, by what it explains."""
        root = case.recommended_actions.of(case.diagnosis.root)
        asked = [
            case.recommended_actions.of(fault)
            for fault in case.diagnosis.secondary_failures
            if case.recommended_actions.needs_action(fault)
        ]
        return max(asked, key=LEVELS.index, default=root) if root in NO_ACTION_NEEDED else root

    def _why_not(self, case: Case) -> str:
        unhealthy = unhealthy_ranks(case)
        recommended_action = self._asked_for(case)
        reasons = {
            case.blocked_reason: bool(case.blocked_reason),
            f"the fault asks for {recommended_action}": recommended_action is not RecommendedAction.RETRY_STEP,
            "tried already in this incident": RecoveryAction.RETRY_STEP in case.tried,
            f"{', '.join(case.unfit)} cannot hold ranks": bool(case.unfit),
            f"rank(s) {', '.join(map(str, sorted(unhealthy)))} must be replaced": bool(unhealthy),
            "the last retry brought no new step": bool(case.past)
            and case.past[-1].action is RecoveryAction.RETRY_STEP
            and not case.past[-1].made_progress,
        }
        return first_true(reasons)
