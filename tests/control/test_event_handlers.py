"""What is recorded of the agents' events: a step that a new process reports again is not recorded twice."""

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
from tests.mentions import mentions

MEMBERSHIP = {"a": [0], "b": [1]}


class Recorded:
    """A controller of a job of two ranks, and the history that it writes."""

    def __init__(self, run: JobController) -> None:
        self.run, self.handlers, self.history, self.recorder, self.job = run, run.handlers, run.history, run.recorder, run.job

    @property
    def job_events(self) -> list[str]:
        """Return the recorded events."""
        return recorded_events(self.run)

    def begin(self, generation: int) -> None:
        """Begin a generation."""
        self.run.generations.begin(generation, MEMBERSHIP, rank_table=self.run.generations.rank_table)

    def receives(self, name: str, generation: int | None = None, *, node: str = "a", **facts: Any) -> None:
        """Handle an event of rank 0, or of the rank on another *node*."""
        known = {"rank": MEMBERSHIP[node][0], "generation": generation or self.run.generations.number, "at": 1.0, "pid": 7}
        event_table.take(self.run.handlers, node, {"event": name, **known, **facts})

    def steps(self, *steps: tuple[int, float | None]) -> None:
        """Have rank 0 report steps and their losses."""
        self.receives("steps", steps=[[step, 1.0, 0.1, loss] for step, loss in steps])

    def curve(self) -> list[tuple[int, float | None]]:
        """Return the job's losses, step by step."""
        assert self.recorder.flush(60.0)
        return [(row.step, row.loss) for row in queries.curve(self.history, self.job.id)]

    def twice(self) -> int:
        """Return how many steps are recorded as computed again."""
        return losses(self.history, self.job).steps_lost or 0


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    """Return the controller of a job in its first generation."""
    with bare_controller(tmp_path, MEMBERSHIP) as controller:
        yield Recorded(controller)


def test_the_step_that_all_resume_from_keeps_the_loss_of_the_rank_that_computed_it(recorded: Recorded) -> None:
    """The process that took rank 0 does not know its loss of that step, which is not computed again."""
    recorded.steps((1, 0.5), (2, 0.25))
    recorded.begin(2)
    recorded.receives("resumed", step=2)
    recorded.steps((2, None), (3, 0.125))
    assert recorded.curve() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert recorded.twice() == 0


def test_a_step_that_rank_0_could_not_report_is_recorded_from_its_successor(recorded: Recorded) -> None:
    """The history has the step, without a loss, where rank 0 died before its report; also after a rollback from a later step."""
    recorded.steps((1, 0.5), (2, 0.25), (3, 0.2))
    recorded.begin(2)
    recorded.receives("resumed", step=1)
    recorded.steps((2, 0.3))
    recorded.begin(3)
    recorded.receives("resumed", step=3)
    recorded.steps((3, None), (4, 0.1))
    assert recorded.curve() == [(1, 0.5), (2, 0.3), (3, None), (4, 0.1)]


def test_a_loss_that_arrives_after_the_report_of_the_successor_is_recorded(recorded: Recorded) -> None:
    """The agent of the lost rank 0 sends what it could not send before, once: the step is not one that was computed twice."""
    recorded.steps((1, 0.5))
    recorded.begin(2)
    recorded.receives("resumed", step=2)
    recorded.steps((2, None), (3, 0.125))
    assert recorded.curve() == [(1, 0.5), (2, None), (3, 0.125)]
    recorded.receives("replay", events=[{"event": "steps", "generation": 1, "at": 2.0, "steps": [[2, 1.0, 0.1, 0.25]]}])
    assert recorded.curve() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert recorded.twice() == 0


def test_a_step_that_is_computed_again_replaces_the_first(recorded: Recorded) -> None:
    """After a rollback the newer loss is the job's."""
    recorded.steps((1, 0.5), (2, 0.25))
    recorded.begin(2)
    recorded.receives("resumed", step=1)
    recorded.steps((2, 0.2))
    assert recorded.curve() == [(1, 0.5), (2, 0.2)]
    assert recorded.twice() == 1


def test_replayed_events_add_nothing_when_a_controller_reattaches(recorded: Recorded) -> None:
    """Agents replay events of past generations too."""
    recorded.steps((1, 0.5), (2, 0.25))
    recorded.begin(3)
    recorded.handlers.remember(2, {1: 0, 2: 2})
    recorded.receives("steps", 1, steps=[[1, 1.0, 0.1, 0.5], [2, 1.0, 0.1, 0.25]])
    recorded.receives("steps", 2, steps=[[2, 1.0, 0.1, None], [3, 1.0, 0.1, 0.125]])
    assert recorded.curve() == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_events_that_a_killed_agent_did_not_deliver_come_from_the_next_one(recorded: Recorded) -> None:
    """Of any generation, and each step once."""
    recorded.steps((1, 1.0), (2, 2.0))
    first = {"event": "steps", "generation": 1, "at": 2.0, "steps": [[step, 1.0, 0.1, float(step)] for step in (1, 2, 3)]}
    saved = {"event": "saved", "generation": 1, "rank": 0, "at": 2.5, "step": 3, "path": "c/3", "seconds": 0.1, "size": 9}
    recorded.receives("replay", events=[first, saved])
    assert recorded.curve() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [one.step for one in queries.checkpoints(recorded.history, recorded.job.id)] == [3]
    recorded.begin(2)
    late = {**first, "steps": [[step, 1.0, 0.1, float(step)] for step in (3, 4)]}
    recorded.receives("replay", events=[late, {**first, "generation": 3}, {"event": "steps"}])
    assert recorded.curve() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert recorded.twice() == 0


