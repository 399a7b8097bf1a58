"""What managed groups and snapshots at their defaults cost where four ranks share fewer cores: three jobs that take turns.

All three are alive from the begin to the end, and only one of them computes at a time: a block of steps each, in an order drawn anew for
every round. No agent and no flow runs beside them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.driver import Driver, Starter
from benchmarks.measuring import ROOT, wait_for
from holdfast.host.process import marked

SCRIPT: Final = Path(__file__).with_name("train_saturated.py")
RANKS: Final = 4
BLOCK: Final = 40
WARM: Final = 4
"""Blocks of the job with snapshots before anything counts: it finds out by itself how often they may be taken."""
JOBS: Final = ("torchrun", "managed", "snapshots")
KINDS: Final = (*JOBS, "without")
"""``without``: the job that takes snapshots, with these turned off for the block. Two jobs differ by more than what is measured here, for
how memory happens to lie costs some percent of the CPU time; so what snapshots take is measured within one.
"""
FIGURES: Final = ("seconds", "mean", "processor")
"""Of a step: median and mean by the clock, and the CPU time of all ranks together."""


class Turns:
    """One job's blocks."""

    def __init__(self, place: Path) -> None:
        self.place, self._blocks = place, 0

    def take(self, what: str = "on") -> None:
        """Let the job train one block, with snapshots ``on`` or ``off``, and wait for its end on all ranks."""
        self._blocks += 1
        beside = self.place / "going"
        beside.write_text(what)
        beside.rename(self.place / f"go-{self._blocks}")
        wait_for(
            lambda: all(len(lines) >= self._blocks for lines in self._lines()), f"a block of {self.place.name}", every=0.05, seconds=600
        )

    def _lines(self) -> list[list[str]]:
        paths = [self.place / f"rank-{rank}.jsonl" for rank in range(RANKS)]
        return [path.read_text().splitlines() if path.exists() else [] for path in paths]

    def last(self) -> list[dict[str, Any]]:
        """Return what each rank has reported of its newest block."""
        return [json.loads(lines[self._blocks - 1]) for lines in self._lines()]

    def figures(self) -> dict[str, float]:
        """Return `FIGURES` of the newest block, the slowest rank counting in each step; the first carries what was before.

        What others do on the machine hardly changes the CPU time.
        """
        slowest = [float(max(steps)) for steps in zip(*(one["steps"] for one in self.last()), strict=True)]
        used = float(sum(one["cpu"] for one in self.last()) / len(slowest))
        return {"seconds": statistics.median(slowest[1:]), "mean": statistics.mean(slowest[1:]), "processor": used}


@contextmanager
def _torchrun(place: Path, options: list[str]) -> Iterator[None]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCH_MARK": str(place)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(SCRIPT), "--plain", *options]
    with (place / "log").open("wb") as log:
        run = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        for pid in marked("BENCH_MARK", str(place)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()


@contextmanager
def _driven(place: Path, options: list[str], given: Mapping[str, str]) -> Iterator[None]:
    fork_server = Starter(place)
    driver = Driver(fork_server, place / "job", [str(SCRIPT), *options], RANKS, {"OMP_NUM_THREADS": "1", "HOLDFAST_NODE": "node", **given})
    try:
        yield
    finally:
        driver.close()
        fork_server.close()


def rounds(place: Path, count: int) -> tuple[list[dict[str, dict[str, float]]], list[dict[str, Any]]]:
    """Return `FIGURES` of each kind, for every round; and what the ranks with snapshots reported at the end."""
    jobs, order = {}, random.Random(11)  # noqa: S311 (an order of blocks)
    with ExitStack() as running:
        for kind in JOBS:
            folder = place / kind
            folder.mkdir()
            options = ["--place", str(folder), "--block", str(BLOCK)]
            if kind == "torchrun":
                running.enter_context(_torchrun(folder, options))
            else:
                memstore = folder / "memstore"
                memstore.mkdir(mode=0o700)
                running.enter_context(_driven(folder, options, {"HOLDFAST_MEMSTORE": str(memstore)} if kind == "snapshots" else {}))
            jobs[kind] = Turns(folder)
            jobs[kind].take()
        for _ in range(WARM):
            jobs["snapshots"].take()
        found = []
        for _ in range(count):
            one: dict[str, dict[str, float]] = {}
            for kind in order.sample(KINDS, len(KINDS)):
                job = jobs["snapshots" if kind == "without" else kind]
                job.take("off" if kind == "without" else "on")
                one[kind] = job.figures()
            found.append(one)
            print(
                "saturated:",
                {kind: [round(value[name], 4) for name in FIGURES] for kind, value in one.items()},
                _brief(jobs["snapshots"].last()[0]),
                flush=True,
            )
        return found, jobs["snapshots"].last()


def _brief(reported: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reported.items() if name not in ("steps", "cpu")}
