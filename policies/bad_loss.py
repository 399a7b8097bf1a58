"""What is done when the loss has become no number: go back, first with the same data, then without the batches that may have done it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from detectors.losses import LOST
from policies.case import Case, Decision, Pass, PastRecovery, RecoveryAction

BATCHES: Final = 2
"""Of the step whose loss was the first that is no number, and of the one before: its update may have spoiled the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """Go back to the newest state from before a loss that is lost, a few times; then stop, as neither chance nor one batch did it."""

    same_data: int = 1
    """Times with the same data: a fault that computed wrongly once does not come again."""
    without_batch: int = 1
    """Times after these without the batches in question."""
    near: int = 100
    """Steps by which two such losses may lie apart and still count as the same trouble."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when the loss is lost and the parameters with it."""
        root = case.diagnosis.root
        if root.kind != LOST.id or root.step is None:
            return Pass("the loss is not lost")
        if case.lost:
            return Pass(f"{', '.join(sorted(case.lost))} is lost: that comes first")
        step = root.step
        before = max(1, step - 1)  # the state after so many steps may be spoiled already, as its loss is the one that was lost
        count = sum(self._is_same(one, step) for one in case.past)
        if count >= self.same_data + self.without_batch:
            reason = f"{case.reason}; it came again after {count} time(s) of going back, {self.without_batch} of them without its batches"
            return Decision(action=RecoveryAction.GIVE_UP, reason=reason)
        if count < self.same_data:
            reason = f"{case.reason}; back to a state from before step {before}, with the same data"
            return Decision(action=RecoveryAction.GO_BACK, reason=reason, before=before)
        skip = tuple(range(max(1, step - BATCHES + 1), step + 1))
        words = " and ".join(map(str, skip))
        again = "it came again with the same data" if self.same_data else "the data may have done it"
        reason = f"{case.reason}; {again}: back to a state from before step {before}, without the batches of {words}"
        return Decision(action=RecoveryAction.GO_BACK, reason=reason, before=before, skip=skip)

    def _is_same(self, one: PastRecovery, step: int) -> bool:
        return one.action is RecoveryAction.GO_BACK and one.step is not None and abs(one.step - step) <= self.near
