"""Cost of a change of one rank if only its groups are rebuilt, compared to rebuilding all: 4 to 32 ranks.

A pipeline x data mesh with next to no computation; the lost rank goes to a hot spare. The clock starts at the order and ends with the
last rank's first new step, less the work of a steady one. All ranks share this machine's cores, so that work which a cluster does
on all its machines at once is done here one rank after the other: a pause that grows with the ranks grows by that too. ``work`` is the
CPU time that a rank spent, the median over the ranks.

Ways: ``ours``, which builds the groups with the new rank in it, and the group of all ranks later when nothing uses it; ``world``, the
same for a script that does use it; ``all``, which builds every group of every rank anew.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.driver import Driver, Starter
from benchmarks.measuring import ROOT, figure, spread
from benchmarks.steps import Done

SCRIPT: Final = ROOT / "benchmarks" / "train_mesh.py"
SIZES: Final = {4: 2, 8: 2, 16: 4, 32: 4}
"""Ranks, and stages of the pipeline."""
WAYS: Final = ("ours", "all", "world")
GROWTH: Final = 1.5
PACE: Final = 0.2
"""Seconds between two steps: the ranks leave the cores idle then, so that all are where they wait for each other when one is lost."""


def rounds(number: int, sizes: tuple[int, ...] = tuple(SIZES)) -> list[dict[str, Any]]:
    """Change one rank in each way, *number* times, at each size."""
    found = []
    with tempfile.TemporaryDirectory(prefix="hf-delta-") as folder:
        fork_server = Starter(Path(folder), "torch.distributed.device_mesh")
        try:
            for size in sizes:
                found += _at(size, number, Path(folder), fork_server)
        finally:
            fork_server.close()
    return found


def _at(size: int, number: int, folder: Path, fork_server: Starter) -> list[dict[str, Any]]:
    argv = [str(SCRIPT), "--stages", str(SIZES[size]), "--pace", str(PACE)]
    job, found = Driver(fork_server, folder / f"{size}", argv, size), []
    try:
        job.run(3)
        for count in range(number):
            for turn, way in enumerate(WAYS):
                found.append({"ranks": size, "way": way, **_change(job, way, 1 + (count * len(WAYS) + turn) % (size - 1))})
                print(f"delta: {found[-1]}", flush=True)
    finally:
        job.close()
    return found


def _change(job: Driver, way: str, rank: int) -> dict[str, Any]:
    hot_spare = job.hot_spare()
    (job.place / "rebuild").write_text(way)
    job.run(3)
    before = {one: lines[-3:] for one, lines in job.done().items()}
    at, recovered = job.replace(rank, hot_spare)
    steady = statistics.median(one.seconds for lines in before.values() for one in lines)
    reports = job.of_generation("regrouped", job.generation)
    return {
        "pause": recovered.at - at - steady,
        "step": steady,
        "work": statistics.median(work_of(before[one], lines) for one, lines in job.done().items() if one != rank),
        "regrouped": max(sum(one["seconds"].values()) for one in reports),
        "rebuilt": statistics.median(one["rebuilt"] for one in reports),
        "kept": statistics.median(one["kept"] for one in reports),
    }


def work_of(before: list[Done], after: list[Done]) -> float:
    """Return the CPU time that a rank spent from its last step to the first new one, less that of a step."""
    first = next(one for one in after if one.step > before[-1].step)
    return first.work - before[-1].work - (before[-1].work - before[0].work) / (len(before) - 1)


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figure: the pause of ours at the largest size, the growth, and the curves."""
    curves = {way: {size: [one for one in found if (one["way"], one["ranks"]) == (way, size)] for size in SIZES} for way in WAYS}
    by_way = {
        way: {
            str(size): {what: spread([one[what] for one in ones]) for what in ("pause", "work", "regrouped", "step")}
            | {what: statistics.median(one[what] for one in ones) for what in ("rebuilt", "kept")}
            for size, ones in curve.items()
            if ones
        }
        for way, curve in curves.items()
    }
    sizes = sorted(int(size) for size in by_way["ours"])
    least, most = str(sizes[0]), str(sizes[-1])
    growth = {
        f"{way}_{what}": round(by_way[way][most][what]["median"] / max(by_way[way][least][what]["median"], 0.001), 2)
        for way in WAYS
        for what in ("pause", "work")
    }
    largest = [one["pause"] for one in curves["ours"][sizes[-1]]]
    times = {
        size: round(by_way["all"][size]["pause"]["median"] / max(by_way["ours"][size]["pause"]["median"], 0.001), 2)
        for size in by_way["all"]
    }
    goals = {"growth": growth["ours_pause"] <= GROWTH and sizes[-1] == max(SIZES)}
    goal = f"the pause of ours grows at most {GROWTH} times from 4 ranks to 32"
    return figure(
        largest, goal, goals, growth=growth, all_over_ours=times, curves=by_way, simulated="no flow: the clock starts at the order"
    )
