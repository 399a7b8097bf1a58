"""The flow is not part of the job: it may die, be doubled, or lose its Prefect server, and training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from holdfast.control.channel import AgentChannel, Inbox
from holdfast.history import queries
from holdfast.ports import free_port
from holdfast.process import is_alive, started_at
from tests.integration.conftest import PrefectServer, answers
from tests.integration.stage import Play, Stage
from tests.waiting import wait_until

TWO = {"wanted": 2, "ranks": 1}


def kill_flow(play: Play) -> None:
    """End the flow process by SIGKILL."""
    os.killpg(play.process.pid, signal.SIGKILL)
    play.process.wait()


def test_a_new_flow_adopts_the_job_and_no_worker_restarts(stage: Stage) -> None:
    """After kill -9 of the flow the same workers train on, and the next flow takes them up without losing a step."""
    play = stage.play("adopt", args=["--steps", "300"], nodes=TWO | {"spare": 1})  # enough for the next flow to come in time
    play.steps_to(10)
    before = play.pids()
    kill_flow(play)
    again = stage.again("adopt", play.spec)
    again.steps_to(60)
    assert again.pids() == before
    assert again.ends() == 0, again.log()
    assert again.kinds() == []
    assert len(queries.generations(stage.history, again.job.id)) == 1
    assert [step.step for step in queries.curve(stage.history, again.job.id)] == list(range(1, 301))
    assert any("adopted" in remark.text for remark in queries.remarks(stage.history, again.job.id))


def test_a_fault_while_no_flow_lives_is_found_by_the_next_one(stage: Stage) -> None:
    """It is in the agent's journal."""
    play = stage.play("between", args=["--steps", "200"], nodes=TWO)
    play.steps_to(10)
    pid = wait_until(lambda: play.pids().get(1), seconds=30, explain=play.log)
    assert pid is not None
    kill_flow(play)
    os.kill(pid, signal.SIGKILL)
    again = stage.again("between", play.spec)
    assert again.ends() == 0, again.log()
    assert again.kinds() == ["worker-sigkill"]


def test_a_node_lost_while_no_flow_lives_is_replaced_by_the_next_one(stage: Stage) -> None:
    """The history says where the ranks should be; the node does not answer."""
    play = stage.play("nodeless", args=["--steps", "200"], nodes=TWO | {"spare": 1})
    play.steps_to(10)
    kill_flow(play)
    stage.nodes.power_off("node-1")
    again = stage.again("nodeless", play.spec)
    assert again.ends() == 0, again.log()
    assert [(one.kind, one.rung) for one in again.incidents()] == [("node-lost", "replace-node")]


def test_a_job_that_finished_while_no_flow_lived_is_completed_by_the_next_one(stage: Stage) -> None:
    """Nothing is run twice."""
    play = stage.play("finished", args=["--steps", "30"], nodes=TWO)
    play.steps_to(10)
    workers = [(pid, started_at(pid)) for pid in play.pids().values()]
    kill_flow(play)
    wait_until(lambda: not any(is_alive(*worker) for worker in workers), seconds=30)
    again = stage.again("finished", play.spec)
    assert again.ends() == 0, again.log()
    assert again.kinds() == []
    assert len(queries.generations(stage.history, again.job.id)) == 1


@pytest.mark.parametrize("state", ["DIAGNOSING", "ISOLATING", "RESCHEDULING", "RESUMING"])
def test_a_flow_killed_in_the_middle_of_a_recovery_is_replaced(stage: Stage, state: str) -> None:
    """Whatever the recovery had done so far, the job ends with every step."""
    play = stage.play(f"middle-{state.lower()}", args=["--steps", "60"], nodes=TWO | {"spare": 1})
    play.steps_to(10)
    play.chaos.kill(1)
    seen = set[str]()

    def reached() -> bool:
        seen.update(move.after for move in queries.moves(stage.history, play.job.id))
        return state in seen

    wait_until(reached, seconds=30, explain=play.log)
    kill_flow(play)
    again = stage.again(play.name, play.spec)
    assert again.ends() == 0, again.log()
    assert [step.step for step in queries.curve(stage.history, again.job.id)] == list(range(1, 61))
    assert [one.kind for one in again.incidents()] == ["worker-sigkill"]
    assert all(one.closed_at for one in again.incidents())


