"""The control plane at scale: what thousands of agents cost a flow, and how soon it answers when many of their nodes are lost at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import spread
from benchmarks.simulated.job import SimulatedJob
from holdfast.history import models, queries

ONE_CORE: Final = 4096
"""Nodes that one core is to hold at a beat a second."""
ORDERS: Final = 1.0
"""Seconds from the loss of ten nodes to the orders."""
GROWTH: Final = 1.5
WINDOW: Final = 5.0
"""Seconds over which the cost of beats is taken."""

Line = dict[str, Any]


def a_line(what: str, values: Sequence[float], goal: float | None, **details: Any) -> Line:  # noqa: ANN401 (JSON)
    """Return what the result says of *values*: their spread, and whether the worst of the usual ones (the median) meets the goal."""
    told = spread(values)
    return {"what": what, **told, "goal": goal, "met": None if goal is None else bool(values) and told["median"] <= goal, **details}


def scale(nodes: int, place: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Measure a job on so many nodes: its start, its beats, `holdfast status`, and the loss of one node, of ten, and of one in a hundred."""
    losses = [count for count in dict.fromkeys((1, 10, nodes // 100)) if 0 < count <= nodes // 10 or count == 1]
    with SimulatedJob(place, environment, wanted=nodes, spare=sum(losses) * rounds) as job:
        begun = time.time()
        job.until(job.trains, "the first step", seconds=600)
        yield a_line(f"start, {nodes} nodes", [time.time() - begun], None, unit="s", cpu_s=round(job.cpu(), 1))
        yield from _beats(job, nodes, rounds)
        yield _status(job, nodes, rounds)
        for count in losses:
            yield from _lost(job, nodes, count, rounds)
        yield a_line(f"memory of the flow, {nodes} nodes", [job.memory() / 1e6], None, unit="MB")
        begun = time.time()
        job.stop()
        yield a_line(f"stop, {nodes} nodes", [time.time() - begun], None, unit="s")


def _beats(job: SimulatedJob, nodes: int, rounds: int) -> Iterator[Line]:
    """Take what the flow uses while all goes well."""
    used = []
    for _ in range(rounds):
        before, begun, beats = job.cpu(), time.monotonic(), job.nodes.ask(do="cost")["beats"]
        time.sleep(WINDOW)
        seconds, beats = time.monotonic() - begun, job.nodes.ask(do="cost")["beats"] - beats
        used.append((job.cpu() - before) / seconds)
    told = {"beats_a_second": round(beats / seconds / nodes, 2), "memory_mb": round(job.memory() / 1e6)}
    yield a_line(f"cores for the beats of {nodes} nodes", used, nodes / ONE_CORE if nodes >= ONE_CORE else None, unit="cores", **told)
    each = [1e6 * one / nodes for one in used]
    yield a_line(f"beats, a node and second, {nodes} nodes", each, 1e6 / ONE_CORE if nodes > 100 else None, unit="us of CPU")


def _status(job: SimulatedJob, nodes: int, rounds: int) -> Line:
    """Ask for the state of the job, as a person does."""
    taken, lines = [], 0
    for _ in range(rounds):
        begun = time.monotonic()
        told = subprocess.run(
            [sys.executable, "-m", "holdfast", "status", job.name], env=job.environment, capture_output=True, text=True, check=True
        )
        taken.append(time.monotonic() - begun)
        lines = len(told.stdout.splitlines())
    return a_line(f"holdfast status, {nodes} nodes", taken, None, unit="s", lines=lines, characters=len(told.stdout))


def _lost(job: SimulatedJob, nodes: int, count: int, rounds: int) -> Iterator[Line]:
    """Lose *count* nodes at once, again and again."""
    orders, back, cpu, decided = [], [], [], []
    for _ in range(rounds):
        known, before, begun = len(job.incidents()), job.cpu(), time.monotonic()
        at = job.lose(count)
        job.until(lambda known=known: job.trains(known + 1), f"the recovery from {count} lost nodes", seconds=300)  # type: ignore[misc]
        one = job.incidents()[-1]
        assert one.ordered_at is not None
        assert one.closed_at is not None
        orders.append(one.ordered_at - at)
        back.append(one.closed_at - at)
        decided.append(_decided(job, one))
        cpu.append(job.cpu() - before)
        time.sleep(1.0)
    what = f"{count} of {nodes} nodes lost at once"
    yield a_line(f"{what}: to orders sent and answered", orders, ORDERS if count == 10 else None, unit="s", rung=one.rung)
    yield a_line(f"{what}: from the look to the decision", decided, None, unit="s")
    yield a_line(f"{what}: to the incident's end", back, None, unit="s")
    yield a_line(f"{what}: CPU of the flow", cpu, None, unit="s")


def _decided(job: SimulatedJob, one: models.Incident) -> float:
    """Return the seconds that finding the root and asking the policy took."""
    phases = queries.phases(job.history, one.id)
    return sum(phase.seconds for phase in phases if phase.name == "diagnose")


def growth(place: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Compare what the loss of one node costs a small job and a large one."""
    yield a_line("nothing yet", [], None)


def sweep(nodes: int, place: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Look at all nodes from outside."""
    yield a_line("nothing yet", [], None)
