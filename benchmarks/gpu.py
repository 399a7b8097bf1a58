"""Measure recoveries, managed groups and snapshots on one GPU, which all ranks share: `python -m benchmarks.gpu --json FILE`.

- ``fault_to_first_step_N_ranks``: a real job on one node of N ranks and a hot spare. Each rank in turn is killed. From the kill to the
  first new step that all ranks have committed, less the median of the steps before: detection, recovery, and what a repeated step takes
  longer.
- ``managed_groups_overhead``: what a step over a managed group, with a session and its vote, takes longer than one over a backend of
  torch's own; both by turns in the same two processes (train_beside_stock.py).
- ``snapshot_overhead``, ``load_from_memory_times_faster``: one rank, with and without a snapshot by turns.
- ``snapshot_throughput_of_pinned_copy``: bytes per second, by the clock, of snapshots that are copied at once and not spread over a step,
  against a plain copy into pinned memory.

Each part runs in a process of its own: one that fails, is killed or hangs costs no other part its result. The file is written after each,
and whatever has come of a part that is ended counts; a key that lacks values has a `reason`. After `--limit` seconds all have ended.

Without a card every key has `"device": null` and `"met": null`. `--device cpu --gigabytes 0.1` tries the program itself over gloo, and
meets no goal. `--only KEY ...` measures some keys. Status 0: each key that was asked for has values, or there is no card.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from tests.gpu.__main__ import versions
from tests.runtime.flow_double import FlowDouble, Workers
from tests.runtime.ranks import torch_imported

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
SNAPSHOTS: Final = ("snapshot_overhead", "snapshot_throughput_of_pinned_copy", "load_from_memory_times_faster")
RECOVERIES: Final = {f"fault_to_first_step_{ranks}_ranks": ranks for ranks in (2, 4)}
PARTS: Final[tuple[tuple[str, ...], ...]] = ((OVERHEAD,), SNAPSHOTS, *((key,) for key in RECOVERIES))
"""What is measured together, in order: what can be cut short is last."""
LIMIT: Final = 540.0
"""Seconds after which all parts have been told to end."""
RESERVED: Final = 0.15
"""Of the limit, what a part leaves to each of those after it."""
GRACE: Final = 30.0
"""Seconds that a part which is ended has to end its job."""
KILLED: Final = 5.0
"""Seconds after which a part that was killed is left behind: its driver may never let go of it."""
SHM: Final = "/dev/shm"  # noqa: S108 (snapshots are in shared memory)
Keep = Callable[..., None]
"""Keeps one value of a key, and the seconds of a step (``step``) where it has them."""
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

    def at_once(self) -> float | None:
        """Return the seconds from the begin of a snapshot to its end when nothing spreads it; None where there was no room for it."""
        self.snapshotter.enabled, taken = True, self.snapshotter.counts.taken
        self.snapshotter.begin_step()
        begin = settle(self.device)
        if self.snapshotter.due(self.step):
            self.snapshotter.take(self.step, self.training.rank_state(), {})
            self.snapshotter.finish()
        seconds = settle(self.device) - begin
        self.optimizer.step()
        self.step += 1
        return seconds if self.snapshotter.counts.taken > taken else None


def pinned_rate(device: torch.device) -> float:
    """Return the bytes per second of a plain copy into pinned memory."""
    source = torch.ones(256 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty(len(source), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target.copy_(source)
    begin = settle(device)
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    return 10 * len(source) / (settle(device) - begin)


def measure(device: torch.device, gigabytes: float, seconds: float, keep: Keep) -> None:
    """Measure the keys of `SNAPSHOTS`."""
    prefix = _prefix(os.getpid())
    with tempfile.TemporaryDirectory(dir=SHM, prefix=prefix) as memory, tempfile.TemporaryDirectory(prefix=prefix) as disk:
        steps = Steps(Path(memory), device, gigabytes, seconds)
        for _ in range(2 * PROFILE):
            steps.one(copied=True)
        rate = pinned_rate(device)
        taken = 0
        for _ in range(ROUNDS):
            plain, before = steps.one(copied=False), steps.snapshotter.counts.copied
            copied = steps.one(copied=True)
            spent = steps.snapshotter.counts.copied - before
            if spent:  # without, there was no room, and it was a step without a snapshot
                taken += 1
                keep("snapshot_overhead", copied / plain - 1)
            alone = steps.at_once()
            if alone is not None:
                keep("snapshot_throughput_of_pinned_copy", steps.snapshotter.counts.size / alone / rate)
        if not taken:
            free = shutil.disk_usage(SHM).free / 1e9
            raise RuntimeError(f"no snapshot of {gigabytes:g} GB was taken; {SHM} has {free:.2f} GB free, and holds two at a time")
        for _ in range(LOADS):
            keep("load_from_memory_times_faster", load(steps, Path(memory), Path(disk)))
        steps.snapshotter.close()


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


def faults(key: str, device: str, rounds: int, keep: Keep) -> None:
    """Kill each rank *rounds* times: keep the seconds to the first new step, less a step."""
    ranks = RECOVERIES[key]
    plan: dict[str, Any] = {"nnodes": 1, "nproc_per_node": ranks, "spare_nodes": 0, "hot_spares": 1}
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if device == "cuda" else ""
    with (
        tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()), ignore_cleanup_errors=True) as folder,
        prefect(Path(folder)) as environment,
    ):
        place = Path(folder) / f"job-{ranks}"
        job = Job(place, environment, stock=False, **plan, args=["--device", device], env={"CUDA_VISIBLE_DEVICES": card})
        try:
            for rank in list(range(ranks)) * rounds:
                taken = job.recover(rank, "killed")
                if taken["action"] != "replace-ranks":
                    raise RuntimeError(f"a killed rank was not replaced: the recovery action was {taken['action']}")
                keep(key, taken["seconds"] - taken["step"], step=taken["step"])
        finally:
            job.close()


def beside_stock(device: str, rounds: int, seconds: float, keep: Keep) -> None:
    """Keep by turn what a step over a managed group takes longer than one of torch's own, as a fraction, and the latter's seconds."""
    with (
        tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()), ignore_cleanup_errors=True) as folder,
        torch_imported(Path(folder) / "torch") as torch,
    ):
        workers = Workers(torch)
        flow = FlowDouble(workers, Path(folder), str(BESIDE_STOCK), 0, device, free_port(), rounds, seconds, ranks=2, stride=1)
        try:
            pids = set(flow.begin().pids.values())
            patience = PATIENCE + 4 * rounds * STEPS * seconds
            wait_for(lambda: pids <= workers.ended().keys(), "the end of the ranks", every=0.2, seconds=patience)
            ended = flow.finish()
            if ended.status != [0, 0]:
                raise RuntimeError(f"the ranks ended with {ended.status}:\n{flow.logs()}")
        finally:
            flow.close()
            workers.close()
    for ours, theirs in zip(ended.results[0]["managed"], ended.results[0]["stock"], strict=True):
        keep(OVERHEAD, ours / theirs - 1, step=theirs)


# -- parts ----------------------------------------------------------------------------------------------------------------


def run_part(arguments: argparse.Namespace, part: Sequence[str]) -> None:
    """Measure *part* in this process; each value goes to the record as soon as it is there, and last why some are missing, if they are."""
    with arguments.record.open("a") as record:

        def write(line: Mapping[str, Any]) -> None:
            record.write(json.dumps(line) + "\n")
            record.flush()

        def keep(key: str, value: float, step: float | None = None) -> None:
            write({"key": key, "value": value, "step": step})

        kind, rounds, seconds = arguments.device, arguments.rounds, arguments.seconds
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks.gpu: ended before it was done"))  # so that it ends what it began
        try:
            if part[0] == OVERHEAD:
                beside_stock(kind, rounds * TURNS, seconds / 4, keep)
            elif part[0] in RECOVERIES:
                faults(part[0], kind, rounds * 4 // RECOVERIES[part[0]], keep)
            else:
                measure(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), arguments.gigabytes, seconds, keep)
        except Exception as error:
            write({"reason": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:500]})
            raise


def _prefix(process: int) -> str:
    """Return how the names of the folders of a part begin."""
    return f"hf-gpu-{process}-"


def run_apart(command: Sequence[str], record: Path, seconds: float, grace: float = GRACE) -> str:
    """Run *command*, a part, in a session of its own for so many *seconds*; return why it lacks values, empty if it does not say so.

    When its time is over it gets SIGTERM, so that it ends what it began, and is killed after the *grace*. What it leaves behind is removed.
    """
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    late = ""
    try:
        child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        late = f"out of time: it was ended after {seconds:.0f} s"
    finally:
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            if child.poll() is None:
                child.terminate()
                child.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(KILLED)
        for place in (SHM, tempfile.gettempdir()):
            for left in Path(place).glob(f"{_prefix(child.pid)}*"):
                shutil.rmtree(left, ignore_errors=True)
    said = [line["reason"] for line in read(record) if "reason" in line]
    status = child.returncode
    if late or not status:
        return late
    how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
    return said[-1] if said else f"its process ended with {how}"


def read(record: Path) -> list[dict[str, Any]]:
    """Return the complete lines of *record*."""
    text = record.read_text() if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def results(
    lines: Sequence[Mapping[str, Any]], reasons: Mapping[str, str], device: str | None, software: Mapping[str, str]
) -> dict[str, Any]:
    """Return one entry for each goal; what was not measured on a card has met nothing, and missed nothing."""
    entries: dict[str, Any] = {}
    for key, goal in GOALS.items():
        found = [line for line in lines if line.get("key") == key]
        entry = spread([line["value"] for line in found])
        median = entry["median"]
        met = None if median is None or device is None else (median >= goal if key in AT_LEAST else median <= goal)
        entries[key] = {**entry, "goal": goal, "met": met, "device": device, "versions": dict(software)}
        if steps := [line["step"] for line in found if line["step"] is not None]:
            entries[key]["step_seconds"] = spread(steps)
        if key in reasons:
            entries[key]["reason"] = reasons[key]
    return entries


def write_whole(path: Path, text: str) -> None:
    """Replace *path* at once: whoever reads it, or ends this process, finds a complete file."""
    other = path.with_name(f"{path.name}.new")
    other.write_text(text)
    other.replace(path)


def measure_all(arguments: argparse.Namespace, show: Callable[[Sequence[Mapping[str, Any]], Mapping[str, str]], None]) -> bool:
    """Run each part that is asked for, and *show* after each what there is; return whether each key has values."""
    end, asked = time.monotonic() + arguments.limit, set(arguments.only)
    reasons = {key: "not measured yet" if key in asked else "not asked for" for key in GOALS}
    parts = [part for part in PARTS if asked & set(part)]
    options = {name: str(getattr(arguments, name)) for name in ("device", "gigabytes", "seconds", "rounds")}
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory(prefix="hf-gpu-") as folder:
        lines: list[dict[str, Any]] = []
        show(lines, reasons)
        for number, part in enumerate(parts):
            record = Path(folder) / f"part-{number}.jsonl"
            left = end - time.monotonic() - RESERVED * arguments.limit * (len(parts) - 1 - number)
            command = [sys.executable, "-m", "benchmarks.gpu", *given, "--record", str(record), "--only", *part]
            why = run_apart(command, record, left) if left > 0 else f"out of time: the others took {arguments.limit:.0f} s"
            lines += read(record)
            measured = {line["key"] for line in lines if "key" in line}
            for key in part:
                if why and key in asked:
                    reasons[key] = why
                elif key in measured:
                    reasons.pop(key)
            show(lines, reasons)
    return asked <= measured


def main() -> int:
    """Measure, print, and write the results; return the status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a step")
    parser.add_argument("--rounds", type=int, default=2, help="times that each of four ranks is killed; two ranks twice as often")
    parser.add_argument("--only", nargs="+", default=list(GOALS), choices=list(GOALS), metavar="KEY", help=f"of {', '.join(GOALS)}")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="when all parts are told to end")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # this process is one part, whose values go there
    arguments = parser.parse_args()
    if arguments.record is not None:
        run_part(arguments, arguments.only)
        return 0
    card = arguments.device == "cuda" and torch.cuda.is_available()
    software = versions() if card else {"torch": str(torch.__version__)}
    name = software.pop("card", None)
    text = ""

    def show(lines: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> None:
        nonlocal text
        text = json.dumps(results(lines, reasons, name, software), indent=1) + "\n"
        if arguments.json is not None:
            write_whole(arguments.json, text)

    if card or arguments.device == "cpu":
        complete = measure_all(arguments, show)
    else:
        why = "torch finds no NVIDIA GPU here"
        print(f"benchmarks.gpu: nothing was measured: {why}")
        show([], dict.fromkeys(GOALS, why))
        complete = True
    print(text, end="")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
