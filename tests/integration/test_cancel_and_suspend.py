"""Cancel, suspend and resume a job in Prefect, whichever worker is alive: a real server, real workers, and the states that the UI sets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.control.supervisor.detach import SIGTERM
from holdfast.history import History, models, queries
from holdfast.host.ports import free_port
from holdfast.testing.chaos import Chaos
from holdfast.testing.orphans import leftovers
from tests.integration.conftest import START_SECONDS, PrefectServer, answers
from tests.integration.flow_server import Flows
from tests.integration.prefect_api import ask
from tests.integration.stage import PACED, Stage, stop_without_lock
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
POOL = "desk"
SECONDS = 90.0


@dataclass
class Desk:
    """What a person at the Prefect UI has before them: a server, a worker that may die, and a history to look into."""

    server: PrefectServer
    place: Path
    history: History
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: list[LocalNodes] = field(default_factory=list)

    def starts_a_worker(self) -> None:
        """Start a worker on the pool."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
        environment = self.server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONPATH": str(ROOT)}
        begin = len(self.log())
        with (self.place / "worker.log").open("ab") as out:
            self.workers.append(
                subprocess.Popen(command, cwd=self.place, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )
        wait_until(lambda: "started!" in self.log()[begin:], seconds=SECONDS, explain=self.log)

    def flow_processes(self) -> list[str]:
        """Return the processes that run flows for this desk's workers, living or dead."""
        return [line for line in leftovers(self.server.home) if "prefect.engine" in line]

    def kills_the_worker(self) -> None:
        """End the worker by SIGKILL; the processes of its flow runs live on."""
        self.workers[-1].kill()
        self.workers[-1].wait()

    def log(self) -> str:
        """Return what workers and flows wrote."""
        path = self.place / "worker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def submits(self, name: str, steps: int = 100_000) -> Run:
        """Start a job from its deployment, as the UI does; wait until it trains."""
        place = self.place / name
        self.nodes.append(LocalNodes(name, place, 2))
        job = {"name": name, "script": str(PACED), "workdir": str(self.place), "args": ["--steps", str(steps)], "nnodes": 2}
        cluster = {"kind": "local", "name": name, "nodes": 2, "directory": str(place)}
        given = {"parameters": {"job": job, "cluster": cluster}, "idempotency_key": str(uuid4())}  # one run, however often it is sent
        made = self.asks(f"deployments/{self.deployment}/create_flow_run", **given)
        run = Run(self, name, made["id"], self.nodes[-1])
        run.trains()
        return run

    @property
    def deployment(self) -> str:
        """Return the id of the deployment on the pool."""
        (found,) = self.asks("deployments/filter", deployments={"name": {"any_": ["desk"]}})
        return str(found["id"])

    def asks(self, path: str, **body: Any) -> Any:
        """Return the API's answer."""
        return ask(f"{self.server.url}/{path}", {**body})

    def close(self) -> None:
        """Wait until no process of a flow run talks to the server any more; end the workers, and all that the jobs left."""
        wait_until(lambda: not self.flow_processes(), seconds=SECONDS, explain=lambda: f"{self.flow_processes()}\n{self.log()}")
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for nodes in self.nodes:
            for node in nodes.names():
                nodes.clear(node)
        self.history.close()


@dataclass
class Run:
    """A flow run, and the job that it is."""

    desk: Desk
    name: str
    id: str
    nodes: LocalNodes

    @property
    def state(self) -> dict[str, Any]:
        """Return the state of the flow run."""
        (run,) = self.desk.asks("flow_runs/filter", flow_runs={"id": {"any_": [self.id]}})
        found: dict[str, Any] = run["state"]
        return found

    def is_set(self, kind: str, name: str, **details: Any) -> None:
        """Have a person set the state of the flow run."""
        self.desk.asks(f"flow_runs/{self.id}/set_state", state={"type": kind, "name": name, "state_details": details})

    def cancels(self) -> None:
        """Press Cancel."""
        self.is_set("CANCELLING", "Cancelling")

    def suspends(self, seconds: float = 600.0) -> None:
        """Press Suspend."""
        until = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        self.is_set("PAUSED", "Suspended", pause_timeout=until, pause_reschedule=True)

    def resumes(self) -> None:
        """Press Resume."""
        self.desk.asks(f"flow_runs/{self.id}/resume")

    def reaches(self, kind: str) -> str:
        """Wait until the flow run is in a state of that type; return its message."""
        wait_until(lambda: self.state["type"] == kind, seconds=SECONDS, explain=lambda: f"{self.state}\n{self.desk.log()}")
        return str(self.state["message"])

    @property
    def job(self) -> models.Job:
        """Return the newest job of the name."""
        return queries.newest_job(self.desk.history, self.name)

    def move(self) -> models.JobTransition | None:
        """Return the newest move of the job; nothing before it has one."""
        rows = queries.jobs(self.desk.history, self.name, limit=1)
        return queries.state_of(self.desk.history, rows[0].id) if rows else None

    def job_reaches(self, state: str) -> models.JobTransition:
        """Wait until the job is in *state*."""
        wait_until(lambda: (move := self.move()) is not None and move.after == state, seconds=SECONDS, explain=self.desk.log)
        move = self.move()
        assert move is not None
        return move

    def trains(self, further: int = 3) -> None:
        """Wait until all ranks are at work, and have made some steps more."""
        self.job_reaches("RUNNING")
        step = self.chaos.step()
        wait_until(lambda: self.chaos.step() >= step + further and self.chaos.complete(), seconds=SECONDS, explain=self.desk.log)

    def leaves_nothing(self) -> None:
        """Wait until no agent of the job is left."""
        wait_until(lambda: all(view.status == "idle" for view in self.nodes.survey()), seconds=SECONDS, explain=self.desk.log)

    @property
    def chaos(self) -> Chaos:
        """Return what breaks the job."""
        return Chaos(self.nodes, self.desk.history, self.name)

    def lines(self, least: int = 0) -> list[str]:
        """Return what the flow run's log says at *least* of that level."""
        records = self.desk.asks("logs/filter", logs={"flow_run_id": {"any_": [self.id]}, "level": {"ge_": least}}, sort="TIMESTAMP_ASC")
        return [str(one["message"]) for one in records]


@pytest.fixture(scope="module")
def shared_desk(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Deploy the flow to a pool of its own."""
    place = tmp_path_factory.mktemp("desk")
    file = place / "prefect.yaml"
    pool = {"name": POOL, "work_queue_name": "default", "job_variables": {}}
    entry = {"name": "desk", "entrypoint": "holdfast.flows.training_job.training_job", "work_pool": pool}
    file.write_text(json.dumps({"name": "desk", "build": None, "push": None, "pull": [], "deployments": [entry]}))
    for words in (["work-pool", "create", POOL, "--type", "process"], ["deploy", "--all", "--prefect-file", str(file)]):
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        subprocess.run(command, cwd=ROOT, env=prefect_server.environment, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    desk = Desk(prefect_server, place, History.open(f"sqlite:///{prefect_server.home / 'history.db'}"))
    yield desk
    desk.close()


@pytest.fixture
def desk(shared_desk: Desk) -> Desk:
    """Give the desk with a worker that lives."""
    if not shared_desk.workers or shared_desk.workers[-1].poll() is not None:
        shared_desk.starts_a_worker()
    return shared_desk


@pytest.mark.long
def test_cancel_works_under_another_worker_than_the_one_that_started_the_run(desk: Desk) -> None:
    """As after every restart of the worker's unit."""
    run = desk.submits("worker-restarted")
    desk.kills_the_worker()
    desk.starts_a_worker()
    run.trains()
    run.cancels()
    run.reaches("CANCELLED")
    run.job_reaches("CANCELLED")
    run.leaves_nothing()


@pytest.mark.long
def test_cancel_under_the_worker_that_started_the_run_is_not_cut_short_by_its_signal(desk: Desk) -> None:
    """SIGTERM and the state arrive in either order; the job is ended as somebody wanted it, and nothing is left."""
    run = desk.submits("own-worker")
    run.cancels()
    run.reaches("CANCELLED")
    assert run.job_reaches("CANCELLED").reason in {"cancelled in Prefect", SIGTERM}
    run.leaves_nothing()


@pytest.mark.long
def test_a_suspended_job_releases_its_nodes_and_the_same_job_continues_when_it_is_resumed(desk: Desk) -> None:
    """Also under another worker: one job, one flow run, a new generation that continues after what was saved."""
    run = desk.submits("suspended")
    before = run.job.id
    run.suspends()
    run.job_reaches("SUSPENDED")
    run.leaves_nothing()
    wait_until(lambda: "resumes from" in str(run.state["message"]), seconds=SECONDS, explain=lambda: str(run.state))
    assert run.state["name"] == "Suspended"
    made = run.chaos.step()
    desk.kills_the_worker()
    desk.starts_a_worker()
    run.resumes()
    run.trains()
    assert run.job.id == before
    first, second = queries.generations(desk.history, before)
    assert (first.number, second.number) == (1, 2)
    assert second.resumed_step is not None
    assert second.resumed_step >= made - 1, "a step that was made before is lost"
    desk.kills_the_worker()
    run.cancels()  # no worker is left, and none is needed: the flow polls its own state
    assert run.reaches("CANCELLED").startswith("cancelled in Prefect")
    assert run.job_reaches("CANCELLED").reason == "cancelled in Prefect"
    run.leaves_nothing()


@pytest.mark.long
def test_a_fault_while_a_job_is_being_suspended_is_not_fatal(desk: Desk) -> None:
    """A rank is killed in the moment of suspending: the job is suspended all the same, and continues."""
    run = desk.submits("faulty")
    process = run.chaos.ranks()[1].pid
    run.chaos.stop(1)  # the job makes no progress, and is to be diagnosed in a moment
    run.suspends()
    with suppress(ProcessLookupError):  # it may have been ended already
        os.kill(process, signal.SIGKILL)
    run.job_reaches("SUSPENDED")
    run.leaves_nothing()
    assert run.state["name"] == "Suspended"
    run.resumes()
    run.trains()
    run.cancels()
    run.reaches("CANCELLED")


@pytest.mark.long
def test_a_suspension_that_runs_out_keeps_the_job_which_the_next_run_continues(desk: Desk) -> None:
    """Prefect fails the flow run, here before its process sees the suspension; nothing of the job is lost with it."""
    run = desk.submits("run-out")
    before = run.job.id
    process = _lease(desk, run).pid
    stop_without_lock(desk.server.home / "history.db", process)
    try:
        run.suspends(seconds=1.0)
        run.reaches("FAILED")
    finally:
        os.kill(process, signal.SIGCONT)
    run.job_reaches("SUSPENDED")
    run.leaves_nothing()
    again = desk.submits("run-out")
    assert again.job.id == before
    assert len(queries.generations(desk.history, before)) == 2
    again.cancels()
    again.reaches("CANCELLED")


@pytest.mark.long
def test_a_controller_that_is_killed_leaves_a_message_that_training_continues(desk: Desk) -> None:
    """The worker finds the process dead; the flow run's state says what that means and what to do, and Retry does it."""
    run = desk.submits("killed")
    lease = _lease(desk, run)
    assert lease.flow_run == run.id
    os.kill(lease.pid, signal.SIGKILL)
    message = run.reaches("CRASHED")
    wait_until(
        lambda: "Training of job 'killed' continues" in str(run.state["message"]),
        seconds=SECONDS,
        explain=lambda: f"{message}\n{desk.log()}",
    )
    assert "Press Retry" in str(run.state["message"])

    def runs_again() -> bool:
        if run.state["type"] == "CRASHED":  # also where the worker, which looks at the exit status last, crashes it once more
            run.is_set("SCHEDULED", "AwaitingRetry")
        return _lease(desk, run).pid != lease.pid

    wait_until(runs_again, seconds=SECONDS, explain=lambda: f"{run.state}\n{desk.log()}")
    run.trains()
    assert len(queries.generations(desk.history, run.job.id)) == 1, "no rank was restarted"
    run.cancels()
    run.reaches("CANCELLED")


def _lease(desk: Desk, run: Run) -> models.Lease:
    with desk.history.session() as session:
        lease = session.get(models.Lease, run.job.id)
        assert lease is not None
        session.expunge(lease)
        return lease


@pytest.mark.long
def test_a_run_without_a_deployment_waits_in_its_process_also_while_the_server_is_restarted(
    tmp_path: Path, prefect_database: Path, flows: Flows
) -> None:
    """As `holdfast run` starts it: paused it releases its nodes, resumed it continues, cancelled it ends; the server dies in between."""
    server = OwnServer(tmp_path / "prefect", prefect_database)
    home = tmp_path / "h"
    stage = Stage(home, server.environment | {"HOLDFAST_HOME": str(home), "PYTHONPATH": str(ROOT)}, flows)
    try:
        server.starts()
        play = stage.play("in-place", args=["--steps", "100000"], nnodes=2, nproc_per_node=1)
        play.steps_to(5)
        until = (datetime.now(UTC) + timedelta(minutes=10)).isoformat()
        details = {"pause_timeout": until, "pause_reschedule": False}
        server.sets("train in-place", "PAUSED", "Paused", **details)
        play.reaches("SUSPENDED", seconds=SECONDS)
        wait_until(lambda: not stage.left(), seconds=SECONDS, explain=play.log)
        server.dies()
        server.starts()
        server.sets("train in-place", "RUNNING", "Running")
        wait_until(lambda: len(queries.generations(stage.history, play.job.id)) == 2, seconds=SECONDS, explain=play.log)
        play.steps_to(play.chaos.step() + 3, seconds=SECONDS)
        server.dies()
        play.steps_to(play.chaos.step() + 3, seconds=SECONDS)
        server.starts()
        server.sets("train in-place", "CANCELLING", "Cancelling")
        assert play.ends() == 3, play.log()
        assert play.reason() == "cancelled in Prefect"
    finally:
        stage.close()
        server.dies()


@dataclass
class OwnServer:
    """A Prefect server that may die, and comes back where it was."""

    place: Path
    template: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.place.mkdir()
        shutil.copy(self.template, self.place)

    @property
    def url(self) -> str:
        """Return the address of the API."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the server, and of who talks to it."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_"))}
        ours = {name: os.environ[name] for name in ("HOLDFAST_MEMSTORE_ROOT", "HOLDFAST_KERNEL_LOG")}
        return bare | ours | {"PREFECT_HOME": str(self.place), "PREFECT_API_URL": self.url, "DO_NOT_TRACK": "1"}

    def starts(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "holdfast.prefect.serve", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.place / "server.log").open("ab") as out:
            self.process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        wait_until(lambda: answers(self.url), seconds=START_SECONDS, explain=(self.place / "server.log").read_text)

    def dies(self) -> None:
        """End it by SIGKILL, with all it started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def sets(self, name: str, kind: str, state: str, **details: Any) -> None:
        """Set the state of the flow run of that name, as the UI does."""
        body = {"flow_runs": {"name": {"any_": [name]}}}
        run = wait_until(lambda: ask(f"{self.url}/flow_runs/filter", body), seconds=SECONDS)[0]["id"]
        request = {"state": {"type": kind, "name": state, "state_details": details}, "force": kind == "RUNNING"}

        def is_set() -> bool:
            with suppress(httpx.HTTPError):
                answer = httpx.post(f"{self.url}/flow_runs/{run}/set_state", json=request, timeout=30)
                return answer.is_success and answer.json()["status"] == "ACCEPT"
            return False

        wait_until(is_set, seconds=SECONDS)