def test_replicas_that_are_behind_on_many_nodes_are_one_event(recorded: Recorded) -> None:
    """A moment after the first, with the nodes; later ones are recorded separately."""
    for node in ("b", "a", "b"):
        recorded.receives("storage-error", node=node, kind="replica-lag", path=f"/memory/{node}", why="10 snapshots were left out", step=30)
    for now in (100.0, 100.0 + GATHERED / 2):
        recorded.handlers.poll(now)
        assert recorded.job_events == []
    recorded.handlers.poll(100.0 + GATHERED)
    recorded.handlers.poll(200.0)
    (record_event,) = recorded.job_events
    assert mentions(record_event, "a, b", 10)
    recorded.receives("storage-error", node="a", kind="checkpoint-backlog", path="/ckpt/3", why="late", step=30)
    assert len(recorded.job_events) == 2, "whatever else is wrong is recorded at once"


def test_a_problem_with_a_checkpoint_is_recorded_once_by_all_controllers(recorded: Recorded) -> None:
    """Agents send the next controller again what the last one may not have written."""
    problem: dict[str, Any] = {"node": "a", "kind": "checkpoint-backlog", "why": "late", "step": 30}
    recorded.receives("storage-error", path="/ckpt/30", **problem)
    assert recorded.recorder.flush(60.0)
    rows = queries.checkpoints(recorded.history, recorded.job.id)
    assert [one.problem for one in rows] == ["checkpoint-backlog"]
    recorded.handlers._storage_errors.clear()  # as in another process
    recorded.handlers.remember(0, {}, rows)
    recorded.receives("storage-error", path="/ckpt/30", **problem)
    recorded.receives("storage-error", path="/ckpt/40", **problem)
    assert recorded.recorder.flush(60.0)
    assert [one.path for one in queries.checkpoints(recorded.history, recorded.job.id)] == ["/ckpt/30", "/ckpt/40"]
    assert len(recorded.job_events) == 2


@pytest.mark.parametrize(("kind", "lines"), [("local", 1), ("ssh", 2)])
def test_the_nodes_of_one_machine_cause_one_event(recorded: Recorded, kind: str, lines: int) -> None:
    """Both report the same load: every fault is recorded, one is reported; two machines have a line each."""
    recorded.handlers.cluster_kind = kind
    for number, node in enumerate(MEMBERSHIP):
        facts: dict[str, Any] = {
            "kind": "host-overloaded",
            "part": "processors",
            "quote": "load 9 on 2 processors",
            "source": f"host check on {node}",
        }
        recorded.receives("node.fault", node=node, seen_at=float(number), **facts)
    assert recorded.recorder.flush(60.0)
    assert [one.node for one in queries.faults(recorded.history, recorded.job.id)] == ["a", "b"]
    assert {node for _, node, _ in recorded.run.stragglers._watched} == {"a", "b"}, "what it costs is watched on both"
    where = [line.partition(":")[0] for line in recorded.job_events]
    assert where == (["a, b (one machine)"] if lines == 1 else ["a", "b"])


@pytest.mark.parametrize(("cluster", "at", "lines"), [("c", 100.0 + REPEATED, 0), ("c", 101.0 + REPEATED, 1), ("d", 101.0, 1)])
def test_a_busy_machine_is_reported_by_the_first_job_only(recorded: Recorded, cluster: str, at: float, lines: int) -> None:
    """A user who repeats a script need not read it each time; another cluster, or a quarter of an hour, makes it news again."""
    recorded.recorder.add(models.Job(id="before", name="b", spec={}, cluster={"name": "c"}, directory="/b", at=0.0))
    recorded.recorder.add(a_fault("before", kind="host-overloaded", at=100.0))
    assert recorded.recorder.flush(60.0)
    recorded.handlers.log.cluster = cluster
    recorded.receives("node.fault", seen_at=at, kind="host-overloaded", part="processors", quote="load 9", source="host check")
    assert len(recorded.job_events) == lines


def test_why_conditions_are_not_read_is_recorded_once_for_all_nodes(recorded: Recorded) -> None:
    """A missing rule is missing on a thousand nodes; another reason is another line."""
    for node in MEMBERSHIP:
        recorded.receives("node.conditions-unreadable", node=node, why="forbidden (403)")
    recorded.receives("node.conditions-unreadable", node="b", why="refused (401)")
    first, second = recorded.job_events
    assert mentions(first, "a", "403")
    assert mentions(second, "b", "401")
    assert not recorded.run.generations.state.node_faults


@pytest.mark.parametrize(
    ("source", "began", "acts"), [("kernel log", 50.0, True), ("node conditions", 101.0, True), ("node conditions", 50.0, False)]
)
def test_a_condition_from_before_a_process_was_started_does_not_end_it(recorded: Recorded, source: str, began: float, acts: bool) -> None:  # noqa: FBT001
    """It may be a minute late, and the GPU have been reset meanwhile; it is recorded, and counts when something else fails."""
    recorded.receives("worker.started", at=100.0)
    facts: dict[str, Any] = {"part": "GPU 0000:18:00.0", "quote": "Xid (PCI:0000:18:00.0): 79, GPU has fallen off the bus", "on": [0]}
    recorded.receives("node.fault", kind="gpu-off-bus", source=f"{source} on a", seen_at=began, **facts)
    state = recorded.run.generations.state
    assert [one.kind for one in state.unusable] == ["gpu-off-bus"] * acts
    assert [one.kind for one in state.node_faults] == ["gpu-off-bus"]
