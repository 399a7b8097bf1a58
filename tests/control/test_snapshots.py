"""From the ranks' reports about their snapshots to the row in the history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.agents.events import WorkerRegrouped
from holdfast.control.checkpoints.snapshot_stats import SnapshotStats, regroup_facts, restart_facts, row_of, snapshot_age
from holdfast.control.state.generation import GenerationState, RankState
from holdfast.control.supervisor import event_table
from holdfast.history import History, Recorder, queries

COST: dict[str, Any] = {"copied": 2.0, "overlapped": 1.5, "paused": 0.2, "prepared": 0.1, "slowed": 0.3, "trained": 30.0}
BEAT = {"age": 0.0, "managed": True, "section": None, "section_limit": None, "process": "S", "wait": "", "output_age": None}


def beat(at_step: int | None, replica: int | None = None, **snapshot: Any) -> dict[str, Any]:
    """Return an agent's heartbeat of one worker."""
    return {**BEAT, "step": at_step, "replica": replica, "snapshot": snapshot}


def send(board: GenerationState, now: float, ranks: dict[int, dict[str, Any]]) -> GenerationState:
    """Change the state by the heartbeats of its ranks, from the node of each."""
    for node, here in board.membership.items():
        own = {str(rank): one for rank, one in ranks.items() if rank in here}
        event_table.change_state(
            board, node, event_table.parse({"event": "heartbeats", "generation": board.generation, "at": now, "ranks": own}), now
        )
    return board


@pytest.fixture
def board() -> GenerationState:
    """Return the state of a generation of two ranks without events."""
    return GenerationState(3, {"a": [0], "b": [1]})


@pytest.fixture
def recorder(history: History, tmp_path: Path) -> Iterator[Recorder]:
    """Return a recorder."""
    recorder = Recorder(history, tmp_path / "outbox_path")
    yield recorder
    recorder.close()


def test_the_newest_snapshot_is_the_one_that_all_ranks_have(board: GenerationState) -> None:
    """As long as one of them has none, there is none; its staleness is that of the rank which is furthest behind."""
    assert row_of(board, "job", 1.0, {}) is None
    send(board, 1.0, {0: beat(11, 10, step=10, age=0.2, every=1, size=100, **COST), 1: beat(11, size=0)})
    row = row_of(board, "job", 1.0, {})
    assert row is not None
    assert (row.step, row.age_steps, row.age_s, row.replica_step, row.interval_steps) == (None, None, None, None, 1)
    send(board, 2.0, {0: beat(12, 10, step=11, age=0.2, every=1, size=100, **COST), 1: beat(11, 9, step=9, age=0.7, size=50, **COST)})
    row = row_of(board, "job", 9.0, {1: 4, 2: 1})
    assert row is not None
    assert (row.generation, row.at, row.step, row.age_steps, row.age_s, row.replica_step) == (3, 2.0, 9, 2, 0.7, 9)
    assert (row.size, row.copied_s, row.overlapped) == (150, 4.0, 0.75)
    assert row.cost == pytest.approx(0.01)
    assert row.ages == {"1": 4, "2": 1}


def test_an_old_report_of_a_lost_rank_adds_no_staleness(board: GenerationState) -> None:
    """Its last report is a few steps old; how far it was behind itself then is what counts."""
    send(board, 1.0, {0: beat(5, step=4, age=0.1), 1: beat(5, step=4, age=0.1)})
    send(board, 2.0, {0: beat(9, step=8, age=0.1)})
    assert snapshot_age(board) == 1


def test_the_reason_why_ranks_take_no_snapshots_is_kept(board: GenerationState) -> None:
    """As the ranks report it."""
    send(board, 1.0, {0: beat(5, why="no optimizer"), 1: beat(5, why="no optimizer")})
    row = row_of(board, "job", 1.0, {})
    assert row is not None
    assert (row.step, row.reason, row.overlapped, row.cost) == (None, "no optimizer", None, None)


def test_the_history_has_one_row_a_generation_with_the_newest_report(board: GenerationState, history: History, recorder: Recorder) -> None:
    """Staleness is counted while the job trains, and the next controller continues the count."""
    keeps = SnapshotStats(recorder, "job")
    keeps.poll(board, 0.0, training=True)
    for step in (7, 8, 9):
        send(board, float(step), {rank: beat(step, step=step - 1, age=0.1, **COST) for rank in (0, 1)})
        keeps.poll(board, float(step), training=step < 9)
    assert recorder.flush(60)
    (row,) = queries.snapshots(history, "job")
    assert (row.generation, row.at, row.step, row.age_steps, row.ages) == (3, 9.0, 8, 1, {"1": 2})
    later = SnapshotStats(recorder, "job")
    later.reattach(row)
    send(board, 12.0, {rank: beat(12, step=9, age=0.4) for rank in (0, 1)})
    later.poll(board, 12.0, training=True)
    following = send(GenerationState(4, {"a": [0, 1]}), 13.0, {rank: beat(13, step=12, age=0.1) for rank in (0, 1)})
    later.poll(following, 13.0, training=True)
    assert recorder.flush(60)
    assert [(one.generation, one.step, one.ages) for one in queries.snapshots(history, "job")] == [
        (3, 9, {"1": 2, "3": 1}),
        (4, 12, {"1": 1}),
    ]
    newest = queries.newest_snapshots(history, "job")
    assert newest is not None
    assert newest.generation == 4


def test_an_agent_of_an_older_version_reports_no_snapshots(board: GenerationState) -> None:
    """Its heartbeats have no such fields."""
    send(board, 1.0, {rank: {**BEAT, "step": 5} for rank in (0, 1)})
    assert snapshot_age(board) is None
    assert row_of(board, "job", 1.0, {}) is None


def test_the_number_of_ranks_that_resumed_from_a_replica_is_recorded() -> None:
    """After a restart, and after an in-process recovery."""

    def view(rank: int, *, path: str | None = None, replica: bool = False) -> RankState:
        return RankState(rank=rank, node="a", resumed=7, resumed_from=path, resumed_replica=replica)

    assert restart_facts([view(0), view(1, replica=True)]) == {"source": "memory", "replicas": 1}
    assert restart_facts([view(0, path="/c/step-7"), view(1, path="/c/step-7")]) == {"source": "checkpoint", "replicas": 0}
    assert restart_facts([RankState(rank=0, node="a", resumed=0)]) is None
    facts = regroup_facts(
        {rank: WorkerRegrouped(event="worker.regrouped", generation=2, rank=rank, source="memory", replica=rank == 0) for rank in (0, 1)},
        {},
    )
    assert facts is not None
    assert (facts["source"], facts["replicas"]) == ("memory", 1)
