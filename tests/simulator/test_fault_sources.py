"""Faults come at the rates and in the patterns of their sources, and are the same for every system."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from holdfast.simulator.fault_sources import NodeFault, NodesLeaving, NodeSlowdown, events_of, mix_of
from holdfast.simulator.trace import load_trace
from tests.simulator.making import DAY, scenario


def faults_of(faults: dict[str, Any], *, nodes: int = 1000, days: int = 100, run: int = 0, **fields: Any) -> list[NodeFault]:
    """Return the faults of a cluster."""
    made = scenario(nodes=nodes, nnodes=8, duration=f"{days}d", faults=faults, **fields)
    return [one for one in events_of(made, run) if isinstance(one, NodeFault)]


def variation(times: list[float]) -> float:
    """Return the coefficient of variation of the times between *times*: 1 for independent faults."""
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize("shape", [1.0, 0.6, 2.0])
def test_faults_come_at_the_rate_that_was_asked_for(shape: float) -> None:
    """Exponential and Weibull: 650 in 100,000 node-days, within five standard deviations of a Poisson number."""
    found = faults_of({"constant_rate": {"per_1000_node_days": 6.5, "shape": shape}})
    assert abs(len(found) - 650) < 5 * 650**0.5
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert max(one.at for one in found) < 100 * DAY


def test_a_seed_and_a_run_name_one_sequence_of_faults() -> None:
    """The same again, and another one for another run or seed."""
    faults = {"constant_rate": {}, "racks": {"per_rack_year": 1}}
    assert faults_of(faults) == faults_of(faults)
    assert faults_of(faults) != faults_of(faults, run=1)
    assert faults_of(faults) != faults_of(faults, seed=2)


def test_causes_come_as_often_as_in_the_llama_3_run() -> None:
    """148 of 419 are faulty GPUs; a fault of a process needs no repair."""
    causes, shares = mix_of("llama-3")
    assert dict(zip([one.name for one in causes], shares, strict=True))["faulty GPU"] == pytest.approx(148 / 419)
    found = faults_of({"constant_rate": {"per_1000_node_days": 65}})
    assert abs(sum(one.cause.kind == "gpu-off-bus" for one in found) / len(found) - 148 / 419) < 0.03
    assert {one.repair for one in found if one.cause.of_process} == {0.0}


def test_the_trace_that_comes_with_holdfast_is_the_published_one() -> None:
    """400 servers over 349 days: 584 faults, 4.18 in 1,000 node-days, on 231 servers; half are repaired within 0.85 days."""
    trace = load_trace("infinitehbd")
    assert (len(trace.servers), len(trace.outages), sum(bool(one) for one in trace.servers)) == (400, 584, 231)
    assert trace.per_1000_node_days == pytest.approx(4.18, abs=0.01)
    assert statistics.median(one.seconds / DAY for one in trace.outages) == pytest.approx(0.85, abs=0.01)


def test_a_scaled_trace_keeps_its_rate_its_bursts_its_bad_nodes_and_its_repair_times() -> None:
    """On other numbers of nodes: as often on each, in bursts on one cell's size, and the worst tenth has a third of the faults or more."""
    small = faults_of({"trace": {}}, nodes=400, days=348)
    large = faults_of({"trace": {}}, nodes=4000, days=348)
    assert len(large) / (4000 * 348 / 1000) == pytest.approx(4.18, rel=0.15)
    assert variation([one.at for one in small]) > 1.25
    counts = sorted(Counter(one.node for one in large).values(), reverse=True)
    assert sum(counts[:400]) / len(large) > 0.33
    assert statistics.quantiles([one.repair for one in large], n=10)[-1] > 8 * DAY


def test_a_rack_fails_at_once_and_lemon_nodes_fail_again() -> None:
    """All four nodes of a rack at the same moment; two nodes of 200 with faults about every two days."""
    racks = faults_of({"racks": {"per_rack_year": 2}}, nodes=200)
    moments = Counter(one.at for one in racks)
    assert moments
    assert set(moments.values()) == {4}
    lemons = Counter(one.node for one in faults_of({"lemons": {"share": "1%", "interval": "2d"}}, nodes=200))
    assert len(lemons) == 2
    assert all(25 < number < 80 for number in lemons.values())


def test_slow_nodes_and_planned_maintenance_come_as_asked() -> None:
    """Maintenance at its interval, of other nodes each time."""
    made = scenario(
        nodes=100, duration="30d", faults={"stragglers": {"per_1000_node_days": 10}}, maintenance={"interval": "7d", "nodes": 5}
    )
    events = events_of(made, 0)
    leaving = [one for one in events if isinstance(one, NodesLeaving)]
    assert [one.at / DAY for one in leaving] == [7, 14, 21, 28]
    assert len({node for one in leaving for node in one.nodes}) == 20
    assert 10 < sum(isinstance(one, NodeSlowdown) for one in events) < 60
