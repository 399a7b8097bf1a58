"""Measure what snapshots cost and how fast they are restored on a GPU: `python -m benchmarks.gpu --json FILE`.

Without a card every key has `"device": null` and `"met": null`. `--device cpu --gigabytes 0.1` tries the program itself, and meets no goal.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.measuring import spread
from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import PROFILE, SnapshotLimits
from holdfast.runtime.snapshots.restore import Restorer, SnapshotSource
from holdfast.runtime.snapshots.restore_planner import Fetch, SnapshotRef
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state.training import Training

GOALS: Final = {
    "fault_to_first_step_2_ranks": 0.5,
    "fault_to_first_step_4_ranks": 0.5,
    "managed_groups_overhead": 0.01,
    "snapshot_overhead": 0.01,
    "snapshot_throughput_of_pinned_copy": 0.8,
    "load_from_memory_times_faster": 10.0,
}
AT_LEAST: Final = frozenset({"snapshot_throughput_of_pinned_copy", "load_from_memory_times_faster"})
"""Keys whose goal is a lower bound; for the others it is an upper one."""
TENSOR: Final = 64 * 2**20
"""Elements of a parameter."""
ROUNDS: Final = 20
LOADS: Final = 3


def settle(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Steps:
    """A training whose state has so many *gigabytes*, with steps of about *seconds* on its device."""

    def __init__(self, memstore: Path, device: torch.device, gigabytes: float, seconds: float) -> None:
        elements = int(gigabytes * 1e9 / 4)
        sizes = [TENSOR] * (elements // TENSOR) + ([elements % TENSOR] if elements % TENSOR else [])
        self.model = nn.ParameterList(nn.Parameter(torch.ones(size, device=device)) for size in sizes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.training = Training(model=self.model, optimizers=[self.optimizer])
        config = SnapshotConfig(memstore=memstore, max_bytes=0, limits=SnapshotLimits(overhead=1.0))  # each step, whatever it costs
        self.snapshotter = Snapshotter(self.training, config)
        self.snapshotter.set_place(SnapshotPlace(0, 1, "all"), 1)
        self.device, self.step, self.number = device, 0, 1
        self._work = torch.ones(2048 if device.type == "cuda" else 256, 2048 if device.type == "cuda" else 256, device=device)
        begin = settle(device)
        self._compute(20)
        self.number = max(1, round(20 * seconds / (settle(device) - begin)))

    def _compute(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self._work, self._work)

    def one(self, *, copied: bool) -> float:
        """Return the seconds of a step with or without a snapshot."""
        begin = settle(self.device)
        self.snapshotter.enabled = copied or self.step < PROFILE
        self.snapshotter.begin_step()
        if self.snapshotter.due(self.step):
            self.snapshotter.take(self.step, self.training.rank_state(), {})
        self._compute(self.number)
        self.optimizer.step()
        self.step += 1
        return settle(self.device) - begin


def pinned_rate(device: torch.device) -> float:
    """Return the bytes per second of a plain copy into pinned memory."""
    source = torch.ones(256 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty(len(source), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target.copy_(source)
    begin = settle(device)
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    return 10 * len(source) / (settle(device) - begin)


def measure(device: torch.device, gigabytes: float, seconds: float) -> dict[str, list[float]]:
    """Return the values of each key that this program measures."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        steps = Steps(Path(memory), device, gigabytes, seconds)
        for _ in range(2 * PROFILE):
            steps.one(copied=True)
        plain, copied, rates, rate = [], [], [], pinned_rate(device)
        for _ in range(ROUNDS):
            plain.append(steps.one(copied=False))
            before = steps.snapshotter.counts.copied
            copied.append(steps.one(copied=True))
            spent = steps.snapshotter.counts.copied - before
            rates.append(steps.snapshotter.counts.size / spent / rate if spent else 0.0)
        loads = [load(steps, Path(memory), Path(disk)) for _ in range(LOADS)]
        steps.snapshotter.close()
    return {
        "snapshot_overhead": [one / other - 1 for one, other in zip(copied, plain, strict=True)],
        "snapshot_throughput_of_pinned_copy": rates,
        "load_from_memory_times_faster": loads,
    }


def load(steps: Steps, memory: Path, disk: Path) -> float:
    """Return how many times faster the newest snapshot is loaded than a file on disk that is in no cache."""
    source = SnapshotSource(memory, "here", {}, "")
    newest = max((SnapshotRef(**one) for one in source.listed(1)), key=lambda one: one.step)
    begin = settle(steps.device)
    Restorer(steps.training, source).take(Fetch(target=0, parts=(newest,), rank_state=newest), lambda _state: None)
    from_memory = settle(steps.device) - begin
    path = disk / "state.pt"
    torch.save(steps.model.state_dict(), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = settle(steps.device)
    steps.model.load_state_dict(torch.load(path, map_location=steps.device, weights_only=True))
    return (settle(steps.device) - begin) / from_memory


def results(found: dict[str, list[float]], device: str | None) -> dict[str, Any]:
    """Return one entry for each goal; what was not measured on a card has met nothing, and missed nothing."""
    entries: dict[str, Any] = {}
    for key, goal in GOALS.items():
        entry = spread(found.get(key, []))
        median = entry["median"]
        met = None if median is None or device is None else (median >= goal if key in AT_LEAST else median <= goal)
        entries[key] = {**entry, "goal": goal, "met": met, "device": device}
        if device is not None and median is None:
            entries[key]["reason"] = "this program does not measure it yet"
    return entries


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a step")
    arguments = parser.parse_args()
    device, found = None, dict[str, list[float]]()
    if arguments.device == "cpu" or torch.cuda.is_available():
        found = measure(
            torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu"), arguments.gigabytes, arguments.seconds
        )
        device = torch.cuda.get_device_name(0) if arguments.device == "cuda" else None
    else:
        print("benchmarks.gpu: nothing was measured: torch finds no NVIDIA GPU here")
    text = json.dumps(results(found, device), indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
