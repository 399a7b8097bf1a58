"""Overhead of progress tracking in a rank: recording each operation, measuring each step, and comparing copies of the parameters.

Real tensors and a real training loop on this machine, one process; whatever is compared takes turns.

    python -m benchmarks.progress --json FILE
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.measuring import figure
from holdfast.protocol import listen
from holdfast.runtime import agent_client
from holdfast.runtime.groups.operations import InFlightOperations
from holdfast.runtime.telemetry import replica_checksums
from holdfast.runtime.telemetry.replica_checksums import ReplicaChecksums, checksums_of
from holdfast.runtime.telemetry.wait_windows import StepTimer

CALLS: Final = 20_000
IN_FLIGHT_GOAL_US: Final = 5.0
PACE_GOAL_US: Final = 20.0
SHARE_GOAL: Final = 0.005
SIZES: Final = {"1 MB": 512, "16 MB": 2048, "128 MB": 5793}
"""Widths of square layers whose float32 parameters are about that large."""


@contextmanager
def an_agent() -> Iterator[None]:
    """Have this process's link speak to a socket whose other end throws everything away."""
    with tempfile.TemporaryDirectory() as folder:
        server = listen(Path(folder) / "s")

        def swallow() -> None:
            with suppress(OSError):
                line, _ = server.accept()
                while line.recv(1 << 16):
                    pass

        threading.Thread(target=swallow, daemon=True).start()
        ours = agent_client.AgentLink.from_env({"HOLDFAST_SOCKET": str(Path(folder) / "s")})
        before, replica_checksums.link = replica_checksums.link, lambda: ours  # type: ignore[attr-defined]
        try:
            yield
        finally:
            replica_checksums.link = before  # type: ignore[attr-defined]
            ours.mute()
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def in_flight(rounds: int) -> dict[str, Any]:
    """Return what it costs to note the begin and the end of an operation, in microseconds."""
    one, tensors, found = InFlightOperations(), [torch.ones(8)], []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(CALLS):
            one.leave(one.enter("allreduce", tensors))
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return figure(found, IN_FLIGHT_GOAL_US, {"each": statistics.median(found) < IN_FLIGHT_GOAL_US}, unit="µs an operation")


def pace(rounds: int) -> dict[str, Any]:
    """Return what it costs to measure a step, in microseconds."""
    one, found = StepTimer(), []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(CALLS):
            one.begin()
            one.end()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return figure(found, PACE_GOAL_US, {"each": statistics.median(found) < PACE_GOAL_US}, unit="µs a step")


def sums(rounds: int) -> dict[str, dict[str, Any]]:
    """Return how long it takes to sum up parameters of several sizes, and how fast that is."""
    found = {}
    for name, width in SIZES.items():
        parameters = {"w": torch.randn(width, width)}
        size, times = width * width * 4, []
        checksums_of(parameters)
        for _ in range(rounds):
            begin = time.perf_counter()
            checksums_of(parameters)
            times.append(time.perf_counter() - begin)
        found[f"sums of {name}"] = {**figure(times, None, {}, unit="s"), "gb_per_s": round(size / statistics.median(times) / 1e9, 1)}
    return found


def share(steps: int) -> dict[str, Any]:
    """Return the share of a real loop's time that automatic checks take; blocks with and without them take turns."""
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(1024, 1024), nn.GELU())), nn.Linear(1024, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checker, inputs, step = ReplicaChecksums(model, {}), torch.randn(24, 1024), 0
    spent, trained, blocks = 0.0, 0.0, {True: list[float](), False: list[float]()}
    for block in range(2 * (steps // 64)):
        begin, checked = time.perf_counter(), block % 2 == 0
        for _ in range(64):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if checked:
                step += 1
                before = time.perf_counter()
                checker.check(step, "p")
                spent += time.perf_counter() - before
        took = time.perf_counter() - begin
        blocks[checked].append(took)
        trained += took if checked else 0.0
        if checked:
            checker._before = None if checker._before is None else (checker._before[0], time.perf_counter())  # noqa: SLF001 (the other block is not its)
    found = spent / trained
    ratio = statistics.median(one / other for one, other in zip(blocks[True], blocks[False], strict=True))
    details = {"every": checker.every, "steps": step, "ratio of blocks with to blocks without": round(ratio, 4)}
    return {"median": round(found, 5), "n": 1, "goal": SHARE_GOAL, "met": found < SHARE_GOAL, **details}


def main() -> None:
    """Measure, and write one object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with an_agent():
        result = {
            "in_flight_us": in_flight(given.rounds),
            "pace_us": pace(given.rounds),
            **sums(given.rounds),
            "copies_share": share(given.steps),
        }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
