"""Two controllers for one job, on hosts that share nothing but the history: the second follows when the first dies, stops or is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.errors import NodeLost
from holdfast.history import History, Lease, queries
from holdfast.host.ports import free_port
from holdfast.host.process import state_of
from tests.history.conftest import postgres  # noqa: F401 (a fixture)
from tests.history.postgres_server import PostgresServer
from tests.integration.conftest import PrefectServer
from tests.integration.stage import ENDLESS, Play, Stage, stop_without_lock
from tests.mentions import one_line_mentions
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TWO = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1}


@pytest.fixture
def elsewhere(stage: Stage, tmp_path: Path) -> Stage:
    """Give the same stage as seen from another host: a home of its own."""
    own = {"HOLDFAST_HOME": str(tmp_path), "HOLDFAST_HISTORY": f"sqlite:///{stage.home / 'history.db'}"}
    other = Stage(stage.home, stage.environment | own, stage.flows, plays=stage.plays)
    other.history.close()
    other.history = stage.history
    return other


def stands_by(host: Stage, play: Play) -> Play:
    """Start a standby of *play* on *host*, and see it wait."""
    spec = Path(host.environment["HOLDFAST_HOME"]) / "spec.json"
    spec.write_text(json.dumps({**json.loads(play.spec.read_text()), "standby": True}))
    host.history = play.stage.history
    standby = host.again(play.name, spec)
    wait_until(lambda: "standby.waits" in standby.log(), seconds=60, explain=standby.log)
    return standby


def has_taken_over(play: Play) -> bool:
    """Return whether a standby says that it controls."""
    return any(one.text.startswith("the standby controller on") for one in queries.job_events(play.stage.history, play.job.id))


def pids(play: Play) -> dict[str, int]:
    """Return the processes of the ranks as their agents know them; those that are away have none."""
    found = dict[str, int]()
    for node in play.stage.nodes.names():
        with suppress(NodeLost):
            found |= play.chaos.ask(node)["workers"]
    return found


def test_a_standby_takes_over_from_a_flow_that_dies_with_all_it_had(stage: Stage, elsewhere: Stage) -> None:
    """Nothing of the first host is needed: a rank that is killed later joins those that the first flow had started."""
    play = stage.play("heir", args=ENDLESS, **TWO)
    play.steps_to(5)
    before = pids(play)
    standby = stands_by(elsewhere, play)
    play.dies()
    (play.spec.parent / "token").unlink()
    wait_until(lambda: has_taken_over(play), seconds=60, explain=standby.log)
    assert pids(play) == before
    standby.chaos.kill(1)
    wait_until(lambda: [one for one in standby.incidents() if one.closed_at], seconds=60, explain=standby.log)
    assert [(one.kind, one.outcome) for one in standby.incidents()] == [("worker-sigkill", "recovered")]
    standby.stops()


@pytest.mark.long
def test_a_controller_detaches_from_its_job_and_no_rank_notices(stage: Stage, elsewhere: Stage) -> None:
    """By a request a standby takes over; by the signal, in the middle of a recovery, it leaves the rest of that to the flow to come."""
    play = stage.play("handed", args=ENDLESS, **TWO)
    play.steps_to(5)
    before = pids(play)
    standby = stands_by(elsewhere, play)
    said = handed_over(play)
    assert play.process.wait(60) == 6, play.log()
    wait_until(lambda: has_taken_over(play), seconds=60, explain=standby.log)
    assert one_line_mentions(said, "detached", "'handed'")
    assert any("asked it to" in one.text for one in queries.job_events(stage.history, play.job.id))
    standby.steps_to(standby.chaos.step() + 5)
    assert (pids(play), standby.incidents(), len(queries.generations(stage.history, play.job.id))) == (before, [], 1)

    second = stands_by(stage, play)
    second.process.send_signal(signal.SIGUSR1)
    assert second.process.wait(60) == 6, second.log()
    moves = len(queries.transitions(stage.history, play.job.id))
    standby.chaos.kill(1)
    wait_until(lambda: len(queries.transitions(stage.history, play.job.id)) > moves, seconds=60, explain=standby.log)
    standby.process.send_signal(signal.SIGUSR1)
    assert standby.process.wait(60) == 6, standby.log()
    with stage.history.session() as session:
        lease = session.get(Lease, play.job.id)
        assert lease is not None
        assert lease.expires_at == 0.0, "it was left to lapse, for which a standby on another host would have to wait"
    assert one_line_mentions(handed_over(play), "'handed'", "no controller")
    third = stage.again("handed", play.spec)
    wait_until(lambda: [one for one in third.incidents() if one.closed_at], seconds=60, explain=third.log)
    assert [(one.kind, one.outcome) for one in third.incidents()] == [("worker-sigkill", "recovered")]
    third.stops()


def handed_over(play: Play) -> str:
    """Ask the flow of *play* to detach, as a person does, and return what the command says."""
    words = [sys.executable, "-m", "holdfast", "detach", play.name]
    done = subprocess.run(words, env=play.stage.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + play.log()
    return done.stdout


@pytest.mark.long
def test_a_stopped_controller_sends_no_command_once_a_standby_runs(stage: Stage, elsewhere: Stage) -> None:
    """It wakes in the middle of what it was about to do, and ends: what the standby did stays."""
    play = stage.play("woken", args=ENDLESS, **TWO)
    play.steps_to(5)
    standby = stands_by(elsewhere, play)
    stop_without_lock(stage.home / "history.db", play.process.pid)
    os.kill(play.pids()[1], signal.SIGKILL)
    wait_until(lambda: has_taken_over(play), seconds=60, explain=standby.log)
    wait_until(lambda: [one for one in standby.incidents() if one.closed_at], seconds=60, explain=standby.log)
    standby.reaches("RUNNING")
    after, generations = pids(play), len(queries.generations(stage.history, play.job.id))
    os.kill(play.process.pid, signal.SIGCONT)
    assert play.process.wait(60) == 4, play.log()
    assert "went to" in play.log()
    standby.steps_to(standby.chaos.step() + 10)
    assert (pids(play), len(queries.generations(stage.history, play.job.id))) == (after, generations)
    standby.stops()
    assert standby.kinds() == ["worker-sigkill"]


STANDS_STILL = """\
import os, subprocess, sys
from pathlib import Path
from holdfast.agent.node.directory import AgentDirectory

