"""A policy as a value: which actions in which order, what the past counts for, how much faults ask for, budgets and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from detectors.catalogue import RecommendedAction, RecommendedActions
from policies.bad_loss import GoBack
from policies.case import Case, RecoveryAction, RecoveryBudget
from policies.escalation import NOTING, ORDERS, Answer, Noting, Rules, decide, rules_of
from policies.slowness import MigrateStraggler

BASE: Final = "balanced"
"""What a job follows that names no policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTimeouts:
    """How many seconds each action may take, from its orders to the first new step."""

    retry_step: float = 20.0
    take_over: float = 20.0
    narrow: float = 20.0
    restart_in_place: float = 120.0
    """Also for going back to an earlier state."""
    replace_node: float = 180.0
    shrink: float = 180.0
    wait_for_capacity: float = 86_400.0
    """For nodes to be there; once they are, the job has `replace_node`."""

    def of(self, action: RecoveryAction) -> float:
        """Return the seconds that *action* may take once its nodes are there; KeyError for giving up, which takes none."""
        return {
            RecoveryAction.RETRY_STEP: self.retry_step,
            RecoveryAction.TAKE_OVER: self.take_over,
            RecoveryAction.NARROW: self.narrow,
            RecoveryAction.RESTART_IN_PLACE: self.restart_in_place,
            RecoveryAction.GO_BACK: self.restart_in_place,
            RecoveryAction.REPLACE_NODE: self.replace_node,
            RecoveryAction.SHRINK: self.shrink,
            RecoveryAction.WAIT_FOR_CAPACITY: self.replace_node,
        }[action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What decides about a job's faults."""

    name: str
    """One of the names, or the file that it came from."""
    based_on: str = BASE
    """The named policy that speaks where this one says nothing."""
    order: tuple[RecoveryAction, ...] = ORDERS[BASE]
    noting: Noting = NOTING[BASE]
    bad_loss: GoBack = field(default_factory=GoBack)
    recommended_actions: Mapping[str, RecommendedAction] = field(default_factory=lambda: MappingProxyType({}))
    """Fault kind to the level that goes before the catalogue's."""
    budget: RecoveryBudget = field(default_factory=RecoveryBudget)
    deadlines: PolicyTimeouts = field(default_factory=PolicyTimeouts)
    slowness: MigrateStraggler = field(default_factory=MigrateStraggler)
    """What is done about ranks that hold the others up."""

    @property
    def rules(self) -> Rules:
        """Return the rules in their order."""
        return rules_of(self.order, self.noting, self.bad_loss)

    @property
    def asks(self) -> RecommendedActions:
        """Return how much faults ask for under this policy."""
        return RecommendedActions(changed=self.recommended_actions)

    def applied_to(self, case: Case) -> Case:
        """Return *case* as this policy sees it: with its levels and its budget."""
        return replace(case, recommended_actions=self.asks, budget=self.budget)

    def decide(self, case: Case) -> Answer:
        """Return what this policy answers to *case*, whatever levels and budget the case came with."""
        return decide(self.rules, self.applied_to(case))


SLOWNESS: Final[Mapping[str, MigrateStraggler]] = {
    "patient": MigrateStraggler(factor=10.0, least=600.0, most=2),
    "balanced": MigrateStraggler(),
    "aggressive": MigrateStraggler(factor=1.5, least=10.0, most=8),
}
NAMED: Final[Mapping[str, Policy]] = {
    name: Policy(name=name, based_on=name, order=ORDERS[name], noting=NOTING[name], slowness=SLOWNESS[name]) for name in ORDERS
}
"""The policies that a job can name."""
