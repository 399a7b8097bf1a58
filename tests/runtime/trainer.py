"""A training in this process with snapshots, for tests of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import PROFILE, SnapshotLimits
from holdfast.runtime.snapshots.device_runtime import DeviceRuntime
from holdfast.runtime.snapshots.restore import Restorer, SnapshotSource
from holdfast.runtime.snapshots.restore_planner import Fetch, SnapshotRef
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state.training import Training
from holdfast.runtime.telemetry.wait_windows import WaitWindows

FIRST = PROFILE
"""The first step of which a snapshot is taken."""


class Net(nn.Module):
    """Weights that are not contiguous, buffers that change in a forward pass, and some plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.rest = nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 3000), nn.Linear(3000, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Pass *x* on."""
        out: Tensor = self.rest(self.norm(self.image(x)))
        return out


opened: list[Snapshotter] = []
"""Snapshotters to be closed when a test has ended."""


class Trainer:
    """A training and its snapshotter."""

    def __init__(
        self,
        memstore: Path,
        *,
        limit: int = 0,
        place: SnapshotPlace | None = None,
        device: str = "cpu",
        runtime: DeviceRuntime | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.net = Net().to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.extra: dict[str, Any] = {"seen": 0, "mean": torch.zeros(5)}
        self.training = Training(model=self.net, optimizers=[self.optimizer], schedulers=[self.scheduler], extra=self.extra)
        self.idle = WaitWindows()
        self.snapshotter = Snapshotter(
            self.training,
            SnapshotConfig(memstore=memstore, max_bytes=limit, limits=SnapshotLimits()),
            windows=self.idle,
            runtime=runtime,
        )
        opened.append(self.snapshotter)
        self.snapshotter.set_place(place or SnapshotPlace(0, 1, "net"), 1)
        self.step = 0

    def begin(self) -> None:
        """Begin a step: a snapshot of the one before."""
        self.snapshotter.begin_step()
        if self.snapshotter.due(self.step):
            buffers = {f"model.{name}": one.detach().clone() for name, one in self.net.named_buffers()}
            self.snapshotter.take(self.step, self.training.rank_state(), buffers)

    def end(self, apply: Callable[[], object] | None = None) -> None:
        """Do all of the step that was begun; *apply*: what is called in place of the optimizer's step."""
        self.net(torch.randn(8, 3, 8, 8, device=self.device)).square().mean().backward()
        (apply or self.optimizer.step)()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.extra["seen"] += 1
        self.extra["mean"] += 1
        self.step += 1

    def replay(self) -> None:
        """Apply a step without the hooks that torch calls around it, as the replay of a graph does."""
        type(self.optimizer).step.__wrapped__(self.optimizer)  # type: ignore[attr-defined]

    def to(self, step: int, apply: Callable[[], object] | None = None) -> None:
        """Train up to *step*; *apply*: what is called in place of the optimizer's step."""
        while self.step < step:
            self.begin()
            self.end(apply)

    def state(self) -> dict[str, Any]:
        """Return a copy of everything."""
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        return copy.deepcopy(state | {"extra": self.extra})


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, tensors bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def stored(memstore: Path) -> dict[int, list[SnapshotRef]]:
    """Return the snapshots in *memstore*, by step."""
    found: dict[int, list[SnapshotRef]] = {}
    for item in SnapshotSource(memstore, "here", {}, "").listed(1):
        found.setdefault(item["step"], []).append(SnapshotRef(**item))
    return found


def restore(trainer: Trainer, memstore: Path, step: int) -> list[bytes]:
    """Restore *trainer* to *step*; return the per-rank states that were restored with it."""
    rank_states: list[bytes] = []
    parts = sorted(stored(memstore)[step], key=lambda one: one.part)
    Restorer(trainer.training, SnapshotSource(memstore, "here", {}, "")).take(
        Fetch(target=0, parts=tuple(parts), rank_state=parts[0]), rank_states.append
    )
    return rank_states
