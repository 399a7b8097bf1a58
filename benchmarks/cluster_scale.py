"""The control plane at scale: the cost of thousands of agents for a flow, and its response time when many nodes are lost at once.

All times have the simulated agents' own work in them, which a second core does; what counts as CPU is the flow's process alone.

- ``start``: from the start of the flow's process until every rank has made its first step.
- ``cores for the beats``: what the flow uses while all goes well, and how many beats that is.
- ``N of M nodes lost at once``: the nodes' power is taken in one moment. ``to orders`` ends when the last agent that is left has carried
  out what wakes its ranks; ``to the decision`` is what finding the root and asking the policy took; the CPU is that of the whole incident,
  all that thousands of ranks say when their groups break and are rebuilt included, less what beats cost in that time.
- ``growth``: the same for one node of 16 and one of 4,096. Orders go to every node and every rank reports its way back, so the cost of an
  incident in all grows with the nodes; what must not grow is what a decision takes, and what each node adds.
- ``orders``: what is sent in all to start a generation of 4,096 nodes, against what it would be if each agent got the whole rank table.
- ``sweep``: a look at all nodes from outside, over connections that stay (`benchmarks/sweep.py` has the simulated nodes).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import spread
from benchmarks.simulated.host import names
from benchmarks.simulated.job import SimulatedJob
from benchmarks.sweep import measured, simulated
from holdfast.cluster.ssh import SshSweeper
from holdfast.control.config.worker_env import membership_by_node, rank_environments
from holdfast.control.state.rank_table import RankTable
from holdfast.history import models, queries
from holdfast.host.rlimits import raise_descriptor_limit
from holdfast.protocol import encode

ONE_CORE: Final = 4096
"""Nodes that one core is to hold at a beat a second."""
TEN: Final = 10
ORDERS: Final = 1.0
"""Seconds from the loss of ten nodes to the orders."""
GROWTH: Final = 1.5
"""Times as much as of 16 nodes that an incident may cost of 4,096."""
SMALL, LARGE = 16, 4096
WINDOW: Final = 5.0
"""Seconds over which the cost of beats is taken."""
REST: Final = 2.0
"""Seconds between two losses."""

Line = dict[str, Any]


def a_line(what: str, values: Sequence[float], goal: float | None, **details: Any) -> Line:  # noqa: ANN401 (JSON)
    """Return what the result says of *values*: their spread, and whether the median meets the goal."""
    figures = spread(values)
    return {"what": what, **figures, "goal": goal, "met": None if goal is None else bool(values) and figures["median"] <= goal, **details}


@dataclass(slots=True)
class Lost:
    """What several losses of so many nodes took."""

    orders: list[float] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    actions: set[str] = field(default_factory=set)


def scale(nodes: int, place: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Measure a job on so many nodes: its start, its beats, `holdfast status`, and the loss of one node, of ten, of one in a hundred."""
    losses = [count for count in dict.fromkeys((1, TEN, nodes // 100)) if count == 1 or TEN <= count <= nodes // TEN]
    begun = time.time()
    with SimulatedJob(place, environment, wanted=nodes, spare=sum(losses) * rounds) as job:
        job.until(job.trains, "the first step", seconds=600)
        yield a_line(f"start, {nodes} nodes", [time.time() - begun], None, unit="s", cpu_s=round(job.cpu(), 1))
        yield from _beats(job, nodes, rounds)
        yield _status(job, nodes, rounds)
        for count in losses:
            yield from _lines_of(f"{count} of {nodes} nodes lost at once", _lose(job, count, rounds), ORDERS if count == TEN else None)
        yield a_line(f"memory of the flow, {nodes} nodes", [job.memory() / 1e6], None, unit="MB")
        begun = time.time()
        job.stop()
        yield a_line(f"stop, {nodes} nodes", [time.time() - begun], None, unit="s")


def _cores(job: SimulatedJob) -> tuple[float, float]:
    """Return the cores that the flow uses while all goes well, and the beats of all agents in a second."""
    before, begun, heartbeats = job.cpu(), time.monotonic(), job.nodes.ask(do="cost")["heartbeats"]
    time.sleep(WINDOW)
    seconds = time.monotonic() - begun
    return (job.cpu() - before) / seconds, (job.nodes.ask(do="cost")["heartbeats"] - heartbeats) / seconds


def _beats(job: SimulatedJob, nodes: int, rounds: int) -> Iterator[Line]:
    used, heartbeats = zip(*(_cores(job) for _ in range(rounds)), strict=True)
    details = {"beats_a_second": round(statistics.median(heartbeats)), "memory_mb": round(job.memory() / 1e6)}
    goal = 1.0 if nodes >= ONE_CORE else None
    yield a_line(f"cores for the beats of {nodes} nodes", used, goal, unit="cores", **details)
    each = [1e6 * one / many for one, many in zip(used, heartbeats, strict=True)]
    yield a_line(f"a beat, of {nodes} nodes", each, 1e6 / ONE_CORE if nodes >= ONE_CORE else None, unit="us of CPU")


def _status(job: SimulatedJob, nodes: int, rounds: int) -> Line:
    """Ask for the state of the job, as a person does."""
    taken, output = list[float](), ""
    for _ in range(rounds):
        begun = time.monotonic()
        command = [sys.executable, "-m", "holdfast", "status", job.name]
        output = subprocess.run(command, env=job.environment, capture_output=True, text=True, check=True).stdout
        taken.append(time.monotonic() - begun)
    return a_line(f"holdfast status, {nodes} nodes", taken, None, unit="s", lines=len(output.splitlines()), characters=len(output))


def _lose(job: SimulatedJob, count: int, rounds: int) -> Lost:
    """Lose *count* nodes at once, again and again."""
    found, idle = Lost(), _cores(job)[0]
    for _ in range(rounds):
        known, before, begun = len(job.incidents()), job.cpu(), time.monotonic()
        at = job.lose(count)
        job.until(partial(job.trains, known + 1), f"the recovery from {count} lost nodes", seconds=300)
        time.sleep(REST)
        one = job.incidents()[-1]
        assert one.commands_sent_at is not None
        assert one.closed_at is not None
        found.orders.append(one.commands_sent_at - at)
        found.back.append(one.closed_at - at)
        found.decided.append(_decided(job, one))
        found.cpu.append(job.cpu() - before - idle * (time.monotonic() - begun))
        found.actions.add(str(one.action))
    return found


def _decided(job: SimulatedJob, one: models.Incident) -> float:
    """Return the seconds that finding the root and asking the policy took."""
    return sum(phase.seconds for phase in queries.phases(job.history, one.id) if phase.name == "diagnose")


def _lines_of(what: str, found: Lost, goal: float | None) -> Iterator[Line]:
    yield a_line(f"{what}: to orders", found.orders, goal, unit="s", actions=sorted(found.actions))
    yield a_line(f"{what}: to the decision, from the look", found.decided, None, unit="s")
    yield a_line(f"{what}: to the first new step", found.back, None, unit="s")
    yield a_line(f"{what}: CPU of the flow", found.cpu, None, unit="s")


def growth(place: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Compare what the loss of one node costs a small job and a large one."""
    found = {}
    for nodes in (SMALL, LARGE):
        with SimulatedJob(place / str(nodes), environment, wanted=nodes, spare=rounds) as job:
            job.until(job.trains, "the first step", seconds=600)
            found[nodes] = _lose(job, 1, rounds)
    small, large = found[SMALL], found[LARGE]
    many = f"{LARGE} nodes against {SMALL}"
    yield _times(f"growth: to the decision, {many}", small.decided, large.decided)
    each = [[one / nodes for one in found[nodes].cpu] for nodes in (SMALL, LARGE)]
    yield _times(f"growth: CPU of an incident for each node, {many}", *each)
    yield _times(f"growth: CPU of an incident in all, {many}", small.cpu, large.cpu)


def orders(_place: Path, _environment: dict[str, str], _rounds: int) -> Iterator[Line]:
    """Count the bytes that start a generation; nothing is run."""
    membership = {node: [rank] for rank, node in enumerate(names(LARGE))}
    rank_table = RankTable.fresh(1, membership, ("10.0.0.1", 29500))
    workers, members = rank_environments(membership, generation=1, rank_table=rank_table, job="job"), membership_by_node(membership)
    sent = sum(len(encode({"generation": 1, "workers": workers[node], **members[node]})) for node in membership)
    every = sum(len(encode({"generation": 1, "workers": workers[node]})) for node in membership)
    every += LARGE * len(encode({"membership": membership, "first": 0}))
    yield a_line(f"orders that start {LARGE} nodes", [sent / 1e6], None, unit="MB", if_all_had_the_whole_table=round(every / 1e6))


def _times(what: str, small: Sequence[float], large: Sequence[float]) -> Line:
    """Return how many times as much the large ones are as the middle of the small ones."""
    base = statistics.median(small)
    return a_line(what, [one / base for one in large], GROWTH, unit="times", small=spread(small), large=spread(large))


def sweep(nodes: int, place: Path, _environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Look at all nodes from outside."""
    place.mkdir(parents=True)
    raise_descriptor_limit("a sweep", nodes)
    with simulated(place, nodes) as cluster, SshSweeper(cluster) as sweeper:
        first = measured(sweeper)
        seconds, cpu = zip(*(measured(sweeper) for _ in range(rounds)), strict=True)
    details = {"first_s": round(first[0], 2), "first_cpu_s": round(first[1], 2)}
    yield a_line(f"sweep of {nodes} nodes", seconds, None, unit="s", **details)
    yield a_line(f"sweep of {nodes} nodes: CPU", cpu, None, unit="s")
