"""Fault sources: what happens to the nodes of a cluster and when, made once for a run, so that every system gets the same faults.

All times are seconds since the beginning. The work grows with the number of faults; only Weibull times and lemon nodes cost something for
each node, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.simulator.causes import CORRUPTION, LEMON, LLAMA_3, NODES_ONLY, PROCESSES_ONLY, RACK, Cause
from holdfast.simulator.scenario import TRACE, ConstantRate, Scenario
from holdfast.simulator.trace import DAY, FaultTrace, load_trace

YEAR: Final = 365 * DAY


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A fault of one node."""

    at: float
    node: int
    """Index of the node."""
    cause: Cause
    repair: float
    """Seconds until the node works again, without waiting for a repair crew; 0: it needs no repair."""
    noticed_after: float = 0.0
    """Seconds until a silent fault is noticed."""
    rank: int | None = None
    """The fault is on the node that has this rank by then, instead of *node*."""
    spare: bool = False
    """The fault is on a node without ranks, instead of *node*."""


@dataclass(frozen=True, slots=True)
class NodeSlowdown:
    """A node that slows down the job on it."""

    at: float
    node: int
    slowdown: float
    """Share, 0 to 1."""
    seconds: float


@dataclass(frozen=True, slots=True)
class NodesLeaving:
    """Nodes that are taken out as planned."""

    at: float
    nodes: tuple[int, ...]
    seconds: float
    lead_time: float


@dataclass(frozen=True, slots=True)
class ControllerAway:
    """The controllers of all jobs are gone: nothing is answered meanwhile, and live ranks end in a recovery that nobody finishes."""

    at: float
    seconds: float


SimulatedEvent = NodeFault | NodeSlowdown | NodesLeaving | ControllerAway


@dataclass(frozen=True, slots=True)
class PacedEvent:
    """An event that a test causes while the job trains, or some time after the one before."""

    event: SimulatedEvent
    """Its own time counts for nothing."""
    uptime: float | None
    """Seconds that the first job has trained by then, without those of its incidents; None: the training does not matter."""
    after: float = 0.0
    """Seconds after the event before, where the training does not matter."""


Numbers = np.random.Generator


def events_of(scenario: Scenario, run: int) -> list[SimulatedEvent]:
    """Return all that happens in this *run* of *scenario*, in order; each source has random numbers of its own."""
    faults, found = scenario.faults, list[SimulatedEvent]()
    sources: list[tuple[object, Callable[[Scenario, Numbers], Iterator[SimulatedEvent]]]] = [
        (faults.constant_rate, _constant_rate),
        (faults.trace, _trace),
        (faults.lemons, _lemons),
        (faults.racks, _racks),
        (faults.stragglers, _stragglers),
        (faults.silent_corruption, _corruption),
        (scenario.maintenance, _maintenance),
    ]
    for number, (wanted, source) in enumerate(sources):
        if wanted is not None:
            found += source(scenario, np.random.default_rng([scenario.seed, run, number]))
    return sorted(found, key=lambda one: (one.at, isinstance(one, NodesLeaving)))


def mix_of(name: str) -> tuple[list[Cause], np.ndarray]:
    """Return the causes of the mix *name* and their shares."""
    if name == "trace":
        outages = load_trace(TRACE).outages
        causes = list(dict.fromkeys(one.cause for one in outages))
        counts = [sum(one.cause == cause for one in outages) for cause in causes]
    else:
        mix = {"llama-3": LLAMA_3, "nodes": NODES_ONLY, "processes": PROCESSES_ONLY}[name]
        causes, counts = list(mix), list(mix.values())
    return causes, np.array(counts) / sum(counts)


def repair_times() -> np.ndarray:
    """Return the repair times of the trace in seconds, from which those of other sources are drawn."""
    return np.array([one.seconds for one in load_trace(TRACE).outages])


def _constant_rate(scenario: Scenario, numbers: Numbers) -> Iterator[NodeFault]:
    """Yield independent faults of single nodes, with exponential or Weibull times between them."""
    source = scenario.faults.constant_rate
    assert source is not None
    nodes, seconds = scenario.cluster.nodes, scenario.duration.total_seconds()
    rate = source.per_1000_node_days / 1000 / DAY
    if not rate:
        return
    if source.shape == 1:
        count = int(numbers.poisson(rate * nodes * seconds))
        times, places = np.sort(numbers.uniform(0, seconds, count)), numbers.integers(0, nodes, count)
    else:
        times, places = _renewals(nodes, seconds, rate, source.shape, numbers)
    causes, shares = mix_of(source.mix)
    chosen = numbers.choice(len(causes), len(times), p=shares)
    repairs = _repairs(source, len(times), numbers)
    for at, node, cause, repair in zip(times.tolist(), places.tolist(), chosen.tolist(), repairs.tolist(), strict=True):
        yield NodeFault(at, node, causes[cause], 0.0 if causes[cause].of_process else repair)


