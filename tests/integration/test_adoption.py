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

from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.history import Lease, queries
from holdfast.host.ports import free_port
from holdfast.host.process import is_alive, started_at
from tests.integration.conftest import PrefectServer, answers
from tests.integration.stage import ENDLESS, Play, Stage
from tests.waiting import wait_until

TWO = {"nnodes": 2, "nproc_per_node": 1}


def curve(play: Play) -> list[int]:
    """Return the steps that a job has on record."""
    return [step.step for step in queries.curve(play.stage.history, play.job.id)]


def answered(play: Play, number: int = 1) -> None:
    """Wait until so many incidents are over, and the job trains."""
    wait_until(lambda: sum(bool(one.closed_at) for one in play.incidents()) >= number, seconds=60, explain=play.log)
    play.reaches("RUNNING")


def test_a_new_flow_adopts_the_job_and_no_worker_restarts(stage: Stage) -> None:
    """After kill -9 of the flow the same workers train on, and the next flow takes them up without losing a step."""
    play = stage.play("reattach", args=ENDLESS, **(TWO | {"spare_nodes": 1}))
    play.steps_to(10)
    before = play.pids()
    play.dies()
    again = stage.again("reattach", play.spec)
    wait_until(
        lambda: any("reattached" in one.text for one in queries.job_events(stage.history, again.job.id)), seconds=60, explain=again.log
    )
    again.steps_to(again.chaos.step() + 20)
    assert again.pids() == before
    again.stops()
    assert again.kinds() == []
    assert len(queries.generations(stage.history, again.job.id)) == 1
    assert curve(again) == list(range(1, len(curve(again)) + 1))


@pytest.mark.long
def test_agents_that_remember_more_flows_than_a_restored_history_are_adopted_by_the_first_that_comes(stage: Stage) -> None:
    """The flow takes an epoch above theirs, as the history says that the job is its own: all that it orders is carried out."""
    play = stage.play("restored", args=ENDLESS, **TWO)
    play.steps_to(5)
    before = play.pids()
    play.dies()
    for node, epoch in (("node-0", 8), ("node-1", 9)):
        channel = AgentClient(node, partial(stage.nodes.connect, node), EventQueue(), epoch=epoch, job=play.job.id)
        channel.attach()
        channel.close()
    again = stage.again("restored", play.spec)
    wait_until(lambda: any("as after a restored backup" in one.text for one in queries.job_events(stage.history, again.job.id)), seconds=60)
    again.steps_to(again.chaos.step() + 5)
    assert (again.pids(), again.kinds()) == (before, [])
    with stage.history.session() as session:
        lease = session.get(Lease, play.job.id)
        assert lease is not None
        assert lease.epoch == 10
    again.chaos.kill_agent("node-1")
    answered(again)
    again.stops()
    assert [one.outcome for one in again.incidents()] == ["recovered"]


@pytest.mark.long
def test_a_flow_whose_output_nobody_reads_any_more_goes_on(stage: Stage) -> None:
    """As after the end of the Prefect worker that started it: rich takes that for a wish to end, in each thread with something to say."""
    play = stage.play("unread", args=ENDLESS, **TWO)
    play.steps_to(3)
    play.dies()
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "holdfast.flows.training_job", str(play.spec)]
    environment = stage.environment | {"PREFECT_LOGGING_LEVEL": "INFO"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True)
    again = Play("unread", stage, process, play.spec)
    stage.plays.append(again)
    os.close(writer)
    wait_until(
        lambda: any("reattached" in one.text for one in queries.job_events(stage.history, again.job.id)), seconds=60, explain=again.log
    )
    os.close(reader)
    again.chaos.kill(1)
    answered(again)
    again.steps_to(again.chaos.step() + 5)
    again.stops()
    assert [one.outcome for one in again.incidents()] == ["recovered"]


@pytest.mark.long
def test_a_fault_while_no_flow_lives_is_found_by_the_next_one(stage: Stage) -> None:
    """It is in the agent's journal."""
    play = stage.play("between", args=ENDLESS, **TWO)
    play.steps_to(10)
    pid = wait_until(lambda: play.pids().get(1), seconds=60, explain=play.log)
    assert pid is not None
    play.dies()
    os.kill(pid, signal.SIGKILL)
    again = stage.again("between", play.spec)
    answered(again)
    again.stops()
    assert again.kinds() == ["worker-sigkill"]


@pytest.mark.long
def test_a_node_lost_while_no_flow_lives_is_replaced_by_the_next_one(stage: Stage) -> None:
    """The history says where the ranks should be; the node does not answer."""
    play = stage.play("nodeless", args=ENDLESS, **(TWO | {"spare_nodes": 1}))
    play.steps_to(10)
    play.dies()
    stage.nodes.power_off("node-1")
    again = stage.again("nodeless", play.spec)
    answered(again)
    again.stops()
    assert [(one.kind, one.action) for one in again.incidents()] == [("node-lost", "replace-node")]


