"""Many nodes lost at once, of jobs on simulated agents: every agent that is left gets its orders, and the job goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulated.job import SimulatedJob
from holdfast.history import queries
from tests.integration.conftest import PrefectServer

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("nodes", "lost"), [(16, 2), (64, 10)])
def test_every_node_that_is_left_gets_its_orders_when_many_are_lost_at_once(
    nodes: int, lost: int, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """The ranks that live stay, the lost ones go to spare nodes, in one generation that all agents know; then a person stops the job."""
    with SimulatedJob(tmp_path, prefect_server.environment, wanted=nodes, spare=lost) as job:
        job.until(job.trains, "the first step")
        before = set(job.members())
        assert len(before) == nodes
        job.lose(lost)
        job.until(lambda: job.trains(1), f"the recovery from {lost} lost nodes")
        (incident,) = job.incidents()
        assert (incident.kind, incident.action, incident.outcome) == ("node-lost", "replace-ranks", "recovered")
        gone = {one.node for one in queries.faults(job.history, job.row.id) if one.kind == "node-lost"}
        after, given = set(job.members()), job.nodes.ask(do="given")["nodes"]
        assert len(gone) == lost
        assert after == set(given) == (before - gone) | (after - before)
        row = queries.newest_generation(job.history, job.row.id)
        assert row is not None
        assert {generation for generation, _ in given.values()} == {row.number}
        assert sorted(rank for ranks in row.ranks.values() for rank in ranks) == list(range(nodes))
        for node, (_, orders) in given.items():
            assert orders.get("start", 0) == (node in before), node
            assert bool(orders.get("abandon")) is (node in before), node
            assert orders["regroup"] >= 1, node
        assert job.stop() == 3  # cancelled
        assert job.nodes.ask(do="given")["nodes"] == {}, "agents were commanded to end"
