"""Nodes that the job has to leave: what a rank's exit by SIGTERM says about its node, and that the node's own notice is awaited."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.faults.diagnosis import settled_faults
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.detectors.evidence import NodeLeaving
from holdfast.spec import LocalCluster, TrainingJob

MEMBERSHIP = {"node-0": [0], "node-1": [1]}


@pytest.fixture
def run(holdfast_home: Path, tmp_path: Path) -> Iterator[JobController]:
    """Return the controller of a job of two ranks on two nodes; nothing of it runs."""
    assert holdfast_home.is_dir()
    spec = TrainingJob.model_validate({"name": "left", "command": ["true"], "preflight": False, "nnodes": 2})
    with control_job(spec, LocalCluster(name="c", nodes=2, directory=str(tmp_path))) as run:
        assert isinstance(run, JobController)
        run.generations.enter(1, dict(MEMBERSHIP), rank_table=RankTable.fresh(1, MEMBERSHIP, ("127.0.0.1", 1), every=None), reason="launch")
        run.agents.leaving.update(MEMBERSHIP)  # none is free: no agent is started on one
        yield run


def sends(run: JobController, name: str, **facts: Any) -> None:
    """Have the agent of node 1 send an event."""
    run.agents.event_queue.put(("node-1", {"event": name, "at": time.time(), **facts}))


def rank_exits(run: JobController, *, by: signal.Signals = signal.SIGTERM, code: int | None = None) -> None:
    """Have it report that its rank has exited, without a command."""
    end = {"code": code, "signal": None if code is not None else int(by), "finished": False, "ordered": False, "raised": None}
    facts = {"generation": 1, "rank": 1, "pid": 7, "step": 3, "ended": time.time(), "oom": None, "oom_blind": None, "output": ""}
    sends(run, "worker.exited", **facts, **end)


def node_is_preempted(run: JobController) -> None:
    """Have it report a preemption notice."""
    sends(run, "agent.preemption-notice", seconds=25.0)


def left(run: JobController) -> list[str]:
    """Return the nodes that have to be left now."""
    run.pump(0.0)
    return [one.node for one in run.generations.state.evidence if isinstance(one, NodeLeaving)]


@pytest.mark.parametrize("code", [None, 128 + signal.SIGTERM])
def test_a_rank_that_a_preemption_signal_ends_is_lost_with_its_node(run: JobController, code: int | None) -> None:
    """A batch system signals every process at once, so either event may arrive first."""
    rank_exits(run, code=code)
    assert not left(run)
    node_is_preempted(run)
    assert left(run) == ["node-1"]
    node_is_preempted(run)
    assert left(run) == ["node-1"]


def test_the_notice_of_the_node_may_arrive_first(run: JobController) -> None:
    """The node's notice comes before the rank's exit."""
    node_is_preempted(run)
    assert not left(run)
    rank_exits(run)
    assert left(run) == ["node-1"]


def test_another_exit_says_nothing_about_the_node(run: JobController) -> None:
    """A rank that is killed on a node with a notice is restarted, or moved, as any other."""
    node_is_preempted(run)
    rank_exits(run, by=signal.SIGKILL)
    assert not left(run)


def test_the_notice_of_the_node_is_awaited_before_its_rank_is_diagnosed(run: JobController, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank would be restarted where it will be killed within seconds."""
    rank_exits(run)
    run.pump(0.0)
    assert [fault.kind for fault in run.faults.acting()] == ["worker-sigterm"]
    pump = JobController.pump

    def listens(run: JobController, seconds: float) -> None:
        node_is_preempted(run)
        pump(run, seconds)

    monkeypatch.setattr(JobController, "pump", listens)
    faults, silences = settled_faults(run, [])
    assert {fault.kind for fault in faults} == {"worker-sigterm", "node-leaving"}
    assert not silences
