"""What is put on record of steps that agents tell: a step that a newcomer tells again is no second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from detectors.catalogue import CATALOGUE_LEVELS
from holdfast.accounting.losses import losses
from holdfast.control.faults.node_faults import REPEATED
from holdfast.control.state.generation import GenerationState
from holdfast.control.supervisor import event_table
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.event_handlers import GATHERED, EventHandlers
from holdfast.history import History, Recorder, models, queries
from holdfast.spec import TrainingJob
from tests.history.rows import a_fault

MEMBERSHIP = {"a": [0], "b": [1]}


class Told:
    """A hearing of a job of two ranks, and the history that it writes."""

    def __init__(self, place: Path) -> None:
        self.history = History.open(f"sqlite:///{place / 'history.db'}")
        self.recorder = Recorder(self.history, place / "spill")
        self.job = models.Job(name="j", spec={}, cluster={}, directory=str(place), at=0.0)
        self.remarks: list[str] = []
        beside = {
            "remark": self.remarks.append,
            "record_fault": lambda *_args, **_facts: None,
            "spec": TrainingJob(name="j", command=["x"]),
        }
        self.run = SimpleNamespace(**beside, job=self.job, recorder=self.recorder, best=0, managed=True, cadence=None, tell=lambda *_: None)
        self.hearing = EventHandlers(cast("JobController", self.run))
        self.recorder.add(self.job)
        self.begin(1)

    def begin(self, generation: int) -> None:
        """Begin a generation."""
        self.run.generation, self.run.board = generation, GenerationState(generation, MEMBERSHIP)
        self.hearing.begin()

    def hears(self, name: str, generation: int | None = None, *, node: str = "a", **facts: Any) -> None:
        """Take in an event of rank 0, or of the rank on another *node*."""
        known = {"rank": MEMBERSHIP[node][0], "generation": generation or self.run.generation, "at": 1.0, "pid": 7}
        self.run.hearing = self.hearing
        event_table.take(cast("JobController", self.run), node, {"event": name, **known, **facts})

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
    one = Told(tmp_path)
    yield one
    one.recorder.close()
    one.history.close()


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
        told.hears("trouble", node=node, kind="replica-behind", path=f"/memory/{node}", why="10 snapshots were left out", step=30)
    for now in (100.0, 100.0 + GATHERED / 2):
        told.hearing.look(now)
        assert told.remarks == []
    told.hearing.look(100.0 + GATHERED)
    told.hearing.look(200.0)
    (remark,) = told.remarks
    assert ": a, b: 10 snapshots were left out. Cure: " in remark
    told.hears("trouble", node="a", kind="checkpoint-late", path="/ckpt/3", why="late", step=30)
    assert len(told.remarks) == 2, "whatever else is wrong is told at once"


def test_nodes_of_one_machine_say_one_line_about_it(told: Told) -> None:
    """All three hear of the same load: every fault is on record, one is announced; two machines say a line each."""
    noted: list[Any] = []
    told.run.slow_ranks = SimpleNamespace(note=noted.append)
    told.run.levels, told.run.members, told.run.incident, told.run.history = CATALOGUE_LEVELS, list(MEMBERSHIP), None, told.history
    for kind, lines in ("local", 1), ("ssh", 3):
        told.run.cluster = SimpleNamespace(kind=kind, name="c")
        for number, node in enumerate(MEMBERSHIP):
            facts: dict[str, Any] = {
                "kind": "host-overloaded",
                "part": "processors",
                "quote": "load 9 on 2 processors",
                "source": f"host check on {node}",
            }
            told.hears("node.fault", node=node, seen_at=float(lines + number), **facts)
        assert len(told.remarks) == lines
    assert len(noted) == 4
    assert told.remarks[0].startswith("a, b (one machine): ")
    assert [line.partition(":")[0] for line in told.remarks[1:]] == ["a", "b"]


def test_of_jobs_on_a_busy_machine_the_first_says_so_and_the_next_ones_do_not(told: Told) -> None:
    """Who tries a script again and again need not read it each time; another cluster, or a quarter of an hour, makes it news again."""
    told.recorder.add(models.Job(id="before", name="b", spec={}, cluster={"name": "c"}, directory="/b", at=0.0))
    told.recorder.add(a_fault("before", kind="host-overloaded", at=100.0))
    assert told.recorder.flush(10.0)
    told.run.slow_ranks, told.run.levels, told.run.members = SimpleNamespace(note=lambda _fault: None), CATALOGUE_LEVELS, list(MEMBERSHIP)
    told.run.incident, told.run.history = None, told.history
    facts: dict[str, Any] = {"kind": "host-overloaded", "part": "processors", "quote": "load 9", "source": "host check"}
    for remarks, (name, at) in enumerate([("c", 100.0 + REPEATED), ("c", 101.0 + REPEATED), ("d", 101.0)]):
        told.run.cluster, told.hearing = SimpleNamespace(kind="local", name=name), EventHandlers(cast("JobController", told.run))
        told.hears("node.fault", seen_at=at, **facts)
        assert len(told.remarks) == remarks
