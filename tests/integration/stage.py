"""A stage for jobs: real flow processes against a real Prefect server, real agents, and chaos at hand."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from holdfast.accounting.bill import bill
from holdfast.accounting.ledger import SECOND
from holdfast.accounting.replay import replay
from holdfast.cli.watch import request_stop
from holdfast.cluster.local import LocalNodes
from holdfast.history import History, Incident, Job, queries
from holdfast.host.process import NODE_MARK, mark_of, marked, state_of
from holdfast.memstore import store_folders
from holdfast.spec.job import is_policy_file
from holdfast.testing.chaos import Chaos
from tests.fresh_history import fresh_history
from tests.integration.flow_server import Flow, Flows, prefect_of
from tests.waiting import wait_until

PACED = Path(__file__).with_name("paced.py")
ENDLESS = ["--steps", "100000"]
"""For jobs that go on until a test has seen what it wants to see, and ends them (`Play.stops`, `Play.finishes`)."""
BOOTED = "Nov 21 09:00:00 n0 kernel: Linux version 6.8.0\n"
"""What a kernel's log has before a test writes to it."""


def stop_without_lock(database: Path, process: int) -> None:
    """Stop *process* by SIGSTOP at a moment when it holds no lock of the history in *database*: with one nobody else could write there."""
    with closing(sqlite3.connect(database, timeout=60, isolation_level=None)) as history:
        history.execute("BEGIN IMMEDIATE")
        os.kill(process, signal.SIGSTOP)
        wait_until(lambda: state_of(process) == "T", seconds=60)
        history.execute("ROLLBACK")


