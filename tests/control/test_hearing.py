"""What is put on record of steps that agents tell: a step that a newcomer tells again is no second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.accounting.losses import losses
from holdfast.control.faults.node_faults import REPEATED
from holdfast.control.supervisor import event_table
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.event_handlers import GATHERED
from holdfast.history import models, queries
from tests.control.bare_controller import bare_controller, recorded_events
from tests.history.rows import a_fault

MEMBERSHIP = {"a": [0], "b": [1]}


class Told:
    """A controller of a job of two ranks, and the history that it writes."""

    def __init__(self, run: JobController) -> None:
        self.run, self.hearing, self.history, self.recorder, self.job = run, run.handlers, run.history, run.recorder, run.job

    @property
    def job_events(self) -> list[str]:
        """Return the events on record."""
        return recorded_events(self.run)

    def begin(self, generation: int) -> None:
        """Begin a generation."""
        self.run.generations.begin(generation, MEMBERSHIP, rank_table=self.run.generations.rank_table)

    def hears(self, name: str, generation: int | None = None, *, node: str = "a", **facts: Any) -> None:
        """Take in an event of rank 0, or of the rank on another *node*."""
        known = {"rank": MEMBERSHIP[node][0], "generation": generation or self.run.generations.number, "at": 1.0, "pid": 7}
        event_table.take(self.run.handlers, node, {"event": name, **known, **facts})

    def steps(self, *steps: tuple[int, float]) -> None:
        """Have rank 0 tell of steps and their losses."""
        self.hears("steps", steps=[[step, 1.0, 0.1, loss] for step, loss in steps])

    def curve(self) -> list[tuple[int, float | None]]:
        """Return the job's losses, step by step."""
        assert self.recorder.flush(10.0)
        return [(row.step, row.loss) for row in queries.curve(self.history, self.job.id)]

    def twice(self) -> int:
        """Return how many steps are on record as computed again."""
        return losses(self.history, self.job).steps_lost or 0


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """Give a hearing of a job in its first generation."""
    with bare_controller(tmp_path, MEMBERSHIP) as controller:
        yield Told(controller)


def test_the_step_that_all_go_on_from_keeps_the_loss_of_the_rank_that_computed_it(told: Told) -> None:
    """Who took the place of rank 0 has another rank's loss of that step; it is not computed again either."""
    told.steps((1, 0.5), (2, 0.25))
    told.begin(2)
    told.hears("resumed", step=2)
    told.steps((2, 0.75), (3, 0.125))
    assert told.curve() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert told.twice() == 0


def test_a_step_that_nobody_lived_to_tell_is_told_by_who_comes(told: Told) -> None:
    """The history has no hole where rank 0 died with its word; also when an earlier generation had come further and was rolled back."""
    told.steps((1, 0.5), (2, 0.25), (3, 0.2))
    told.begin(2)
    told.hears("resumed", step=1)
    told.steps((2, 0.3))
    told.begin(3)
    told.hears("resumed", step=3)
    told.steps((3, 0.75), (4, 0.1))
    assert told.curve() == [(1, 0.5), (2, 0.3), (3, 0.75), (4, 0.1)]


def test_a_step_that_is_computed_again_counts_in_place_of_the_first(told: Told) -> None:
    """After a rollback the newer loss is the job's."""
    told.steps((1, 0.5), (2, 0.25))
    told.begin(2)
    told.hears("resumed", step=1)
    told.steps((2, 0.2))
    assert told.curve() == [(1, 0.5), (2, 0.2)]
    assert told.twice() == 1