STOP = '''
import os, signal, sqlite3, sys
history = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
history.execute("BEGIN IMMEDIATE")  # who stands still with a lock of the history lets nobody take over
os.kill(os.getppid(), signal.SIGSTOP)
while open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[0] != "T":
    pass
history.execute("ROLLBACK")
'''

def fence(self, *words, _fence=AgentDirectory.fence):
    home = Path(os.environ["HOLDFAST_HOME"])
    if words and not (home / "stood-still").exists():  # of a job, the first time
        (home / "stood-still").touch()
        subprocess.run([sys.executable, "-I", "-c", STOP, str(home / "history.db")], check=True)
    return _fence(self, *words)

AgentDirectory.fence = fence
"""
"""What a flow imports first: it is stopped between having asked whether it still holds the lease and ending what runs on a node."""


@pytest.mark.long
def test_a_controller_stopped_before_it_fenced_a_node_ends_nothing_of_the_next_one(stage: Stage, elsewhere: Stage, tmp_path: Path) -> None:
    """It had asked and learned that the job was its own; when it goes on, the node knows better, and the new flow's ranks live."""
    (tmp_path / "sitecustomize.py").write_text(STANDS_STILL)
    still = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PREFECT_LOGGING_LEVEL": "INFO"}  # as a program of its own, for Prefect's settings
    stage.environment = stage.environment | still
    play = stage.play("late", args=ENDLESS, **TWO)
    play.steps_to(5)
    standby = stands_by(elsewhere, play)
    play.chaos.kill_agent("node-1")
    wait_until(lambda: state_of(play.process.pid) == "T", seconds=60, explain=play.log)
    wait_until(lambda: [one for one in standby.incidents() if one.closed_at], seconds=60, explain=standby.log)
    standby.reaches("RUNNING")
    standby.steps_to(standby.chaos.step() + 5)
    before, agents = pids(play), [play.chaos.ask(node)["pid"] for node in ("node-0", "node-1")]
    os.kill(play.process.pid, signal.SIGCONT)
    assert play.process.wait(60) == 4, play.log()
    said = (play.spec.parent / "flow.log").read_text()
    assert one_line_mentions(said, "node.superseded", "node=node-1", "epoch=2", "ours=1")
    assert one_line_mentions(said, "lease", "'late'")
    standby.steps_to(standby.chaos.step() + 10)
    assert (pids(play), [play.chaos.ask(node)["pid"] for node in ("node-0", "node-1")]) == (before, agents)
    standby.stops()


