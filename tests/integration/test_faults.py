"""Every fault of this round, injected into a real job under a real flow: what it is called, what is decided, and how the job ends."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from holdfast.history import queries
from holdfast.host.process import state_of
from tests.integration.stage import ENDLESS, Play, Stage
from tests.mentions import mentions
from tests.waiting import wait_until

TWO = {"nnodes": 2, "nproc_per_node": 1}


def is_over(play: Play, number: int) -> bool:
    """Return whether the incident with that *number* is over: before, there may be no process to send a signal to."""
    return play.saw(number) and bool(play.incidents()[number - 1].outcome)


def test_a_worker_killed_by_any_signal_is_named_and_restarted_in_place(stage: Stage) -> None:
    """Each signal has its own kind, and costs a restart on the same nodes."""
    play = stage.play("signals", args=ENDLESS, **TWO, max_restarts_in_place=9, max_recoveries=9)
    for turn, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR1), 1):
        play.chaos.at_step(15 * turn, partial(play.chaos.signal, 1, number))
        wait_until(partial(is_over, play, turn), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert play.kinds() == ["worker-sigkill", "worker-sigsegv", "worker-sigterm", "worker-sigusr1"]
    assert {one.action for one in play.incidents()} == {"restart-workers"}
    assert all(one.outcome == "recovered" and one.steps_lost is not None for one in play.incidents())
    steps = [step.step for step in queries.curve(stage.history, play.job.id)]
    assert steps == list(range(1, len(steps) + 1))


ONE_AFTER_THE_OTHER = """
if generation == 1 and step == 4:
    line.section('evaluation', 60.0, begin=True)
    time.sleep(4)
    line.section('evaluation', 60.0, begin=False)
if generation == 1 and rank == 0 and step == 8:
    raise ValueError('a passing cloud')
if generation == 1 and step == 9 or generation == 2 and step == 14 + (rank == 0):
    time.sleep(3600)
