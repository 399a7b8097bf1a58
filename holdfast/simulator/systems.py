"""What answers faults: Holdfast at its three levels of integration, and other systems by their public figures.

Holdfast's decisions are those of `holdfast.policies`; another system decides by the few rules of `SimulatedJob`. Figures that a system does
not publish are taken in its favour where nothing better is known: no time for what it does not mention, no cost in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import Cause, Symptom
from holdfast.simulator.phase_times import (
    BAMBOO,
    BYTEROBUST,
    COMMUNICATION,
    DELTA,
    LOAD_DISK,
    LOAD_MEMORY,
    NODE_REPLACED,
    NOTHING,
    OURS,
    RESCHEDULE,
    STARTED,
    STOP,
    SWITCH_COLD,
    SWITCH_HOT,
    SWITCH_PLANNED,
    TORCH,
    WARM_UP,
    Phases,
    PhaseTime,
    seconds,
)


class Restore(StrEnum):
    """The state from which a recovery continues."""

    STEP = "live ranks"
    """Only the open step is lost."""
    SNAPSHOT = "in-memory snapshot"
    DISK = "checkpoint on disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How an action proceeds, and what it continues from."""

    phases: Phases
    restore: Restore

    def seconds(self, step: float) -> float:
        """Return the mean time in seconds."""
        return sum(one.mean(step) for _, one in self.phases)


