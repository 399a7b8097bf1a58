"""Rebuilding a gloo group after a rank was lost: as managed groups do it, against torch's own ``reconfigure`` (from torch 2.15 on).

    python -m benchmarks.reconfigure --json reconfigure.json

Processes on this machine, of which one is dead: in each round the others form a group without it, once in each way, and the order of the
two alternates. Managed groups build a new gloo group over a store; ``reconfigure`` connects an existing one anew. Measured from a common
barrier until the last rank has its group, and until the last rank has completed an all-reduce in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.measuring import figure, spread
from holdfast.runtime.groups.backends import BuildOptions, build

SIZES: Final = (3, 4, 8)
"""Ranks that are left."""
TIMEOUT: Final = timedelta(seconds=30)
GOAL: Final = 1.0
"""Times as long as torch's own way, or less: then there is nothing to gain by that."""
WAYS: Final = ("holdfast", "reconfigure")


def rounds(rank: int, size: int, port: int, count: int, results: Any) -> None:  # noqa: ANN401 (a queue of multiprocessing)
    """Take part as *rank*: build *count* groups in each way, and put the times at which each was there."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=TIMEOUT)
    options = BuildOptions(devices=("cpu",), timeout=TIMEOUT, host="127.0.0.1")
    newer: Any = dist.distributed_c10d  # than the torch whose types are checked
    native = newer.ProcessGroupGloo(dist.PrefixStore("native", store), rank, size, TIMEOUT, enable_reconfigure=True)

    def holdfast(number: int) -> Any:  # noqa: ANN401 (a backend)
        group = build(store, f"round-{number}", rank, size, options=options, is_cancelled=lambda: False)
        groups.append(group)
        return group.backend("cpu")

    def reconfigure(number: int) -> Any:  # noqa: ANN401 (a backend)
        store.set(f"handle-{number}-{rank}", native.get_reconfigure_handle())
        asked = newer.ReconfigureOptions()
        asked.uuid, asked.timeout = number, TIMEOUT
        asked.handles = [store.get(f"handle-{number}-{other}").decode() for other in range(size)]
        native.reconfigure(asked).wait()
        return native

    ways: dict[str, Callable[[int], Any]] = {"holdfast": holdfast, "reconfigure": reconfigure}
    groups: list[Any] = []
    for number in range(count):
        for turn in range(len(WAYS)):
            way = WAYS[(number + turn) % len(WAYS)]
            _meet(store, f"begin-{number}-{turn}", size)
            begin = time.monotonic()
            backend = ways[way](number)
            there = time.monotonic()
            ones = torch.ones(1000)
            backend.allreduce([ones]).wait()
            assert ones[0] == size, f"summed up {ones[0]} in a group of {size}"
            results.put((way, number, begin, there, time.monotonic()))
            _meet(store, f"end-{number}-{turn}", size)
            while groups:
                groups.pop().close()
    _meet(store, "all", size)


def _meet(store: dist.Store, name: str, size: int) -> None:
    """Return once all ranks have called this with *name*."""
    if store.add(name, 1) == size:
        store.set(f"{name}-done", "1")
    store.wait([f"{name}-done"])


def measure(size: int, count: int, port: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by way, until the slowest rank had its group (``group``) and its first sum (``sum``)."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rounds, args=(rank, size, port, count, results)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    measured = [results.get(timeout=300) for _ in range(size * count * len(WAYS))]
    for rank in ranks:
        rank.join()
    found: dict[str, dict[str, list[float]]] = {way: {"group": [], "sum": []} for way in WAYS}
    for way in WAYS:
        for number in range(count):
            one = [(begin, there, done) for named, at, begin, there, done in measured if (named, at) == (way, number)]
            first = min(begin for begin, _, _ in one)
            found[way]["group"].append(max(there for _, there, _ in one) - first)
            found[way]["sum"].append(max(done for _, _, done in one) - first)
    return found


def main() -> None:
    """Measure, print a line per figure, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "enable_reconfigure" not in (dist.ProcessGroupGloo.__init__.__doc__ or ""):
        parser.exit(2, f"benchmarks.reconfigure needs torch 2.15 or newer, and this is {torch.__version__}\n")
    figures: dict[str, Any] = {}
    for place, size in enumerate(SIZES):
        found = measure(size, options.rounds, 29610 + place)
        for what in ("group", "sum"):
            for way in WAYS:
                figures[f"{size} ranks, {what}, {way}"] = {**spread([1000 * one for one in found[way][what]]), "unit": "ms"}
            ratios = [ours / theirs for ours, theirs in zip(found["holdfast"][what], found["reconfigure"][what], strict=True)]
            met = {f"median at most {GOAL:g} times": statistics.median(ratios) <= GOAL}
            figures[f"{size} ranks, {what}, holdfast against reconfigure"] = figure(ratios, GOAL, met, unit="times")
    for name, one in figures.items():
        low, high = one["range"]
        goal = f", goal {one['goal']:g}, {'met' if one['met'] else 'not met'}" if "goal" in one else ""
        print(f"{name:50} median {one['median']:.2f} {one['unit']} ({low:.2f} to {high:.2f}, n {one['n']}){goal}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