def _renewals(nodes: int, seconds: float, rate: float, shape: float, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return times and nodes of Weibull renewals: each node starts at its own place within its first interval.

    The warm-up before time 0 lasts three mean intervals, at most ten years, so that the nodes are not all new at the beginning.
    """
    scale, before = 1 / rate / math.gamma(1 + 1 / shape), min(3 / rate, 10 * YEAR)
    at, alive = np.full(nodes, -before), np.arange(nodes)
    times, places = list[np.ndarray](), list[np.ndarray]()
    while len(alive):
        at = at + scale * numbers.weibull(shape, len(alive))
        within = at < seconds
        at, alive = at[within], alive[within]
        seen = at >= 0
        times.append(at[seen])
        places.append(alive[seen])
    every, where = np.concatenate(times), np.concatenate(places)
    order = np.argsort(every, kind="stable")
    return every[order], where[order]


def _repairs(source: ConstantRate, count: int, numbers: Numbers) -> np.ndarray:
    if source.repair is not None:
        return np.full(count, source.repair.total_seconds())
    return numbers.choice(repair_times(), count)


def _trace(scenario: Scenario, numbers: Numbers) -> Iterator[NodeFault]:
    """Yield the faults of a trace on as many nodes as the cluster has.

    Each node is one of the trace's servers, drawn with replacement: the bad ones come as often as they did. The n-th copy of a server
    belongs to the n-th cell. Each cell is as the trace's cluster was, with its bursts, at a time of its own: it begins at a random point
    of the trace and goes round. So faults come in bursts within a cell, and cells are independent.
    """
    source = scenario.faults.trace
    assert source is not None
    trace = load_trace(source.file)
    servers = numbers.integers(0, len(trace.servers), scenario.cluster.nodes)
    copies, shifts = [0] * len(trace.servers), list[float]()
    for node, server in enumerate(servers.tolist()):
        cell = copies[server]
        copies[server] += 1
        while len(shifts) <= cell:
            shifts.append(float(numbers.uniform(0, trace.seconds)))
        yield from _of_server(trace, server, node, shifts[cell], scenario.duration.total_seconds())


def _of_server(trace: FaultTrace, server: int, node: int, shift: float, seconds: float) -> Iterator[NodeFault]:
    for one in trace.servers[server]:
        at = (one.at - shift) % trace.seconds
        while at < seconds:
            yield NodeFault(at, node, one.cause, one.seconds)
            at += trace.seconds


def _lemons(scenario: Scenario, numbers: Numbers) -> Iterator[NodeFault]:
    """Yield the faults of nodes that fail again and again."""
    source = scenario.faults.lemons
    assert source is not None
    count = round(source.share * scenario.cluster.nodes)
    for node in numbers.choice(scenario.cluster.nodes, count, replace=False).tolist():
        at = float(numbers.exponential(source.interval.total_seconds()))
        while at < scenario.duration.total_seconds():
            yield NodeFault(at, node, LEMON, source.repair.total_seconds())
            at += float(numbers.exponential(source.interval.total_seconds()))


def _racks(scenario: Scenario, numbers: Numbers) -> Iterator[NodeFault]:
    """Yield the faults of whole racks: of all their nodes at the same moment."""
    source, width, nodes = scenario.faults.racks, scenario.cluster.nodes_per_rack, scenario.cluster.nodes
    assert source is not None
    racks, seconds = -(-nodes // width), scenario.duration.total_seconds()
    count = int(numbers.poisson(source.per_rack_year / YEAR * racks * seconds))
    for at, rack in zip(numbers.uniform(0, seconds, count).tolist(), numbers.integers(0, racks, count).tolist(), strict=True):
        for node in range(rack * width, min(nodes, (rack + 1) * width)):
            yield NodeFault(at, node, RACK, source.repair.total_seconds())


def _places(per_1000_node_days: float, scenario: Scenario, numbers: Numbers) -> Iterator[tuple[float, int]]:
    """Yield times and nodes of independent events."""
    nodes, seconds = scenario.cluster.nodes, scenario.duration.total_seconds()
    count = int(numbers.poisson(per_1000_node_days / 1000 / DAY * nodes * seconds))
    return iter(zip(numbers.uniform(0, seconds, count).tolist(), numbers.integers(0, nodes, count).tolist(), strict=True))


def _stragglers(scenario: Scenario, numbers: Numbers) -> Iterator[NodeSlowdown]:
    source = scenario.faults.stragglers
    assert source is not None
    for at, node in _places(source.per_1000_node_days, scenario, numbers):
        yield NodeSlowdown(at, node, source.slowdown, source.duration.total_seconds())


def _corruption(scenario: Scenario, numbers: Numbers) -> Iterator[NodeFault]:
    source = scenario.faults.silent_corruption
    assert source is not None
    repairs = repair_times()
    for at, node in _places(source.per_1000_node_days, scenario, numbers):
        yield NodeFault(at, node, CORRUPTION, float(numbers.choice(repairs)), source.detected_after.total_seconds())


def _maintenance(scenario: Scenario, numbers: Numbers) -> Iterator[NodesLeaving]:
    """Yield planned maintenance, of the next nodes each time."""
    planned, nodes = scenario.maintenance, scenario.cluster.nodes
    assert planned is not None
    at, first = planned.interval.total_seconds(), int(numbers.integers(0, nodes))
    while at < scenario.duration.total_seconds():
        chosen = tuple((first + place) % nodes for place in range(planned.nodes))
        yield NodesLeaving(at, chosen, planned.duration.total_seconds(), planned.lead_time.total_seconds())
        first, at = first + planned.nodes, at + planned.interval.total_seconds()


def fault_rate(events: Sequence[SimulatedEvent | PacedEvent], scenario: Scenario) -> float:
    """Return the faults per node-hour among *events*."""
    faults = sum(isinstance(one, NodeFault) for one in events)
    return faults / (scenario.cluster.nodes * scenario.duration.total_seconds() / 3600)
