"""Overhead of a managed group per call: the same gloo backend called directly and through `ManagedGroup`, alternately.

One member, so that nothing is waited for: what is left is the call itself. Nothing is simulated.

    python -m benchmarks.overhead --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.runtime.groups.backends import BackendGroup
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.process.exit import wait_until_idle

CALLS: Final = 1000
GOAL_US: Final = 20.0
MINUTE: Final = timedelta(minutes=1)


def _pair() -> tuple[Any, ManagedGroup]:
    """Return a gloo backend of one member, and a managed group over it."""
    backend = dist.ProcessGroupGloo(dist.PrefixStore("overhead", dist.HashStore()), 0, 1, MINUTE)
    group = ManagedGroup("overhead", [0], 0, StepTransaction(), MINUTE)
    group.replace_backend(BackendGroup({"cpu": backend}), {})
    return backend, group


def _microseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def measure(rounds: int) -> dict[str, Any]:
    """Return, for waiting and for futures (as DDP takes them), what a call costs more than gloo's own, in microseconds."""
    backend, group = _pair()
    tensors, options = [torch.ones(8)], dist.AllreduceOptions()
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "wait": (lambda: backend.allreduce(tensors, options).wait(), lambda: group.allreduce(tensors, options).wait()),
        "future": (
            lambda: backend.allreduce(tensors, options).get_future().wait(),
            lambda: group.allreduce(tensors, options).get_future().wait(),
        ),
    }
    found = {}
    for name, (stock, managed) in ways.items():
        pairs = [(_microseconds(stock), _microseconds(managed)) for _ in range(rounds)]
        over = sorted(ours - theirs for theirs, ours in pairs)
        found[name] = {
            "median": round(statistics.median(over), 2),
            "p99": round(over[min(len(over) - 1, int(len(over) * 0.99))], 2),
            "n": len(over),
            "goal": GOAL_US,
            "met": statistics.median(over) < GOAL_US,
            "stock_median": round(statistics.median(theirs for theirs, _ in pairs), 2),
            "calls_a_round": CALLS,
        }
    wait_until_idle()  # torch's threads may still hold the last future: they need the interpreter to release it
    group.shutdown()
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--rounds", type=int, default=31)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.rounds)
    for name, one in found.items():
        print(f"{name}: {one['median']} µs more than gloo's {one['stock_median']} µs (p99 {one['p99']}, goal {GOAL_US:.0f})")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