@dataclass(frozen=True, slots=True)
class LostAttempts:
    """The attempts of an incident that failed before the one that brought the job back."""

    seconds: float
    escalated: bool
    """Ranks could not be replaced: the job came back by another action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySystem:
    """A system, as far as the simulator knows it."""

    name: str
    title: str
    detect: Mapping[Symptom, PhaseTime]
    detect_kinds: Mapping[str, PhaseTime] = field(default_factory=dict)
    """Fault kinds whose detection was measured for themselves."""
    decide: PhaseTime = NOTHING
    failed_attempt: PhaseTime = NOTHING
    """Until the next action, after a fault that broke an attempt off: once in an incident."""
    lost_attempts: Mapping[str, Sequence[LostAttempts]] = field(default_factory=dict)
    """What was measured instead for causes, by name; one is drawn in each incident of that cause."""
    plans: Mapping[RecoveryAction, RecoveryPlan]
    """Plan of each action, with a hot spare where that makes a difference."""
    cold: Mapping[RecoveryAction, RecoveryPlan] = field(default_factory=dict)
    """Plans that differ where no hot spare was free."""
    migrate: PhaseTime | None = None
    """Pause for a planned replacement while training runs; None: all ranks restart."""
    grow: PhaseTime | None = None
    """Pause to take nodes in while training runs; None: all ranks restart."""
    snapshots: bool = False
    """It takes in-memory snapshots."""
    snapshot_lags: tuple[int, ...] = ()
    """Steps that recoveries from in-memory snapshots were measured to go back: drawn, in place of what the snapshot interval gives."""
    hot_spares: bool = False
    """It uses hot spares."""
    step_overhead: float = 0.0
    """Share of the training time that it costs without faults, without checkpoints and snapshots."""
    step_overhead_source: str = ""
    redundant_stages: bool = False
    """The node before each pipeline stage computes it again and takes it over; both lost together send the job back to the disk."""
    rejoin: PhaseTime | None = None
    """For a system that loses whole replicas: how long one is away when a node is free."""
    shrinks: bool = False
    """It continues on fewer nodes when none is free."""
    managed: bool = False
    """Holdfast decides; live ranks stay in their processes if `blocked_reason` is empty."""
    blocked_reason: str = ""

    def detection(self, cause: Cause) -> PhaseTime:
        """Return how long it takes to notice *cause*."""
        return self.detect_kinds.get(cause.kind, self.detect[cause.symptom])

    def plan(self, action: RecoveryAction, *, hot: bool) -> RecoveryPlan:
        """Return how *action* proceeds."""
        return self.plans[action] if hot or action not in self.cold else self.cold[action]


def _restart(load: PhaseTime, restore: Restore, *before: tuple[str, PhaseTime]) -> RecoveryPlan:
    """Return a restart of all ranks."""
    phases = (("isolate", STOP), *before, ("communication", COMMUNICATION), ("load", load), ("warm-up", WARM_UP))
    return RecoveryPlan(phases=phases, restore=restore)


def _everywhere(plan: RecoveryPlan) -> dict[RecoveryAction, RecoveryPlan]:
    """Return *plan* for each action that restarts all ranks."""
    actions = (
        RecoveryAction.RESTART_WORKERS,
        RecoveryAction.REPLACE_NODE,
        RecoveryAction.SHRINK_RESTART,
        RecoveryAction.WAIT_FOR_CAPACITY,
        RecoveryAction.ROLLBACK,
    )
    return dict.fromkeys(actions, plan)


def _same(time: PhaseTime) -> dict[Symptom, PhaseTime]:
    return dict.fromkeys(Symptom, time)


def _switch(pause: PhaseTime, restore: Restore) -> RecoveryPlan:
    """Return a recovery that is published as one pause."""
    return RecoveryPlan(phases=(("resume", pause),), restore=restore)


INSPECTED: Final = _same(PhaseTime(low=10, high=30, source=BYTEROBUST))
OWN: Final = {
    Symptom.CRASH: PhaseTime(low=0.017, high=0.029, source=OURS),
    Symptom.NODE_LOST: PhaseTime(low=2.16, high=2.24, source=OURS),
    Symptom.HANG: PhaseTime(steps=3.0, source="`timeouts.hang_multiplier`: a gap of three steps"),
    Symptom.NO_FIRST_STEP: PhaseTime(steps=3.0, source="`timeouts.hang_multiplier`: a gap of three steps"),
    Symptom.SILENT: NOTHING,
}
DECIDED: Final = PhaseTime(low=0.035, high=0.06, source=OURS)
AGENT_READY: Final = ("reschedule", seconds(0.059, f"{OURS}: an agent runs on each spare node already"))
REASON: Final = "the job's process groups are not Holdfast's own"

_DISK, _MEMORY = _restart(LOAD_DISK, Restore.DISK, AGENT_READY), _restart(LOAD_MEMORY, Restore.SNAPSHOT, AGENT_READY)
_TORCHRUN = RecoveryPlan(phases=(("resume", STARTED),), restore=Restore.DISK)
_REPLACED = RecoveryPlan(phases=(("reschedule", NODE_REPLACED), ("resume", STARTED)), restore=Restore.DISK)
_SCHEDULED = ("reschedule", RESCHEDULE)


def _live(name: str, title: str, remove: float, add: float) -> RecoverySystem:
    """Return a system that reconfigures live ranks: it takes *remove* seconds to go on without a node, and *add* to take one in."""
    source = "TrainMover's measurement on 32 GPUs (arXiv:2412.12636, section 2.3), held constant for all sizes in its favour"
    whole = RecoveryPlan(phases=(("communication", seconds(remove, source)), ("resume", seconds(add, source))), restore=Restore.STEP)
    part = RecoveryPlan(phases=(("communication", seconds(remove, source)),), restore=Restore.STEP)
    waiting = _restart(LOAD_DISK, Restore.DISK, _SCHEDULED)
    plans = {
        RecoveryAction.RESTART_WORKERS: whole,
        RecoveryAction.REPLACE_NODE: whole,
        RecoveryAction.SHRINK_RESTART: part,
        RecoveryAction.WAIT_FOR_CAPACITY: waiting,
        RecoveryAction.ROLLBACK: waiting,
    }
    return RecoverySystem(
        name=name,
        title=title,
        detect=INSPECTED,
        plans=plans,
        migrate=seconds(remove + add, source),
        grow=seconds(add, source),
        shrinks=True,
    )


def _bamboo() -> RecoverySystem:
    """Return Bamboo: the node before a lost one does its work too, at half the speed again, until a new node is there and all regroup.

    In their figures 24 nodes with redundant computation take 3.08 s for a step of GPT-2, and 15 nodes without it 4.25 s: 16 % more time of
    each node for a step. Without a spare node the job regroups without the node; Bamboo itself gives up a whole pipeline then.
    """
    source = f"{BAMBOO}: steps take 1.5 times as long for the 45 s until a node is there"
    slowed = PhaseTime(low=45.0 * (1 - 1 / 1.5), steps=0.5, source=source)
    regrouped = seconds(20.0, f"{BAMBOO}: 20 s until pipelines are regrouped (GPT-2, 24 nodes)")
    anew = seconds(30.0, f"{BAMBOO}: 30 s until all nodes have met again")
    from_disk = RecoveryPlan(phases=(("communication", anew), ("load", LOAD_DISK), ("warm-up", WARM_UP)), restore=Restore.DISK)
    replaced = RecoveryPlan(phases=(("resume", slowed), ("communication", regrouped)), restore=Restore.STEP)
    part = RecoveryPlan(phases=(("communication", regrouped),), restore=Restore.STEP)
    return RecoverySystem(
        name="bamboo",
        title="Bamboo",
        detect=INSPECTED,
        plans={
            RecoveryAction.RESTART_WORKERS: replaced,
            RecoveryAction.REPLACE_NODE: replaced,
            RecoveryAction.SHRINK_RESTART: part,
            RecoveryAction.WAIT_FOR_CAPACITY: from_disk,
            RecoveryAction.ROLLBACK: from_disk,
        },
        migrate=regrouped,
        grow=regrouped,
        step_overhead=24 * 3.08 / (15 * 4.25) - 1,
        step_overhead_source=f"{BAMBOO}: step times of GPT-2 with 24 nodes and, without redundant computation, with 15",
        redundant_stages=True,
        shrinks=True,
    )


def _moving(name: str, title: str, pause: PhaseTime, *, standby: bool) -> RecoverySystem:
    """Return a variant of TrainMover."""
    switch, waiting = _switch(pause, Restore.SNAPSHOT), _restart(LOAD_DISK, Restore.DISK, _SCHEDULED)
    cold = _switch(SWITCH_COLD, Restore.SNAPSHOT)
    plans = {**_everywhere(switch), RecoveryAction.WAIT_FOR_CAPACITY: cold, RecoveryAction.ROLLBACK: waiting}
    return RecoverySystem(
        name=name,
        title=title,
        detect=INSPECTED,
        plans=plans,
        cold={RecoveryAction.RESTART_WORKERS: cold, RecoveryAction.REPLACE_NODE: cold},
        migrate=SWITCH_PLANNED,
        snapshots=True,
        hot_spares=standby,
    )


_ALL: Final = (
    RecoverySystem(
        name="holdfast-groups",
        title="Holdfast, managed groups",
        detect=OWN,
        decide=DECIDED,
        plans={
            **_everywhere(_MEMORY),
            RecoveryAction.ROLLBACK: _DISK,
            RecoveryAction.RETRY_STEP: RecoveryPlan(phases=(("communication", DELTA),), restore=Restore.STEP),
            RecoveryAction.REPLACE_RANKS: _switch(SWITCH_HOT, Restore.STEP),
            RecoveryAction.SHRINK_LIVE: RecoveryPlan(phases=(("communication", DELTA),), restore=Restore.STEP),
        },
        cold={RecoveryAction.REPLACE_RANKS: _switch(SWITCH_COLD, Restore.STEP)},
        migrate=SWITCH_PLANNED,
        grow=SWITCH_PLANNED,
        snapshots=True,
        hot_spares=True,
        managed=True,
    ),
    RecoverySystem(
        name="holdfast-state",
        title="Holdfast, managed state",
        detect=OWN,
        decide=DECIDED,
        plans={**_everywhere(_MEMORY), RecoveryAction.ROLLBACK: _DISK},
        snapshots=True,
        managed=True,
        blocked_reason=REASON,
    ),
    RecoverySystem(
        name="holdfast-script",
        title="Holdfast, unchanged script",
        detect=OWN,
        decide=DECIDED,
        plans=_everywhere(_DISK),
        managed=True,
        blocked_reason=REASON,
    ),
    RecoverySystem(
        name="torchrun",
        title="torchrun --max-restarts, from disk",
        detect={
            **_same(seconds(600.0, TORCH)),
            Symptom.CRASH: PhaseTime(low=0.14, high=0.21, source="measured beside Holdfast, two CPU cores"),
            Symptom.SILENT: NOTHING,
        },
        plans={**_everywhere(_REPLACED), RecoveryAction.RESTART_WORKERS: _TORCHRUN, RecoveryAction.ROLLBACK: _TORCHRUN},
    ),
    RecoverySystem(
        name="restart-hot-spares",
        title="restart with hot spares, from disk",
        detect=INSPECTED,
        plans=_everywhere(_restart(LOAD_DISK, Restore.DISK)),
        cold={RecoveryAction.REPLACE_NODE: _restart(LOAD_DISK, Restore.DISK, _SCHEDULED)},
        hot_spares=True,
    ),
    RecoverySystem(
        name="in-memory",
        title="restart with hot spares, from in-memory checkpoints",
        detect=INSPECTED,
        plans={**_everywhere(_restart(LOAD_MEMORY, Restore.SNAPSHOT)), RecoveryAction.ROLLBACK: _restart(LOAD_DISK, Restore.DISK)},
        cold={RecoveryAction.REPLACE_NODE: _restart(LOAD_MEMORY, Restore.SNAPSHOT, _SCHEDULED)},
        snapshots=True,
        hot_spares=True,
    ),
    RecoverySystem(
        name="torchft",
        title="torchft, lost replicas",
        detect={**INSPECTED, **dict.fromkeys((Symptom.CRASH, Symptom.NODE_LOST), seconds(1.0, "torchft#35: about 1 s to drop a replica"))},
        plans=_everywhere(_restart(LOAD_DISK, Restore.DISK, _SCHEDULED)),
        rejoin=seconds(320.0, "start of 5 min (Clockwork's cost model) and recovery from a peer of 20 s (torchft#329)"),
    ),
    _live("parcae", "Parcae", 21.0, 200.0),
    _live("oobleck", "Oobleck", 57.0, 100.0),
    _bamboo(),
    _moving("trainmover", "TrainMover with standbys", SWITCH_HOT, standby=True),
    _moving("trainmover-no-standby", "TrainMover without standbys", SWITCH_COLD, standby=False),
)
SYSTEMS: Final[Mapping[str, RecoverySystem]] = {one.name: one for one in _ALL}
"""Systems by the names that scenarios use."""