"""


def test_a_section_an_exception_a_hang_and_a_stopped_rank_differ(stage: Stage) -> None:
    """One job goes through them: the section costs nothing, each of the others one restart."""
    play = stage.play("apart", args=[*ENDLESS, "--each", ONE_AFTER_THE_OTHER], **TWO, timeouts={"hang": "2s"})
    play.steps_to(1)
    wait_until(partial(is_over, play, 2), seconds=60, explain=play.log)
    play.chaos.at_step(18, lambda: play.chaos.stop(0))
    wait_until(partial(is_over, play, 3), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert play.kinds() == ["worker-exception", "job-hang", "worker-stopped"], "a section longer than the hang limit is no hang"

    first, second, *_ = queries.generations(stage.history, play.job.id)
    assert list(first.ranks) == list(reversed(list(second.ranks))), (
        "so a failure that follows the step differs from one that stays with its node"
    )
    fault = next(one for one in queries.faults(stage.history, play.job.id) if one.root)
    assert "a passing cloud" in fault.evidence["quote"]
    assert "Traceback" in fault.evidence["detail"]
    hang = play.incidents()[1]
    assert hang.target.startswith("rank 1 on"), "the rank furthest behind"
    assert "limit 2.0 s" in hang.reason


@pytest.mark.long
def test_the_same_exception_at_the_same_step_on_another_node_is_the_users_error(stage: Stage) -> None:
    """The job stops after one retry, names the script and shows the traceback; no node is blamed."""
    play = stage.play("broken", args=["--steps", "20", "--each", "if rank == 1 and step == 5: raise KeyError('bad batch')"], **TWO)
    assert play.ends() == 1
    assert play.kinds() == ["user-error"]
    assert len(queries.generations(stage.history, play.job.id)) == 2
    assert play.incidents()[-1].outcome == "failed"
    assert mentions(play.reason(), "not a node")
    assert any("KeyError: 'bad batch'" in one.evidence["detail"] for one in queries.faults(stage.history, play.job.id))


@pytest.mark.long
def test_a_script_that_fails_on_all_nodes_at_once_is_stopped_without_a_retry(stage: Stage) -> None:
    """An import error on every rank needs no second look."""
    play = stage.play("typo", args=["--first", "import no_such_module"], **TWO)
    assert play.ends() == 1
    assert play.kinds() == ["user-error"]
    assert len(queries.generations(stage.history, play.job.id)) == 1
    assert "no_such_module" in play.reason()


@pytest.mark.long
def test_a_rank_that_goes_on_within_the_grace_is_no_fault(stage: Stage) -> None:
    """A debugger that stops a rank for a moment costs nothing."""
    play = stage.play("debugger", args=ENDLESS, **TWO, timeouts={"stopped_process": "60s", "hang_min": "60s"})
    play.chaos.at_step(5, lambda: play.chaos.stop(0))
    wait_until(lambda: state_of(play.pids()[0]) == "T", seconds=60)
    play.chaos.signal(0, signal.SIGCONT)
    play.steps_to(play.chaos.step() + 5)
    assert play.finishes() == 0, play.log()
    assert play.kinds() == []


def test_a_killed_agent_is_replaced_on_its_own_node_and_a_lost_node_by_the_spare(stage: Stage) -> None:
    """A node that answers keeps its ranks, whose workers had died with the agent; rank 0 and its node are nothing special."""
    play = stage.play("spare", args=ENDLESS, **(TWO | {"spare_nodes": 1}))
    play.chaos.at_step(8, lambda: play.chaos.kill_agent("node-1"))
    wait_until(partial(is_over, play, 1), seconds=60, explain=play.log)
    assert set(queries.generations(stage.history, play.job.id)[-1].ranks) == {"node-0", "node-1"}
    play.chaos.at_step(25, lambda: play.chaos.power_off(0))
    wait_until(partial(is_over, play, 2), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert [(one.kind, one.action) for one in play.incidents()] == [("agent-lost", "restart-workers"), ("node-lost", "replace-node")]
    assert list(queries.generations(stage.history, play.job.id)[-1].ranks) == ["node-2", "node-1"]
    assert queries.node_statuses(stage.history, "stage")["node-0"].status == "lost"


def test_without_a_spare_the_job_goes_on_with_what_is_left(stage: Stage) -> None:
    """A job that allows fewer nodes shrinks."""
    play = stage.play("shrink-restart", args=ENDLESS, nnodes="2:3", nproc_per_node=1)
    play.chaos.at_step(8, lambda: play.chaos.power_off(2))
    wait_until(partial(is_over, play, 1), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert [(one.kind, one.action) for one in play.incidents()] == [("node-lost", "shrink-restart")]
    assert queries.generations(stage.history, play.job.id)[-1].world_size == 2


@pytest.mark.long
def test_below_its_least_width_the_job_waits_until_a_node_is_back(stage: Stage) -> None:
    """Capacity that comes back is taken within seconds; so is a node that the job had all the time, and that was off meanwhile."""
    play = stage.play("waits", args=ENDLESS, nnodes=3, nproc_per_node=1)
    _, node = play.chaos.at_step(8, lambda: play.chaos.power_off(1))
    play.reaches("WAITING")
    stage.nodes.power_off("node-2")
    wait_until(
        lambda: any("node-2 was lost" in one.text for one in queries.job_events(stage.history, play.job.id)), seconds=60, explain=play.log
    )
    for one in (node, "node-2"):
        play.chaos.power_on(one)
    wait_until(partial(is_over, play, 1), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert [(one.action, one.outcome) for one in play.incidents()] == [("wait-for-capacity", "recovered")]


@pytest.mark.long
def test_a_job_that_waits_too_long_fails_with_the_reason(stage: Stage) -> None:
    """The reason says what was tried."""
    timeouts = {"recovery": {"wait_for_capacity": "1s"}}
    play = stage.play("waits-too-long", args=ENDLESS, nnodes=3, nproc_per_node=1, timeouts=timeouts)
    play.chaos.at_step(8, lambda: play.chaos.power_off(1))
    assert play.ends() == 1, play.log()
    assert mentions(play.reason(), "no recovery action")
    assert "wait-for-capacity" in play.reason()


@pytest.mark.long
def test_a_job_that_never_steps_is_restarted_then_fails(stage: Stage) -> None:
    """Three recoveries without a step are enough."""
    play = stage.play(
        "never-steps",
        args=["--first", "line.mark('group', 0.0); time.sleep(3600)"],
        **TWO,
        timeouts={"startup": "1s", "recovery": {"restart_workers": "2s", "replace_node": "2s", "shrink_restart": "2s"}},
        progress="steps",
    )
    assert play.ends() == 1, play.log()
    assert play.kinds()[0] == "job-never-stepped"
    assert play.incidents()[-1].outcome == "failed"


@pytest.mark.long
def test_a_fault_in_the_middle_of_a_recovery_is_part_of_it(stage: Stage) -> None:
    """A worker that dies again while the job resumes costs another attempt of the same incident."""
    first = "if generation == 2 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    play = stage.play("again", args=[*ENDLESS, "--first", first], **TWO)
    play.chaos.at_step(8, lambda: play.chaos.kill(0))
    wait_until(partial(is_over, play, 1), seconds=60, explain=play.log)
    assert play.finishes() == 0, play.log()
    assert len(play.incidents()) == 1
    assert len(queries.decisions(stage.history, incident_id=play.incidents()[0].id)) == 2
    steps = [step.step for step in queries.curve(stage.history, play.job.id)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.long
def test_a_script_that_always_dies_fails_within_its_budget(stage: Stage) -> None:
    """A broken script never loops."""
    play = stage.play("loops", args=["--first", "os.kill(os.getpid(), signal.SIGABRT)"], **TWO)
    assert play.ends() == 1, play.log()
    assert len(queries.generations(stage.history, play.job.id)) <= 5


@pytest.mark.long
def test_a_script_that_knows_nothing_of_holdfast_runs_and_is_restarted(stage: Stage, tmp_path: Path) -> None:
    """It resumes in its own way; binary output harms nobody."""
    kept = tmp_path / "runs"
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        f"kept = pathlib.Path({str(kept)!r} + os.environ['RANK'])\n"
        "sys.stdout.buffer.write(bytes(range(256)) * 40)\n"
        "first = not kept.exists()\n"
        "kept.write_text(os.environ['MASTER_PORT'])\n"
        "time.sleep(1)\n"
        "if first and os.environ['RANK'] == '1': os._exit(7)\n"
    )
    play = stage.play("plain", script=str(script), **TWO)
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-exit-code"]


@pytest.mark.long
def test_a_command_that_cannot_be_started_is_named_and_fails_the_job(stage: Stage) -> None:
    """The reason has the system's own words."""
    play = stage.play("nothing", command=["/no/such/program"], **TWO)
    assert play.ends() == 1, play.log()
    assert "No such file" in play.reason()


