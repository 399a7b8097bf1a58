"""Replacement of lost ranks and planned moves, measured from the fault itself.

    python -m benchmarks.takeover --json takeover.json [--rounds N] [--only KEY ...]

- ``unplanned``: an MLP of about 10 million parameters under DDP, 2 nodes of 2 ranks, a spare node with a hot spare, under a real flow.
  Each rank in turn is killed, stopped, and made to raise. The clock starts at the fault (the signal, or the ``raise``) and ends with the
  first new step that all ranks have committed. Beside it the same script under torchrun, and under Holdfast's restart action.
- ``memory``: of the same faults, the highest peak among the survivors over its peak before.
- ``floor``: bare gloo ranks that regroup and move the same state.
- ``planned``: the same job, its ranks moved to another process one after the other; the longest gap between two steps, less a step.
- ``delta``, ``warmup``: see delta.py and warmup.py.

Every round measures each of these once, next to what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks import delta, floor, torchrun, warmup
from benchmarks.measuring import figure, prefect, spread
from benchmarks.real_job import RANKS, SCRIPT, Job, medians

FAULTS: Final = ("killed", "raising", "stopped")
KEYS: Final = ("unplanned", "floor", "planned", "delta", "warmup", "memory")
OVERHEAD: Final = 0.3
"""Seconds that a replacement of ranks may cost above one steady step."""
STOPPED: Final = 2.0
TORCHRUN: Final = 20.0
ROLES: Final = 1.2
P99: Final = 3.0
MEMORY: Final = 1.05
OVER_FLOOR: Final = 3.0
PAUSE: Final = 0.1
PREPARING: Final = 1.05


class Bench:
    """All that is measured, round by round."""

    def __init__(self, folder: Path, only: set[str]) -> None:
        self._folder, self._only = folder, only
        self.taken: list[dict[str, Any]] = []
        self.restarted: list[dict[str, Any]] = []
        self.torchrun: list[dict[str, Any]] = []
        self.bare: list[float] = []
        self.moved: list[dict[str, float]] = []
        self.delta: list[dict[str, Any]] = []
        self.warmup: list[dict[str, Any]] = []

    def round(self, number: int, environment: dict[str, str]) -> None:
        """Measure everything that is wanted once."""
        if self._only & {"unplanned", "memory", "floor", "planned"}:
            self._managed(number, environment)
        if "unplanned" in self._only:
            self._others(number, environment)
        if "delta" in self._only:
            self.delta += apart(delta.rounds, 1)
        if "warmup" in self._only:
            self.warmup += apart(warmup.rounds, 1)

    def _managed(self, number: int, environment: dict[str, str]) -> None:
        job = Job(self._folder / f"managed-{number}", environment, stock=False)
        try:
            for how in FAULTS if self._only & {"unplanned", "memory"} else ("killed",) if "floor" in self._only else ():
                for rank in range(RANKS):
                    self.taken.append(job.recover(rank, how))
                    show("replace-ranks", self.taken[-1])
                if "floor" in self._only:
                    self.bare += floor.rounds(3)
                    show("floor", {"seconds": self.bare[-3:]})
            for rank in range(RANKS) if "planned" in self._only else ():
                self.moved.append(job.move(rank))
                show("planned", self.moved[-1])
        finally:
            job.close()

    def _others(self, number: int, environment: dict[str, str]) -> None:
        job = Job(self._folder / f"stock-{number}", environment, stock=True)
        try:
            for how in FAULTS:
                self.restarted.append(job.recover((number + 1) % RANKS, how))
                show("restart", self.restarted[-1])
        finally:
            job.close()
        for how in FAULTS:
            self.torchrun.append(torchrun.round_of(self._folder / f"torchrun-{how}-{number}", (number + 1) % RANKS, how))
            show("torchrun", self.torchrun[-1])

    def result(self) -> dict[str, Any]:
        """Return a figure for each key that was wanted."""
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "unplanned": lambda: unplanned(self.taken, self.restarted, self.torchrun),
            "floor": lambda: over_floor(self.bare, self.taken),
            "planned": lambda: planned(self.moved),
            "delta": lambda: delta.judged(self.delta),
            "warmup": lambda: warmup.judged(self.warmup),
            "memory": lambda: memory(self.taken),
        }
        return {key: made[key]() for key in KEYS if key in self._only}


def apart(measure: Callable[[int], list[dict[str, Any]]], number: int) -> list[dict[str, Any]]:
    """Return what *measure* returns in a process of its own: it adopts orphans, and has threads."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, number).result()


def show(what: str, facts: dict[str, Any]) -> None:
    """Say what was just measured."""
    print(f"{what}: {facts}", flush=True)