@pytest.mark.long
def test_recoveries_go_on_without_the_database_and_are_on_record_later(
    stage: Stage,
    elsewhere: Stage,
    postgres: PostgresServer,  # noqa: F811 (the fixture)
) -> None:
    """Though the flow that answered them is killed before the database is back, and the next one runs on another host."""
    url = postgres.fresh_url()
    stage.environment, elsewhere.environment = ({**one.environment, "HOLDFAST_HISTORY": url} for one in (stage, elsewhere))
    stage.history.close()
    stage.history = History.open(url)
    play = stage.play("outage", args=ENDLESS, **TWO)
    play.steps_to(5)
    standby, job = stands_by(elsewhere, play), play.job
    placed, before = play.chaos.ranks(), pids(play)
    postgres.stop()
    try:
        os.kill(placed[1].pid, signal.SIGKILL)
        wait_until(lambda: len(now := pids(play)) == 2 and now["1"] != before["1"], seconds=60, explain=play.log)
        deposit = [stage.nodes.folder(node) / "outbox.jsonl" for node in stage.nodes.names()]
        wait_until(
            lambda: sum(one.exists() and r"\"outcome\": \"recovered\"" in one.read_text() for one in deposit) == 2,
            seconds=60,
            explain=play.log,
        )
        play.dies()
    finally:
        postgres.start()
    for own in ("token", "history.outbox.jsonl"):
        (play.spec.parent / own).unlink()
    wait_until(lambda: has_taken_over(play), seconds=60, explain=standby.log)
    standby.steps_to(standby.chaos.step() + 10)
    standby.stops()
    assert [(one.kind, one.outcome) for one in queries.incidents(stage.history, job.id)] == [("worker-sigkill", "recovered")]
    curve = [one.step for one in queries.curve(stage.history, job.id)]
    assert curve == list(range(1, len(curve) + 1))


@pytest.mark.long
def test_a_flow_whose_prefect_server_is_away_says_so(stage: Stage) -> None:
    """In a sentence that names the server and the cure; the job, if it runs, is none the worse."""
    stage.environment = stage.environment | {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    play = stage.play("unserved", args=ENDLESS, **TWO)
    assert play.process.wait(60) == 2
    assert one_line_mentions(play.log(), "Connection refused")
    assert "Traceback" not in play.log()


@pytest.mark.long
def test_a_standby_waits_for_a_database_that_is_not_up_yet(
    tmp_path: Path,
    holdfast_home: Path,
    prefect_server: PrefectServer,
    postgres: PostgresServer,  # noqa: F811 (the fixture)
) -> None:
    """As after a power cut: it says so, and goes on once the database is there."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "job.yaml").write_text("name: late\nscript: train.py\ncluster: {nodes: 1}\n")
    environment = {**prefect_server.environment, "HOLDFAST_HOME": str(holdfast_home), "HOLDFAST_HISTORY": postgres.fresh_url()}
    postgres.stop()
    try:
        command = [sys.executable, "-m", "holdfast", "run", "job.yaml", "--standby"]
        said = tmp_path / "said"
        with said.open("w") as out:
            standby = subprocess.Popen(
                command, cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        wait_until(lambda: "The standby controller waits for it" in said.read_text() or standby.poll() is not None, seconds=60)
        assert standby.poll() is None, said.read_text()
    finally:
        postgres.start()
    assert standby.wait(100) == 0, said.read_text()
    assert "'late' COMPLETED" in said.read_text()