@pytest.mark.long
def test_more_nodes_than_there_are_is_refused_with_the_cure(stage: Stage) -> None:
    """Nothing is started, nothing is left."""
    play = stage.play("many", nnodes=9, nproc_per_node=1)
    assert play.ends() == 1
    assert mentions(play.reason(), "9 nodes", "cluster 'stage'", "3 free")


@pytest.mark.long
def test_a_stop_ends_the_workers_gently(stage: Stage) -> None:
    """A person's request is carried out within the grace, and the state is CANCELLED."""
    first = "signal.signal(signal.SIGTERM, lambda *_: (print('saved before leaving', flush=True), sys.exit(0)))"
    play = stage.play("stops", args=["--steps", "2000", "--first", first], **TWO)
    play.steps_to(5)
    play.stops()
    assert "saved before leaving" in play.log()


@pytest.mark.long
def test_a_script_that_exits_0_at_once_is_completed_with_a_remark(stage: Stage, tmp_path: Path) -> None:
    """It may be all there was to do; if not, the remark says where to look."""
    script = tmp_path / "nothing.py"
    script.write_text("print('nothing to do')")
    play = stage.play("at-once", script=str(script), **TWO)
    assert play.ends() == 0, play.log()
    job_events = [remark.text for remark in queries.job_events(stage.history, play.job.id)]
    assert any("exited with status 0" in text and "jobs/at-once/logs" in text for text in job_events)
