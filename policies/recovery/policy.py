"""A recovery policy as a value: actions in order, rules about past faults, recommended actions, budget and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from holdfast.detectors.catalogue import RecommendedAction, RecommendedActions
from holdfast.policies.recovery.case import IN_PROCESS, Case, RecoveryAction, RecoveryBudget
from holdfast.policies.recovery.escalation import NOTING, ORDERS, Answer, Noting, RollBack, Rules, decide, rules_of
from holdfast.policies.slowness import MigrateStraggler

BASE: Final = "balanced"
"""Policy of a job that names none."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the job takes to start and to make a step: what an action may take depends on it."""

    start: float | None = None
    """Seconds from the start of the workers to their first step, the longest so far; None: they have made none yet."""
    step: float = 0.0
    """Seconds of a step."""
    startup: float = 0.0
    """Seconds that a start may take that nothing is known of."""


UNKNOWN_PACE: Final = Pace()
STARTS: Final = 2.0
STEPS: Final = 3.0
"""An action without a timeout of its own may take as long as so many starts and steps of the job, if that is more than the default.

A model that loads for ten minutes would never come back if a restart were cut off after two.
"""


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
    stated: frozenset[str] = frozenset()
    """Names of the timeouts that a job or policy file states: they hold as they are, however long the job takes to start."""

    def of(self, action: RecoveryAction, pace: Pace = UNKNOWN_PACE) -> float:
        """Return the seconds that *action* may take once its nodes are there; raise KeyError for failing the job."""
        least: float = getattr(self, TIMEOUT_OF[action])
        if self.is_stated(action):
            return least
        start = pace.start if pace.start is not None else 0.0 if action in IN_PROCESS else pace.startup / STARTS
        return max(least, STARTS * start + STEPS * pace.step)

    def is_stated(self, action: RecoveryAction) -> bool:
        """Return whether a file states the timeout of *action*."""
        return TIMEOUT_OF[action] in self.stated


TIMEOUT_OF: Final[Mapping[RecoveryAction, str]] = {
    RecoveryAction.RETRY_STEP: "retry_step",
    RecoveryAction.REPLACE_RANKS: "replace_ranks",
    RecoveryAction.SHRINK_LIVE: "shrink_live",
    RecoveryAction.RESTART_WORKERS: "restart_workers",
    RecoveryAction.ROLLBACK: "restart_workers",
    RecoveryAction.REPLACE_NODE: "replace_node",
    RecoveryAction.SHRINK_RESTART: "shrink_restart",
    RecoveryAction.WAIT_FOR_CAPACITY: "replace_node",
}
"""Action to its field of `PolicyTimeouts`."""


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
    fail_on_start_errors: bool = True
    """An error that a script meets at every start, on all ranks of the job's first start, is the script's without a restart."""

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