# -- figures -----------------------------------------------------------------------------------------------------------


def unplanned(taken: list[dict[str, Any]], restarted: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge the replacements of ranks."""
    step = statistics.median(one["step"] for one in taken)
    by_fault, quick = medians(taken, "fault"), [one for one in taken if one["fault"] != "stopped"]
    roles, seconds = medians(quick, "rank"), [one["seconds"] for one in quick]
    limits = dict.fromkeys(FAULTS, OVERHEAD + step) | {"stopped": OVERHEAD + step + max(3 * step, STOPPED)}
    beside = medians(theirs, "fault")
    ratios = {how: beside[how] / by_fault[how] for how in FAULTS}
    goals = {
        **{how: by_fault[how] <= limits[how] for how in FAULTS},
        "torchrun": min(ratios["killed"], ratios["raising"]) >= TORCHRUN,
        "roles": max(roles.values()) <= ROLES * min(roles.values()),
        "p99": all(max(one["seconds"] for one in taken if one["fault"] == how) <= P99 * by_fault[how] for how in FAULTS),
        "steps_lost": max(one["steps_lost"] for one in taken) <= 1,
        "action": all(one["action"] == "replace-ranks" for one in taken),
    }
    return figure(
        seconds,
        {how: round(limit, 3) for how, limit in limits.items()} | {"torchrun": TORCHRUN, "roles": ROLES, "p99": P99, "steps_lost": 1},
        goals,
        what="seconds from a kill or an exception to the first new step of all ranks",
        step=spread([one["step"] for one in taken]),
        by_fault={how: spread([one["seconds"] for one in taken if one["fault"] == how]) for how in FAULTS},
        by_role={str(rank): spread([one["seconds"] for one in quick if one["rank"] == rank]) for rank in roles},
        by_role_stopped={
            str(rank): round(value, 4) for rank, value in medians([o for o in taken if o["fault"] == "stopped"], "rank").items()
        },
        detected=spread([one["detected"] for one in quick]),
        ordered=spread([one["ordered"] for one in quick]),
        steps_lost=max(one["steps_lost"] for one in taken),
        torchrun={how: spread([one["seconds"] for one in theirs if one["fault"] == how]) for how in FAULTS},
        torchrun_over_ours={how: round(ratio, 1) for how, ratio in ratios.items()},
        torchrun_steps_lost=max(one["steps_lost"] for one in theirs),
        restart_action={how: spread([one["seconds"] for one in restarted if one["fault"] == how]) for how in FAULTS},
        restart_actions=sorted({str(one["action"]) for one in restarted}),
        rounds=taken,
        simulated="nodes are groups of processes on one machine",
    )


def over_floor(bare: list[float], taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge a killed rank's replacement, less the step that it computes again, by the floor."""
    killed = [one["seconds"] - one["step"] for one in taken if one["fault"] == "killed"]
    ratio = statistics.median(killed) / statistics.median(bare)
    goal = f"a replacement of ranks, less one step, within {OVER_FLOOR:.0f} times of it"
    return figure(bare, goal, {"ratio": ratio <= OVER_FLOOR}, ratio=round(ratio, 2), ours=spread(killed), simulated="nothing")


def planned(moved: list[dict[str, float]]) -> dict[str, Any]:
    """Judge the planned moves."""
    pauses, step = [one["pause"] for one in moved], statistics.median(one["step"] for one in moved)
    preparing = statistics.median(one["preparing"] for one in moved)
    return figure(
        pauses,
        {"pause": round(step + PAUSE, 4), "preparing": PREPARING},
        {"pause": statistics.median(pauses) <= step + PAUSE, "preparing": preparing <= PREPARING},
        step=round(step, 4),
        preparing=spread([one["preparing"] for one in moved]),
        moves=moved,
        simulated="nothing",
    )


def memory(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge the survivors' memory."""
    ratios = [one["memory"] for one in taken if one["memory"]]
    return figure(
        ratios, MEMORY, {"ratio": statistics.median(ratios) <= MEMORY}, what="peak in a recovery over steady peak", simulated="nothing"
    )


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of everything; each takes about five minutes")
    parser.add_argument("--only", nargs="+", default=list(KEYS), choices=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hf-bench-", ignore_cleanup_errors=True) as folder, prefect(Path(folder)) as environment:
        bench = Bench(Path(folder), set(given.only))
        for number in range(given.rounds):
            bench.round(number, environment)
    found = bench.result()
    found["setting"] = {"ranks": RANKS, "script": SCRIPT.name, "cores": os.cpu_count(), "rounds": given.rounds}
    found["setting"]["minutes"] = round((time.monotonic() - begin) / 60, 1)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
