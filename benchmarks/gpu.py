"""Measure recoveries, managed groups and snapshots on one GPU, which all ranks share: `python -m benchmarks.gpu --json FILE`.

- ``fault_to_first_step_N_ranks``: a real job on one node of N ranks and a hot spare. Each rank in turn is killed. From the kill to the
  first new step that all ranks have committed, less the median of the steps before: detection, recovery, and what a repeated step takes
  longer.
- ``managed_groups_overhead``: what a step over a managed group, with a session and its vote, takes longer than one over a backend of
  torch's own; both by turns in the same two processes (train_beside_stock.py).
- ``snapshot_*``, ``load_from_memory_times_faster``: one rank, with and without a snapshot by turns.

Without a card every key has `"device": null` and `"met": null`. `--device cpu --gigabytes 0.1` tries the program itself over gloo, and
meets no goal. `--only KEY ...` measures some keys.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.measuring import PATIENCE, ROOT, prefect, spread, wait_for
from benchmarks.real_job import Job
from benchmarks.train_beside_stock import STEPS, settle
from holdfast.host.ports import free_port
from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import PROFILE, SnapshotLimits
from holdfast.runtime.snapshots.restore import Restorer, SnapshotSource
from holdfast.runtime.snapshots.restore_planner import Fetch, SnapshotRef
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state.training import Training
from tests.runtime.flow_double import FlowDouble, Workers

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
OVERHEAD: Final = "managed_groups_overhead"
SNAPSHOTS: Final = frozenset({"snapshot_overhead", "snapshot_throughput_of_pinned_copy", "load_from_memory_times_faster"})
BESIDE_STOCK: Final = ROOT / "benchmarks" / "train_beside_stock"
TURNS: Final = 10
"""Turns of a round."""
TENSOR: Final = 64 * 2**20
"""Elements of a parameter."""
ROUNDS: Final = 20
LOADS: Final = 3


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


# -- ranks --------------------------------------------------------------------------------------------------------------


def faults(device: str, ranks: int, rounds: int, place: Path, environment: dict[str, str]) -> tuple[list[float], list[float]]:
    """Kill each rank *rounds* times; return the seconds to the first new step, less a step, and the seconds of a step."""
    plan: dict[str, Any] = {"nnodes": 1, "nproc_per_node": ranks, "spare_nodes": 0, "hot_spares": 1}
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if device == "cuda" else ""
    job = Job(place, environment, stock=False, **plan, args=["--device", device], env={"CUDA_VISIBLE_DEVICES": card})
    try:
        taken = [job.recover(rank, "killed") for _ in range(rounds) for rank in range(ranks)]
    finally:
        job.close()
    wrong = {one["action"] for one in taken} - {"replace-ranks"}
    if wrong:
        raise RuntimeError(f"a killed rank was not replaced: the recovery action was {', '.join(map(str, wrong))}")
    return [one["seconds"] - one["step"] for one in taken], [one["step"] for one in taken]


def beside_stock(device: str, rounds: int, seconds: float, place: Path) -> tuple[list[float], list[float]]:
    """Return by turn what a step over a managed group takes longer than one of torch's own, as a fraction, and the latter's seconds."""
    workers = Workers()
    flow = FlowDouble(workers, place, str(BESIDE_STOCK), 0, device, free_port(), rounds, seconds, ranks=2, stride=1)
    try:
        pids = set(flow.begin().pids.values())
        wait_for(lambda: pids <= workers.ended().keys(), "the end of the ranks", every=0.2, seconds=PATIENCE + 4 * rounds * STEPS * seconds)
        ended = flow.finish()
        if ended.status != [0, 0]:
            raise RuntimeError(f"the ranks ended with {ended.status}:\n{flow.logs()}")
    finally:
        flow.close()
        workers.close()
    turns = ended.results[0]
    return [ours / theirs - 1 for ours, theirs in zip(turns["managed"], turns["stock"], strict=True)], turns["stock"]


def measure_ranks(device: str, only: set[str], rounds: int, seconds: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the values of those keys *only* that need several ranks, and the seconds of their steps."""
    found, steps = dict[str, list[float]](), dict[str, list[float]]()
    recoveries = {f"fault_to_first_step_{ranks}_ranks": ranks for ranks in (2, 4)}
    with tempfile.TemporaryDirectory(prefix="hf-gpu-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        if OVERHEAD in only:
            (place / "beside").mkdir()
            found[OVERHEAD], steps[OVERHEAD] = beside_stock(device, rounds * TURNS, seconds, place / "beside")
        if only & recoveries.keys():
            with prefect(place) as environment:
                for key, ranks in recoveries.items():
                    if key in only:
                        found[key], steps[key] = faults(device, ranks, rounds * 4 // ranks, place / f"job-{ranks}", environment)
    return found, steps


def results(found: dict[str, list[float]], steps: dict[str, list[float]], device: str | None) -> dict[str, Any]:
    """Return one entry for each goal; what was not measured on a card has met nothing, and missed nothing. *steps*: seconds of a step."""
    entries: dict[str, Any] = {}
    for key, goal in GOALS.items():
        entry = spread(found.get(key, []))
        median = entry["median"]
        met = None if median is None or device is None else (median >= goal if key in AT_LEAST else median <= goal)
        entries[key] = {**entry, "goal": goal, "met": met, "device": device}
        if steps.get(key):
            entries[key]["step_seconds"] = spread(steps[key])
        if device is not None and median is None:
            entries[key]["reason"] = "not asked for"
    return entries


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a step")
    parser.add_argument("--rounds", type=int, default=2, help="times that each of four ranks is killed; two ranks twice as often")
    parser.add_argument("--only", nargs="+", default=list(GOALS), choices=list(GOALS), metavar="KEY", help=f"of {', '.join(GOALS)}")
    arguments = parser.parse_args()
    kind, name = arguments.device, None
    found, steps = dict[str, list[float]](), dict[str, list[float]]()
    if kind == "cpu" or torch.cuda.is_available():
        name = torch.cuda.get_device_name(0) if kind == "cuda" else None
        found, steps = measure_ranks(kind, set(arguments.only), arguments.rounds, arguments.seconds / 4)
        if SNAPSHOTS & set(arguments.only):  # last: memory that this process holds on the card is not the ranks'
            found |= measure(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), arguments.gigabytes, arguments.seconds)
    else:
        print("benchmarks.gpu: nothing was measured: torch finds no NVIDIA GPU here")
    text = json.dumps(results(found, steps, name), indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
