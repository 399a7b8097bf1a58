"""How long the state of a job takes from and to its tiers: memory of the same node, a replica on another node, and storage.

All of it is bytes by bandwidth, without latency and without other traffic. Each copy of the model holds the whole state, spread evenly over
its nodes; a save writes the state once, each node as much as the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.phase_times import PhaseTime
from holdfast.simulator.scenario import UNSIZED_WRITE, ScenarioJob, ScenarioLinks
from holdfast.simulator.systems import RecoveryPlan, RecoverySystem, Restore

STALL: Final = 5.0
"""Seconds that training stops for a save, of a job without a stated size. An assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTransfers:
    """Seconds that one job needs to move its state."""

    local: float
    """Load the snapshot in the memory of the same node."""
    replica: float
    """Load the snapshot of another node, or the state of a live rank."""
    disk: float
    """Load a checkpoint."""
    stall: float
    """Copy what a checkpoint takes to the memory of the nodes."""
    write: float
    """Write a checkpoint."""

    @classmethod
    def of(cls, job: ScenarioJob, links: ScenarioLinks | None, gpus_per_node: int) -> Self | None:
        """Return the times of *job*; None if it does not say how large its state is."""
        if job.state is None or links is None:
            return None
        share, written = job.state * job.copies / job.nodes, job.state / job.nodes
        host = gpus_per_node * links.host
        return cls(
            local=share / host,
            replica=max(share / links.network, share / host),
            disk=max(job.state * (1 if job.checkpoint.load_once else job.copies) / links.storage, share / links.network, share / host),
            stall=written / host,
            write=max(job.state / links.storage, written / links.network),
        )

    def applied_to(self, system: RecoverySystem) -> RecoverySystem:
        """Return *system* with these times in place of published ones for loading; measured ones stay.

        A published pause that is not split into phases includes a transfer of unknown length: it becomes as long as the transfer here, if
        that is longer.
        """

        def pause(time: PhaseTime | None) -> PhaseTime | None:
            return None if time is None else _at_least(time, self.replica)

        return replace(
            system,
            plans={action: self._plan(action, plan) for action, plan in system.plans.items()},
            cold={action: self._plan(action, plan) for action, plan in system.cold.items()},
            migrate=pause(system.migrate),
            grow=pause(system.grow),
            rejoin=pause(system.rejoin),
        )

    def _plan(self, action: RecoveryAction, plan: RecoveryPlan) -> RecoveryPlan:
        load = self._load(action, plan.restore)
        split = any(name == "load" for name, _ in plan.phases)

        def changed(name: str, time: PhaseTime) -> PhaseTime:
            if name == "load" and not time.measured:
                return PhaseTime(low=load, source="size of the state by the scenario's bandwidths")
            return _at_least(time, load) if name == "resume" and not split else time

        return replace(plan, phases=tuple((name, changed(name, time)) for name, time in plan.phases))

    def _load(self, action: RecoveryAction, restore: Restore) -> float:
        if restore is Restore.DISK:
            return self.disk
        return self.local if restore is Restore.SNAPSHOT and action is RecoveryAction.RESTART_WORKERS else self.replica


def _at_least(time: PhaseTime, seconds: float) -> PhaseTime:
    """Return *time*, but *seconds* at least; measured values stay."""
    if time.measured or time.mean(0.0) >= seconds:
        return time
    return replace(time, low=max(time.low, seconds), high=None if time.high is None else max(time.high, seconds))


def save_times(job: ScenarioJob, transfers: StateTransfers | None) -> tuple[float, float]:
    """Return the seconds that training stops for a save, and that it is then written for: as stated, or by the size of the state."""
    stall, write = (STALL, UNSIZED_WRITE.total_seconds()) if transfers is None else (transfers.stall, transfers.write)
    plan = job.checkpoint
    return (
        stall if plan.stall is None else plan.stall.total_seconds(),
        write if plan.overlapped is None else plan.overlapped.total_seconds(),
    )
