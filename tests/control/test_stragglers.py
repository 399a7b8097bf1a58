"""Nodes through whose faults training continues: assessed by what they cost, and left where that pays off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.agent.workers.worker import BLOCK
from holdfast.control.config.watched_files import WatchedPolicy
from holdfast.control.faults.stragglers import INTERVAL, Stragglers
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.control.supervisor.requests import Requests
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.evidence import StepBreakdown, StepBreakdowns
from holdfast.detectors.training.stragglers import LONG
from holdfast.history import models
from holdfast.policies.recovery.policy import NAMED
from holdfast.policies.slowness import StragglerAction
from holdfast.spec import TrainingJob
from tests.mentions import mentions

WELL = StepBreakdown(own=0.3, talk=0.05, data=0.0)
WAITS = StepBreakdown(own=0.3, talk=0.25, data=0.0)
SLOW = StepBreakdown(own=0.5, talk=0.05, data=0.0)
HOT = Fault(kind="gpu-thermal-throttle", at=1.0, node="n1", quote="slowed down by its temperature", signature="hot")
NARROW = Fault(kind="ib-rate-low", at=1.0, node="n1", quote="100 of 400 Gb/s", signature="narrow")


class TheRun:
    """What a straggler assessment reads of a controller; a test sets its step times."""

    def __init__(self, wanted: str = "auto") -> None:
        self.spec = TrainingJob.model_validate({"name": "a", "script": "b.py", "checks": {"straggler": wanted}})
        self.timings: StepBreakdowns = timings(WELL, WELL, WELL)
        self.kept: list[models.StragglerDecision] = []
        self.asked: list[models.Request] = []
        self.said: list[str] = []
        self.requests = SimpleNamespace(ask=self.asked.append, migrations=())
        ranks = {rank: SimpleNamespace(rank=rank, node=f"n{rank}") for rank in range(3)}
        self.board = SimpleNamespace(now=0.0, step_before=100, ranks=ranks, until=lambda: 50_000, step_breakdowns=lambda *_: self.timings)
        self.generations = SimpleNamespace(state=self.board, members=("n0", "n1", "n2"), roles=((0, 1, 2),), why_not_kept=lambda: "")
        log = SimpleNamespace(job=SimpleNamespace(id="j"), recorder=SimpleNamespace(add=self.kept.append), record_event=self.said.append)
        self.ranks = Stragglers(
            log=cast("JobLog", log),
            wanted=StragglerAction(self.spec.checks.straggler),
            cluster_kind="ssh",
            generations=cast("Generations", self.generations),
            policy=cast("WatchedPolicy", SimpleNamespace(present=NAMED["balanced"])),
            requests=cast("Requests", self.requests),
            spares=lambda: ("n3",),
        )
        self.clock = 0.0

    def poll(self, steps: int = (LONG + 1) * BLOCK) -> None:
        """Poll again after so many *steps*."""
        self.board.step_before += steps
        self.clock += INTERVAL
        self.ranks.poll(self.clock)


def timings(*now: StepBreakdown, first: StepBreakdown = WELL) -> StepBreakdowns:
    """Return the step times of ranks that all began with *first*."""
    nodes = {rank: f"n{rank}" for rank in range(len(now))}
    blocks: dict[int, Any] = {rank: (one,) * LONG for rank, one in enumerate(now)}
    return StepBreakdowns(at=0.0, step=100, nodes=nodes, first=dict.fromkeys(nodes, (first,) * LONG), blocks=blocks, roles=((0, 1, 2),))


def test_a_degraded_node_stays_while_it_costs_nothing_and_is_left_when_it_does() -> None:
    """Only steps after the fault count; an unchanged outcome is reported once."""
    run = TheRun()
    run.ranks.note(HOT)
    run.poll(steps=BLOCK)
    assert run.kept == [], "no step since the fault was measured yet"
    for _ in range(3):
        run.poll()
    assert [(one.kind, one.node, one.act) for one in run.kept] == [(HOT.kind, "n1", "stay")]
    assert (run.said, run.asked) == ([], []), "what costs nothing is worth no word"
    run.timings = timings(WAITS, SLOW, WAITS)
    for _ in range(3):
        run.poll()
    assert [(one.rank, one.act) for one in run.kept[1:]] == [(1, "move")]
    assert run.said == [run.kept[1].reason]
    assert mentions(run.said[0], "rank 1 on n1", "gpu-thermal-throttle", "200 ms")
    assert [(one.kind, (one.facts or {})["rank"], (one.facts or {})["node"]) for one in run.asked] == [("migrate", 1, "n1")]


def test_a_network_fault_counts_the_longer_waits_of_all_ranks() -> None:
    """No rank's own work is slow; communication takes longer than before."""
    run = TheRun()
    run.ranks.note(NARROW)
    run.timings = timings(WAITS, WAITS, WAITS)
    run.poll()
    assert mentions(run.kept[0].reason, "rank 1 on n1", "ib-rate-low")
    assert run.kept[0].record["lost"] == pytest.approx(0.2)
    assert (run.kept[0].act, len(run.asked)) == ("move", 1)


def test_nothing_is_assessed_during_a_migration_or_of_nodes_that_left() -> None:
    """A migration may cure more than one; a node that has left slows nothing down."""
    run = TheRun()
    run.ranks.note(HOT)
    run.timings = timings(WAITS, SLOW, WAITS)
    run.requests.migrations = ("one",)
    run.poll()
    assert run.kept == []
    run.requests.migrations, run.generations.members = (), ("n0", "n2", "n3")
    run.poll()
    run.generations.members = ("n0", "n1", "n2")
    run.poll()
    assert run.kept == []


def test_a_slow_rank_is_assessed_again_and_reported_when_the_outcome_changes() -> None:
    """With fewer steps remaining a migration no longer pays off."""
    run = TheRun()
    run.timings = timings(WAITS, SLOW, WAITS)
    run.generations.state.until = lambda: 200
    seen = Fault(kind="straggler-gpu", at=1.0, node="n1", rank=1, quote="slow", signature="slow")
    run.ranks.assess(seen)
    run.poll(steps=0)
    assert [one.act for one in run.kept] == ["stay"]
    run.generations.state.until = lambda: 100_000
    run.poll(steps=0)
    assert [one.act for one in run.kept] == ["stay", "move"]
    assert len(run.asked) == 1


def test_an_unchanged_outcome_is_reported_once_and_again_when_it_costs_much_more() -> None:
    """Another slowest rank is no news, nor is another node of the same machine; each outcome is recorded."""
    run = TheRun("report")
    run.ranks.cluster_kind = "local"
    for node in ("n0", "n1", "n2"):
        run.ranks.note(Fault(kind="host-overloaded", at=1.0, node=node, quote="load 9 on 2 processors", signature="load"))
    slower = StepBreakdown(own=0.6, talk=0.05, data=0.0)
    for now in (timings(WAITS, SLOW, WAITS), timings(SLOW, WAITS, WAITS), timings(WAITS, WAITS, SLOW), timings(WAITS, slower, WAITS)) * 3:
        run.timings = now
        run.poll()
    assert len(run.kept) > 3
    assert len(run.said) == 1, run.said
    waits = StepBreakdown(own=0.3, talk=1.75, data=0.0)
    run.timings = timings(waits, StepBreakdown(own=2.0, talk=0.05, data=0.0), waits)
    run.poll()
    assert len(run.said) == 2
