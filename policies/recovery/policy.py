"""A recovery policy as a value: actions in order, rules about past faults, recommended actions, budget and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from holdfast.detectors.catalogue import RecommendedAction, RecommendedActions
from holdfast.policies.recovery.case import Case, RecoveryAction, RecoveryBudget
from holdfast.policies.recovery.escalation import NOTING, ORDERS, Answer, Noting, RollBack, Rules, decide, rules_of
from holdfast.policies.slowness import MigrateStraggler

BASE: Final = "balanced"
"""Policy of a job that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTimeouts:
    """Seconds that each action may take, from its commands to the first new step."""

    retry_step: float = 20.0
    replace_ranks: float = 20.0
    shrink_live: float = 20.0
    restart_workers: float = 120.0
    """Also for restoring an earlier state."""
    replace_node: float = 180.0
    shrink_restart: float = 180.0
    wait_for_capacity: float = 86_400.0
    """For enough nodes; after that the job has `replace_node` seconds."""

    def of(self, action: RecoveryAction) -> float:
        """Return the seconds that *action* may take once its nodes are there; raise KeyError for failing the job."""
        return {
            RecoveryAction.RETRY_STEP: self.retry_step,
            RecoveryAction.REPLACE_RANKS: self.replace_ranks,
            RecoveryAction.SHRINK_LIVE: self.shrink_live,
            RecoveryAction.RESTART_WORKERS: self.restart_workers,
            RecoveryAction.ROLLBACK: self.restart_workers,
            RecoveryAction.REPLACE_NODE: self.replace_node,
            RecoveryAction.SHRINK_RESTART: self.shrink_restart,
            RecoveryAction.WAIT_FOR_CAPACITY: self.replace_node,
        }[action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Decides about a job's faults."""

    name: str
    """A policy's name, or the file that defines it."""
    based_on: str = BASE
    """The named policy that provides the defaults."""
    order: tuple[RecoveryAction, ...] = ORDERS[BASE]
    noting: Noting = NOTING[BASE]
    diverged_loss: RollBack = field(default_factory=RollBack)
    recommended_actions: Mapping[str, RecommendedAction] = field(default_factory=lambda: MappingProxyType({}))
    """Fault kind to the recommended action that overrides the catalogue's."""
    budget: RecoveryBudget = field(default_factory=RecoveryBudget)
    timeouts: PolicyTimeouts = field(default_factory=PolicyTimeouts)
    stragglers: MigrateStraggler = field(default_factory=MigrateStraggler)
    """The rule for stragglers."""

    @property
    def rules(self) -> Rules:
        """Return the rules in order."""
        return rules_of(self.order, self.noting, self.diverged_loss)

    @property
    def asks(self) -> RecommendedActions:
        """Return the recommended actions under this policy."""
        return RecommendedActions(changed=self.recommended_actions)

    def applied_to(self, case: Case) -> Case:
        """Return *case* with this policy's recommended actions and budget."""
        return replace(case, recommended_actions=self.asks, budget=self.budget)

    def decide(self, case: Case) -> Answer:
        """Return this policy's answer to *case*; its own recommended actions and budget replace those of the case."""
        return decide(self.rules, self.applied_to(case))


SLOWNESS: Final[Mapping[str, MigrateStraggler]] = {
    "patient": MigrateStraggler(min_cost_ratio=10.0, min_saving=600.0, max_migrations=2),
    "balanced": MigrateStraggler(),
    "aggressive": MigrateStraggler(min_cost_ratio=1.5, min_saving=10.0, max_migrations=8),
}
NAMED: Final[Mapping[str, Policy]] = {
    name: Policy(name=name, based_on=name, order=ORDERS[name], noting=NOTING[name], stragglers=SLOWNESS[name]) for name in ORDERS
}
"""Policies that a job can name."""
