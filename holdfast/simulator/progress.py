"""How far training is, as arithmetic between events: no event is needed for a step or a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.simulator import accounts
from holdfast.simulator.accounts import JobAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPace:
    """What training costs beside its steps. All times are seconds."""

    step: float
    interval: float
    """Training time between two checkpoints on disk."""
    stall: float
    overlapped: float
    snapshot_steps: int
    """Steps between two in-memory snapshots; 0: none are taken."""
    snapshot_overhead: float
    snapshot_lag: float = 0.0
    """Time until a snapshot has reached its replica node; it cannot be used before."""
    step_overhead: float

    @property
    def costs(self) -> dict[str, float]:
        """Return the time that each category takes beside one second of steps."""
        return {
            accounts.CHECKPOINTS: self.stall / self.interval,
            accounts.SNAPSHOTS: self.snapshot_overhead if self.snapshot_steps else 0.0,
            accounts.OVERHEAD: self.step_overhead,
        }


class TrainingProgress:
    """The training that a job has done, in seconds of steps on all its nodes, and the states that it can go back to."""

    def __init__(self, pace: TrainingPace, account: JobAccount) -> None:
        self.pace, self._account = pace, account
        self.done = 0.0
        """Seconds of steps that would be kept if nothing happened."""
        self.furthest = 0.0
        self._on_disk = 0.0
        """A checkpoint that is known to be complete."""
        self._in_memory = 0.0
        """An in-memory snapshot that is known to be complete."""
        self._since: float | None = None
        self._capacity, self._slowdown = 1.0, 0.0
        self._beside = 1 + sum(pace.costs.values())

    @property
    def rate(self) -> float:
        """Return the seconds of steps in a second of training."""
        return self._capacity * (1 - self._slowdown) / self._beside

    def start(self, now: float, *, capacity: float, slowdown: float) -> None:
        """Train from *now* on, on a share *capacity* of the nodes and slowed down by the share *slowdown*."""
        assert self._since is None
        self._since, self._capacity, self._slowdown = now, capacity, slowdown

    def stop(self, now: float) -> None:
        """Stop training, and account for the time since it started."""
        assert self._since is not None
        seconds, self._since = now - self._since, None
        gained = seconds * self.rate
        self.done += gained
        self.furthest = max(self.furthest, self.done)
        spend = self._account.spend
        spend(accounts.PRODUCTIVE, gained)
        for category, cost in self.pace.costs.items():
            spend(category, gained * cost)
        spend(accounts.SLOWDOWN, seconds * self._capacity * self._slowdown)
        spend(accounts.LOST_CAPACITY, seconds * (1 - self._capacity))

    def at(self, now: float) -> float:
        """Return what is done at *now*."""
        return self.done if self._since is None else self.done + (now - self._since) * self.rate

    @property
    def training(self) -> bool:
        """Return whether training runs."""
        return self._since is not None

    def until(self, done: float) -> float:
        """Return the seconds from the start of training until so much is *done*."""
        return max(0.0, done - self.done) / self.rate if self.rate else math.inf

    @property
    def step(self) -> int:
        """Return the number of complete steps."""
        return int(self.done / self.pace.step + 1e-9)

    @property
    def best_step(self) -> int:
        """Return the largest number of steps that were ever complete."""
        return int(self.furthest / self.pace.step + 1e-9)

    def newest_step(self) -> float:
        """Return the training up to the open step."""
        return math.floor(self.done / self.pace.step + 1e-9) * self.pace.step

    def newest_snapshot(self) -> float:
        """Return the training in the newest in-memory snapshot."""
        every = self.pace.snapshot_steps * self.pace.step
        if not every:
            return self.newest_checkpoint()
        copied = self.done - self.pace.snapshot_lag * self.rate
        return max(self.newest_checkpoint(), self._in_memory, math.floor(copied / every + 1e-9) * every)

    def newest_checkpoint(self, before: float | None = None) -> float:
        """Return the training in the newest complete checkpoint on disk, of those from *before* so much was done."""
        newest = max(self._on_disk, self._saved(self.done - self.pace.overlapped * self.rate))
        return newest if before is None else min(newest, self._saved(before))

    def _saved(self, done: float) -> float:
        """Return the training at the last time that a checkpoint was due."""
        return max(0.0, math.floor(done / self.pace.interval + 1e-9) * self.pace.interval)

    def restore(self, done: float) -> float:
        """Continue from the state with so much *done*; return the seconds of steps that are lost."""
        self._on_disk = min(done, self.newest_checkpoint())
        self._in_memory = min(done, self.newest_snapshot())
        lost = self.done - done
        self._account.spend(accounts.PRODUCTIVE, -lost)
        self._account.spend(accounts.ROLLBACK, lost)
        self._account.steps_lost += max(0, self.step - int(done / self.pace.step + 1e-9))
        self.done = done
        return lost
