"""Recovery time of each action, and whether a job with hundreds of faults keeps its guarantees.

    python -m benchmarks.handling --json FILE [--rounds N] [--only KEY ...] [--faults 200] [--runs N] [--seed S] [--kinds KIND ...]

Real jobs under a real flow, Prefect server and agents, on a local cluster: nodes are groups of processes of this machine.

- ``orders``: from the event, as the agent or the rank saw it, to the orders of the action that answers it, through the flow; a line each.
  A wait, a question and the end have no orders: there it is the job's move, and for the wait the stop of all ranks is in it.
- ``next-action``: from the fault that ends an attempt to the orders of the next one.
- ``shrink-by-restart``: from the event until all ranks that are left have made a step, in new processes.
- ``shrink``, ``grow``: the same in the processes that live, from the injection, and by how much the step with a newcomer comes later;
  this for jobs whose steps take next to nothing, and for such as rest 50 and 200 ms in each.
- ``chaos``: a job of three ranks on four nodes with managed groups, a hot spare, replicated snapshots and checkpoints suffers random faults
  (havoc.py has the kinds). Promised, or the exit status is 1: every step has the loss, and the end the parameters, of an undisturbed run,
  bit for bit; no node is isolated, as none has a fault of its own; no process and no memory is left; every incident ends well.
  Each run's line has its faults and what each incident cost, from which the simulator predicts it (predicted.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.actions import Actions, Times
from benchmarks.chaos_run import Broken, ChaosRun, promises
from benchmarks.controlled import FlowEnded
from benchmarks.havoc import KINDS
from benchmarks.measuring import prefect, spread
from benchmarks.widths import Widths

KEYS: Final = ("orders", "next-action", "shrink-by-restart", "shrink", "grow", "chaos")
IN_PROCESS: Final = frozenset({"shrink", "grow"})
ORDERS: Final = {"median": 0.15, "p99": 0.5}
NEXT: Final = {"median": 0.2}
SHRINK: Final = {"median": 1.0}
GROW: Final = {"median": 2.0}
"""In steps."""
RESTS: Final = (0.0, 0.05, 0.2)
"""Seconds for which each step rests, in the jobs that grow: a pause is measured in steps, and those of real jobs are not so short."""
EVERY: Final = "every promise"
TURNS: Final = 4
"""How often a job comes in a round to each action that leaves it as it was."""


def a_line(key: str, values: Sequence[float], goal: dict[str, float] | None, **details: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """Return what the result says of *values* (seconds): their spread, and whether each goal was met."""
    figures = spread(values)
    met = None if goal is None or not values else all(figures[name] <= most for name, most in goal.items())
    return {"key": key, **figures, "goal": goal, "met": met, **details}


def actions(folder: Path, environment: dict[str, str], rounds: int, keys: set[str]) -> list[dict[str, Any]]:
    """Measure every action, in as many jobs as there are *rounds*."""
    times = Times()
    for number in range(rounds):
        Actions(folder / f"actions-{number}", environment, times).play(TURNS)
    for missed in times.missed:
        print(f"answered otherwise: {missed}", flush=True)
    found = [
        a_line(
            f"orders: {action}",
            values,
            ORDERS,
            from_decision_task=spread(times.in_flow[action]),
            from_injection=spread(times.injected[action]),
        )
        for action, values in times.orders.items()
    ]
    following = [a_line(f"next-action: {both}", values, NEXT) for both, values in times.following.items()]
    every = [value for values in times.following.values() for value in values]
    following += [a_line("next-action: all", every, NEXT)] if every else []
    shrunk = [a_line("shrink-by-restart", times.shrunk, None)]
    parts = {"orders": found, "next-action": following, "shrink-by-restart": shrunk}
    return [line for key, lines in parts.items() if key in keys for line in lines]


def widths(folder: Path, environment: dict[str, str], rounds: int, keys: set[str]) -> list[dict[str, Any]]:
    """Measure how a job gets smaller and larger in the processes that live."""
    lines = []
    for rest in RESTS if "grow" in keys else RESTS[:1]:
        found = Widths()
        for number in range(rounds):
            found.play(folder / f"widths-{round(rest * 1000)}-{number}", environment, TURNS, rest)
        for missed in found.missed:
            print(f"answered otherwise: {missed}", flush=True)
        if "shrink" in keys and not rest:
            lines.append(a_line("shrink", found.narrowed, SHRINK))
        if "grow" in keys:
            step = {"step_s": statistics.median(found.usual), "rest_s": rest} if found.usual else {"rest_s": rest}
            lines.append(a_line("grow", found.grown_steps, GROW, unit="steps", seconds=spread(found.grown), **step))
    return lines


def chaos(folder: Path, environment: dict[str, str], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Break jobs again and again, and evaluate what is left: how long training paused in each, and a line for each guarantee."""
    broken, kinds, faults = Counter[str](), set[str](), 0
    for seed in range(given.seed, given.seed + given.runs):
        run = ChaosRun(folder / f"chaos-{seed}", environment, given.faults, seed, given.kinds)
        try:
            found = run.play()
        except (Broken, FlowEnded, TimeoutError) as error:
            broken["runs that did not end"] += 1
            yield {"key": "chaos", **spread([]), "goal": EVERY, "met": False, "faults": run.done, "seed": seed, "why": str(error)}
            continue
        mine = Counter(promises(found))
        broken.update(mine)
        kinds.update(found["kinds"])
        faults += found["faults"]
        downtimes = found.pop("downtime")
        yield {"key": "chaos", **downtimes, "unit": "s of downtime", "goal": EVERY, "met": not mine.total(), **found}
    for name, often in broken.items():
        yield a_line(f"chaos: {name}", [often], {"median": 0}, runs=given.runs, faults=faults, kinds=len(kinds))


def write(place: Path | None, lines: Sequence[dict[str, Any]]) -> None:
    """Write *lines*, if somewhere: after each chaos run, so that the ones before it are not lost with one that is interrupted."""
    if place is not None:
        setting = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "simulated": "nodes are groups of processes on one machine"}
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(json.dumps({**line, **setting}) + "\n" for line in lines))


def main() -> int:
    """Measure, print, and write; return 1 when a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, one object a line")
    parser.add_argument("--rounds", type=int, default=3, help="jobs that come to every action")
    parser.add_argument("--faults", type=int, default=200, help="faults of each chaos run")
    parser.add_argument("--runs", type=int, default=1, help="chaos runs, with the seeds from --seed on")
    parser.add_argument("--seed", type=int, default=1, help="of the chaos run: the same seed draws the same faults in the same order")
    parser.add_argument("--kinds", nargs="+", default=[], choices=KINDS, metavar="KIND", help=f"of the chaos run; of {', '.join(KINDS)}")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for homes, logs and histories, which stays")
    given = parser.parse_args()
    keys, lines = set(given.only), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="hf-bench-", ignore_cleanup_errors=True) as temporary:
        folder = given.keep.absolute() if given.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with prefect(folder) as environment:
            if keys - {"chaos"} - IN_PROCESS:
                lines += actions(folder, environment, given.rounds, keys)
            if keys & IN_PROCESS:
                lines += widths(folder, environment, given.rounds, keys)
            for line in lines:
                print(json.dumps(line), flush=True)
            if "chaos" in keys:
                for line in chaos(folder, environment, given):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
                    write(given.json, lines)
    write(given.json, lines)
    return 1 if any(line["key"].startswith("chaos") and not line["met"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