@pytest.mark.long
def test_a_job_that_finished_while_no_flow_lived_is_completed_by_the_next_one(stage: Stage) -> None:
    """Nothing is run twice."""
    waits = "while step == 20 and not os.path.exists('gate'): time.sleep(0.05)"
    play = stage.play("finished", args=["--steps", "30", "--each", waits], **TWO)
    play.steps_to(10)
    workers = [(pid, started_at(pid)) for pid in play.pids().values()]
    play.dies()
    (play.spec.parent / "gate").touch()
    wait_until(lambda: not any(is_alive(*worker) for worker in workers), seconds=60)
    again = stage.again("finished", play.spec)
    assert again.ends() == 0, again.log()
    assert again.kinds() == []
    assert len(queries.generations(stage.history, again.job.id)) == 1


@pytest.mark.long
def test_a_flow_killed_in_the_middle_of_a_recovery_is_replaced(stage: Stage) -> None:
    """In each state of it: whatever the recovery had done so far, the job goes on and has every step."""
    play = stage.play(
        "middle", args=ENDLESS, **(TWO | {"spare_nodes": 1}), max_restarts_in_place=9, max_recoveries=9, max_recoveries_without_progress=9
    )
    play.steps_to(10)
    for number, state in enumerate(("DIAGNOSING", "ISOLATING", "RESCHEDULING", "RESUMING"), 1):
        moves = len(queries.transitions(stage.history, play.job.id))
        play.chaos.kill(1)
        wait_until(partial(has_been_in, play, state, moves), seconds=60, explain=play.log)
        play.dies()
        play = stage.again("middle", play.spec)
        answered(play, number)
        play.steps_to(play.chaos.step() + 5)
    play.stops()
    assert curve(play) == list(range(1, len(curve(play)) + 1))
    assert play.kinds() == ["worker-sigkill"] * 4
    assert all(one.closed_at for one in play.incidents())


def has_been_in(play: Play, state: str, seen: int) -> bool:
    """Return whether the job has come to *state* after the moves already *seen*."""
    return any(move.after == state for move in queries.transitions(play.stage.history, play.job.id)[seen:])


@pytest.mark.long
def test_ranks_that_a_dead_flow_had_stopped_are_started_again(stage: Stage) -> None:
    """The order to stop came through, the flow's note of the fault did not: the history still says RUNNING."""
    play = stage.play("stranded", args=ENDLESS, **TWO)
    play.steps_to(10)
    play.dies()
    for node in ("node-0", "node-1"):
        channel = AgentClient(node, partial(stage.nodes.connect, node), EventQueue(), epoch=1, job=play.job.id)
        channel.send_command("stop", generation=1, signal=int(signal.SIGKILL), grace=0.0)
        channel.close()
    again = stage.again("stranded", play.spec)
    answered(again)
    again.steps_to(20)
    again.stops()
    assert again.kinds() == ["recovery-cut-short"]
    assert curve(again) == list(range(1, len(curve(again)) + 1))


@pytest.mark.long
def test_a_second_flow_is_refused_and_harms_nothing(stage: Stage) -> None:
    """The lease in the history decides; the refusal names the holder and the cure."""
    play = stage.play("double", args=ENDLESS, **TWO)
    play.steps_to(5)
    second = stage.again("double", play.spec)
    assert second.ends() == 2
    assert "already running" in second.log()
    assert "holdfast stop double" in second.log()
    play.steps_to(play.chaos.step() + 10)
    play.stops()
    assert play.kinds() == []
    assert len(queries.generations(stage.history, play.job.id)) == 1


@pytest.mark.long
def test_an_agent_without_a_flow_ends_with_its_workers_when_the_lease_runs_out(stage: Stage) -> None:
    """No flow, no training for ever: what no controller runs must not hold nodes."""
    play = stage.play("lease", args=ENDLESS, **TWO, timeouts={"lease": "10s"})
    play.steps_to(5)
    play.dies()
    wait_until(lambda: not stage.left(), seconds=90, explain=lambda: str(stage.left()))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_job_goes_on_and_recovers_while_the_prefect_server_answers_nothing(
    number: signal.Signals, stage: Stage, tmp_path: Path, prefect_server: PrefectServer, prefect_database: Path
) -> None:
    """What Prefect missed stands in the history. A server that is dead refuses connections; one that is stopped keeps them waiting."""
    shutil.copy(prefect_database, tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = prefect_server.environment | {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "holdfast.prefect.serve", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(url), seconds=60, explain=(tmp_path / "server.log").read_text)
        stage.environment = stage.environment | {"PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path)}
        play = stage.play(f"serverless-{number.name.lower()}", args=ENDLESS, **TWO)
        play.steps_to(10)
        os.killpg(server.pid, number)
        killed = play.chaos.kill(1)
        answered(play)
        play.stops()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert play.kinds() == ["worker-sigkill"]
    assert killed < time.time()


@pytest.mark.long
def test_a_flow_that_had_answered_an_incident_and_died_before_it_could_say_so_is_replaced(stage: Stage) -> None:
    """The incident is closed in the history, the job's state is still that of its recovery: the ranks are at work, and stay so."""
    play = stage.play("unsaid", args=ENDLESS, **TWO)
    play.chaos.at_step(5, lambda: play.chaos.kill(1))
    answered(play)
    play.dies()
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
