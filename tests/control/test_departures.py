"""Nodes that are to be left: what a rank's end by SIGTERM says of its node, and that the flow waits for the node's own word."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detectors.evidence import NodeLeaving
from holdfast.control.faults.confirmation import settled
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.spec import LocalCluster, TrainingJob

MEMBERSHIP = {"node-0": [0], "node-1": [1]}


@pytest.fixture
def run(holdfast_home: Path, tmp_path: Path) -> Iterator[JobController]:
    """Give a flow that steers a job of two ranks on two nodes; nothing of it runs."""
    assert holdfast_home.is_dir()
    spec = TrainingJob.model_validate({"name": "left", "command": ["true"], "preflight": False, "nodes": {"wanted": 2}})
    with control_job(spec, LocalCluster(name="c", nodes=2, directory=str(tmp_path))) as run:
        assert isinstance(run, JobController)
        run.generations.enter(1, dict(MEMBERSHIP), rank_table=RankTable.fresh(1, MEMBERSHIP, ("127.0.0.1", 1), every=None), reason="launch")
        run.agents.leaving.update(MEMBERSHIP)  # none is free: no agent is started on one
        yield run


def says(run: JobController, name: str, **facts: Any) -> None:
    """Have the agent of node 1 say something."""
    run.agents.event_queue.put(("node-1", {"event": name, "at": time.time(), **facts}))


def ended(run: JobController, *, by: signal.Signals = signal.SIGTERM, code: int | None = None) -> None:
    """Have it say that its rank has ended, and nobody had ordered that."""
    end = {"code": code, "signal": None if code is not None else int(by), "finished": False, "ordered": False, "raised": None}
    facts = {"generation": 1, "rank": 1, "pid": 7, "step": 3, "ended": time.time(), "oom": None, "oom_blind": None, "output": ""}
    says(run, "worker.exited", **facts, **end)


def told_to_go(run: JobController) -> None:
    """Have it say that its node will be gone."""
    says(run, "agent.preemption-notice", seconds=25.0)


def left(run: JobController) -> list[str]:
    """Return the nodes whose time is up, as far as is known."""
    run.pump(0.0)
    return [one.node for one in run.generations.state.evidence if isinstance(one, NodeLeaving)]


@pytest.mark.parametrize("code", [None, 128 + signal.SIGTERM])
def test_a_rank_that_ends_by_the_signal_that_its_node_got_goes_with_it_whichever_is_heard_first(
    run: JobController, code: int | None
) -> None:
    """A batch system sends it to all there is at once."""
    ended(run, code=code)
    assert not left(run)
    told_to_go(run)
    assert left(run) == ["node-1"]
    told_to_go(run)
    assert left(run) == ["node-1"]


def test_the_other_way_round(run: JobController) -> None:
    """The node's word comes first."""
    told_to_go(run)
    assert not left(run)
    ended(run)
    assert left(run) == ["node-1"]


def test_another_end_says_nothing_of_the_node(run: JobController) -> None:
    """A rank that is killed on a node that is to go is restarted, or moved, as any other."""
    told_to_go(run)
    ended(run, by=signal.SIGKILL)
    assert not left(run)


def test_the_word_of_the_node_is_waited_for_before_its_rank_is_judged(run: JobController, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rank would be started again where it will be killed within seconds."""
    ended(run)
    run.pump(0.0)
    assert [fault.kind for fault in run.faults.acting()] == ["worker-sigterm"]
    pump = JobController.pump

    def listens(run: JobController, seconds: float) -> None:
        told_to_go(run)
        pump(run, seconds)

    monkeypatch.setattr(JobController, "pump", listens)
    faults, silences = settled(run, [])
    assert {fault.kind for fault in faults} == {"worker-sigterm", "node-leaving"}
    assert not silences