def test_ranks_that_a_dead_flow_had_stopped_are_started_again(stage: Stage) -> None:
    """The order to stop came through, the flow's note of the fault did not: the history still says RUNNING."""
    play = stage.play("stranded", args=["--steps", "80"], nodes=TWO)
    play.steps_to(10)
    kill_flow(play)
    for node in ("node-0", "node-1"):
        channel = AgentChannel(node, partial(stage.nodes.connect, node), Inbox(), epoch=1, job=play.job.id)
        channel.order("stop", generation=1, signal=int(signal.SIGKILL), grace=0.0)
        channel.close()
    again = stage.again("stranded", play.spec)
    assert again.ends() == 0, again.log()
    assert again.kinds() == ["recovery-cut-short"]
    assert [step.step for step in queries.curve(stage.history, again.job.id)] == list(range(1, 81))


def test_a_second_flow_is_refused_and_harms_nothing(stage: Stage) -> None:
    """The lease in the history decides; the refusal names the holder and the cure."""
    play = stage.play("double", args=["--steps", "400"], nodes=TWO)
    play.steps_to(5)
    second = stage.again("double", play.spec)
    assert second.ends() == 2
    assert "already running" in second.log()
    assert "holdfast stop double" in second.log()
    assert play.ends() == 0, play.log()
    assert len(queries.generations(stage.history, play.job.id)) == 1


def test_an_agent_without_a_flow_ends_with_its_workers_when_the_lease_runs_out(stage: Stage) -> None:
    """No flow, no training for ever: what nobody steers must not hold nodes."""
    play = stage.play("lease", args=["--steps", "100000"], nodes=TWO, limits={"lease": "2s"})
    play.steps_to(5)
    kill_flow(play)
    wait_until(lambda: not stage.left(), seconds=30, explain=lambda: str(stage.left()))


def test_a_job_goes_on_and_recovers_while_the_prefect_server_is_dead(
    stage: Stage, tmp_path: Path, prefect_server: PrefectServer, prefect_database: Path
) -> None:
    """What Prefect missed stands in the history."""
    shutil.copy(prefect_database, tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = prefect_server.environment | {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(url), seconds=60, explain=(tmp_path / "server.log").read_text)
        stage.environment = stage.environment | {"PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path)}
        play = stage.play("serverless", args=["--steps", "150"], nodes=TWO)
        play.steps_to(10)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    killed = play.chaos.kill(1)
    wait_until(lambda: any(one.closed_at for one in play.incidents()), seconds=30, explain=play.log)
    assert play.ends() == 0, play.log()
    assert play.state() == "COMPLETED"
    assert play.kinds() == ["worker-sigkill"]
    assert killed < time.time()


def test_a_flow_that_had_answered_an_incident_and_died_before_it_could_say_so_is_replaced(stage: Stage) -> None:
    """The incident is closed in the history, the job's state is still that of its recovery: the ranks are at work, and stay so."""
    play = stage.play("unsaid", args=["--steps", "400"], nodes=TWO)
    play.chaos.at_step(5, lambda: play.chaos.kill(1))
    wait_until(lambda: any(one.closed_at for one in play.incidents()), seconds=60, explain=play.log)
    play.reaches("RUNNING")
    kill_flow(play)
    last = queries.state_of(stage.history, play.job.id)
    assert last is not None
    with stage.history.session(immediate=True) as session:
        session.delete(session.merge(last))
        session.commit()
    assert play.state() == "RESUMING"
    before = play.pids()
    again = stage.again("unsaid", play.spec)
    again.reaches("RUNNING")
    assert again.pids() == before
    again.process.send_signal(signal.SIGTERM)
    again.ends()