@dataclass
class Play:
    """One job on the stage."""

    name: str
    stage: Stage
    process: subprocess.Popen[bytes] | Flow
    spec: Path

    @property
    def job(self) -> Job:
        """Return the job's newest row."""
        return queries.newest_job(self.stage.history, self.name)

    @property
    def chaos(self) -> Chaos:
        """Return what breaks this job."""
        return Chaos(self.stage.nodes, self.stage.history, self.name)

    def log(self) -> str:
        """Return what the flow and its agents wrote: what a person would read after a failure."""
        logs = [self.spec.with_name("flow.log"), *sorted((self.stage.home / "jobs" / self.name / "logs").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    def state(self) -> str:
        """Return the job's state; empty before it has one."""
        live = queries.jobs(self.stage.history, self.name)
        move = queries.state_of(self.stage.history, live[0].id) if live else None
        return move.after if move else ""

    def reaches(self, state: str, seconds: float = 120.0) -> None:
        """Wait until the job is in *state*."""
        wait_until(lambda: self.state() == state, seconds=seconds, explain=lambda: f"state {self.state()}\n{self.log()}")

    def steps_to(self, step: int, seconds: float = 120.0) -> None:
        """Wait until the job has finished *step*, and all its ranks are at work."""
        wait_until(lambda: self.chaos.step() >= step and self.chaos.complete(), seconds=seconds, explain=self.log)

    def ends(self, seconds: float = 200.0) -> int:
        """Wait for the flow's end; return its exit status. Whatever happened: what is on record of it must hold together."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the flow did not end, state {self.state()}\n{self.log()}") from None
        for job in queries.jobs(self.stage.history, self.name, limit=1):
            self._holds_together(job)
        return status

    def finishes(self) -> int:
        """Have the paced script end by itself some steps from now; return the flow's exit status: no fault can miss a job that waits so."""
        end = self.spec.with_name("last-step")
        beside = end.with_suffix(".new")
        beside.write_text(str(self.chaos.step() + 5))
        beside.replace(end)
        return self.ends()

    def stops(self) -> None:
        """Have the job stopped, as a person does, and see it end so."""
        request_stop(self.stage.history, self.job)
        assert self.ends() == 3, self.log()
        assert self.state() == "CANCELLED", self.log()

    def dies(self) -> None:
        """End the flow by SIGKILL: the job itself goes on."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _holds_together(self, job: Job) -> None:
        """Make the job's decisions again by its own policy, unless that is a file, which may have changed, and settle its accounts."""
        if not is_policy_file(job.spec["policy"]):
            again = replay(self.stage.history, job.spec["policy"], job=job)
            assert (again.differences, again.unreadable) == ([], {}), f"decided otherwise from the case on record\n{self.log()}"
            assert again.same == len(queries.decisions(self.stage.history, job.id))
        found = bill(self.stage.history, job)
        end, moves = found.jobs[0].job.end, queries.transitions(self.stage.history, job.id)
        began = [one.at for one in moves if one.after == "SUSPENDED"]
        over = [one.at for one in moves if one.before == "SUSPENDED"]
        suspended = sum(round(at * SECOND) - round(since * SECOND) for since, at in zip_longest(began, over, fillvalue=end))
        assert found.ledger.sum().wall == round(max(job.at, end) * SECOND) - round(job.at * SECOND) - suspended

    def incidents(self) -> list[Incident]:
        """Return the job's incidents."""
        return queries.incidents(self.stage.history, self.job.id)

    def saw(self, number: int) -> bool:
        """Return whether so many incidents have been seen."""
        return len(self.incidents()) >= number

    def kinds(self) -> list[str]:
        """Return the root kinds of the incidents, in order."""
        return [one.kind for one in self.incidents()]

    def reason(self) -> str:
        """Return why the job is where it is."""
        move = queries.state_of(self.stage.history, self.job.id)
        assert move is not None
        return move.reason

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks."""
        return {rank: placed.pid for rank, placed in self.chaos.ranks().items()}


@dataclass
class Stage:
    """A home, a history, a local cluster, and the jobs that play on them."""

    home: Path
    environment: dict[str, str]
    flows: Flows
    count: int = 3
    domains: dict[str, str] = field(default_factory=dict)
    """Failure domain of nodes; one that is not named fails by itself."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """What else is said of the cluster."""
    plays: list[Play] = field(default_factory=list)

    def __post_init__(self) -> None:
        file = self.home / "history.db"
        self.history = History.open(f"sqlite:///{file}") if file.exists() else fresh_history(file)
        self.nodes = LocalNodes("stage", self.home / "nodes", self.count)

    def widen(self, domains: dict[str, str]) -> None:
        """Have so many nodes as *domains* names, before the first job plays."""
        self.count, self.domains = len(domains), domains
        self.nodes = LocalNodes("stage", self.home / "nodes", self.count, domains)

    def play(self, name: str, **fields: Any) -> Play:
        """Start a flow for the job described by *fields*; the paced script unless they name another."""
        folder = self.home / "jobs" / name
        folder.mkdir(parents=True, exist_ok=True)
        if not {"script", "module", "command"} & fields.keys():
            fields["script"] = str(PACED)
        job = {"name": name, "workdir": str(folder), **fields}
        spec = folder / "spec.json"
        spec.write_text(json.dumps({"job": job, "cluster": self.described()}))
        return self.again(name, spec)

    def described(self) -> dict[str, Any]:
        """Return the cluster as a file of it would."""
        place = {"nodes": self.count, "directory": str(self.home / "nodes"), "failure_domains": self.domains}
        return {"kind": "local", "name": "stage", **place, **self.cluster}

    def again(self, name: str, spec: Path) -> Play:
        """Start a flow for a job that has been described before: as a program where the server of flows has another Prefect in mind."""
        log, forked = spec.with_name("flow.log"), prefect_of(self.environment) == self.flows.prefect
        process = self.flows.start(spec, log, self.environment) if forked else self._program(spec, log)
        play = Play(name, self, process, spec)
        self.plays.append(play)
        return play

    def _program(self, spec: Path, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.flows.training_job", str(spec)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def close(self) -> None:
        """End whatever still plays."""
        for play in self.plays:
            if play.process.poll() is None:
                os.killpg(play.process.pid, signal.SIGKILL)
                play.process.wait()
        for node in self.nodes.names():
            self.nodes.clear(node)
        self.history.close()

    def kept(self) -> list[Path]:
        """Return what the nodes keep in memory."""
        return [place for node in self.nodes.names() for place in store_folders.memstores_of(mark_of(self.nodes.folder(node)))]

    def left(self) -> list[int]:
        """Return the pids of processes that carry the mark of one of the nodes."""
        return [pid for node in self.nodes.names() for pid in marked(NODE_MARK, mark_of(self.nodes.folder(node)))]