def test_a_flow_that_adopts_the_job_and_hears_all_again_adds_nothing(told: Told) -> None:
    """Agents tell it of generations that are over, too: what was told again there is told again still."""
    told.steps((1, 0.5), (2, 0.25))
    told.begin(3)
    told.hearing.remember(2, {1: 0, 2: 2})
    told.hears("steps", 1, steps=[[1, 1.0, 0.1, 0.5], [2, 1.0, 0.1, 0.25]])
    told.hears("steps", 2, steps=[[2, 1.0, 0.1, 0.75], [3, 1.0, 0.1, 0.125]])
    assert told.curve() == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_what_an_agent_told_nobody_before_it_was_killed_is_told_by_the_next_one(told: Told) -> None:
    """Whatever generation it was, and each step once."""
    told.steps((1, 1.0), (2, 2.0))
    first = {"event": "steps", "generation": 1, "at": 2.0, "steps": [[step, 1.0, 0.1, float(step)] for step in (1, 2, 3)]}
    saved = {"event": "saved", "generation": 1, "rank": 0, "at": 2.5, "step": 3, "path": "c/3", "seconds": 0.1, "size": 9}
    told.hears("past", events=[first, saved])
    assert told.curve() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [one.step for one in queries.checkpoints(told.history, told.job.id)] == [3]
    told.begin(2)
    late = {**first, "steps": [[step, 1.0, 0.1, float(step)] for step in (3, 4)]}
    told.hears("past", events=[late, {**first, "generation": 3}, {"event": "steps"}])
    assert told.curve() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert told.twice() == 0


def test_replicas_that_are_behind_on_many_nodes_are_told_of_in_one_remark(told: Told) -> None:
    """A moment after the first, with the nodes; what comes later is told of its own."""
    for node in ("b", "a", "b"):
        told.hears("storage_error", node=node, kind="replica-behind", path=f"/memory/{node}", why="10 snapshots were left out", step=30)
    for now in (100.0, 100.0 + GATHERED / 2):
        told.hearing.poll(now)
        assert told.job_events == []
    told.hearing.poll(100.0 + GATHERED)
    told.hearing.poll(200.0)
    (record_event,) = told.job_events
    assert ": a, b: 10 snapshots were left out. Cure: " in record_event
    told.hears("storage_error", node="a", kind="checkpoint-late", path="/ckpt/3", why="late", step=30)
    assert len(told.job_events) == 2, "whatever else is wrong is told at once"


@pytest.mark.parametrize(("kind", "lines"), [("local", 1), ("ssh", 2)])
def test_nodes_of_one_machine_say_one_line_about_it(told: Told, kind: str, lines: int) -> None:
    """Both hear of the same load: every fault is on record, one is announced; two machines say a line each."""
    told.hearing.cluster_kind = kind
    for number, node in enumerate(MEMBERSHIP):
        facts: dict[str, Any] = {
            "kind": "host-overloaded",
            "part": "processors",
            "quote": "load 9 on 2 processors",
            "source": f"host check on {node}",
        }
        told.hears("node.fault", node=node, seen_at=float(number), **facts)
    assert told.recorder.flush(10.0)
    assert [one.node for one in queries.faults(told.history, told.job.id)] == ["a", "b"]
    where = [line.partition(":")[0] for line in told.job_events]
    assert where == (["a, b (one machine)"] if lines == 1 else ["a", "b"])


@pytest.mark.parametrize(("cluster", "at", "lines"), [("c", 100.0 + REPEATED, 0), ("c", 101.0 + REPEATED, 1), ("d", 101.0, 1)])
def test_of_jobs_on_a_busy_machine_the_first_says_so_and_the_next_ones_do_not(told: Told, cluster: str, at: float, lines: int) -> None:
    """Who tries a script again and again need not read it each time; another cluster, or a quarter of an hour, makes it news again."""
    told.recorder.add(models.Job(id="before", name="b", spec={}, cluster={"name": "c"}, directory="/b", at=0.0))
    told.recorder.add(a_fault("before", kind="host-overloaded", at=100.0))
    assert told.recorder.flush(10.0)
    told.hearing.log.cluster = cluster
    told.hears("node.fault", seen_at=at, kind="host-overloaded", part="processors", quote="load 9", source="host check")
    assert len(told.job_events) == lines
