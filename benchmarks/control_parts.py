"""The parts of a control plane on several hosts, as processes that can be killed: PostgreSQL, a Prefect server on it, hosts with workers.

A host is a process group with homes of its own and, where the user is root, a host name of its own (`unshare --uts`): to the lease it is
another machine. The nodes' agents are on this machine, as those of any local cluster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.measuring import ROOT, wait_for
from holdfast.host.ports import free_port
from holdfast.host.process import children_of
from holdfast.prefect.server import QUIET, unreachable_reason
from holdfast.spec import TrainingJob
from holdfast.spec.form import parameters_of
from tests.history.postgres_server import MISSING, PostgresServer, programs

POOL: Final = "holdfast"
DEPLOYMENT: Final = "training-job/train"
SERVER_SECONDS: Final = 180.0


@dataclass
class Program:
    """A program that is restarted after it was killed."""

    argv: list[str]
    environment: dict[str, str]
    place: Path
    name: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Return the path of its log."""
        return self.place / f"{self.name}.log"

    def begin(self) -> None:
        """Start it in a session of its own."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv, env=self.environment, cwd=self.place, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Return its process id, which is that of its group too."""
        assert self.process is not None
        return self.process.pid

    def lives(self) -> bool:
        """Return whether it runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill its process group."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Host:
    """A machine on which flows run: homes and, if that can be, a name of its own."""

    name: str
    place: Path
    environment: dict[str, str]
    programs: list[Program] = field(default_factory=list)

    def program(self, name: str, *argv: str) -> Program:
        """Return a program of this host, which is not started yet."""
        renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *argv] if os.geteuid() == 0 else list(argv)
        self.programs.append(Program(renamed, self.environment, self.place, name))
        return self.programs[-1]

    def close(self) -> None:
        """End all that runs here."""
        for program in self.programs:
            program.kill()


class Plane:
    """PostgreSQL and a Prefect server on it."""

    def __init__(self, place: Path) -> None:
        found = programs()
        if found is None:
            raise FileNotFoundError(MISSING)
        self.place, self.postgres = place, PostgresServer(found)
        self.postgres.start()
        self.history = self.postgres.fresh_url()
        with psycopg.connect(host=str(self.postgres.folder), user="holdfast", dbname="postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE prefect")
        port = free_port()
        self.api = f"http://127.0.0.1:{port}/api"
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_"))}
        self.environment = {**bare, **QUIET, "PYTHONPATH": str(ROOT), "HOLDFAST_HISTORY": self.history, "PREFECT_API_URL": self.api}
        self.environment |= {"PREFECT_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "PREFECT_HOME": str(place / "prefect")}
        own = {"PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://holdfast@/prefect?host={self.postgres.folder}"}
        argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.server = Program(argv, self.environment | own, place, "prefect-server")

    def begin(self) -> None:
        """Start the Prefect server if it is down, as a service manager does, and wait until it and its database are usable."""

        def serves() -> bool:
            if not self.server.lives():  # it ends where its database is away when it starts
                self.server.begin()
            return not unreachable_reason(self.api, 0.0)

        wait_for(serves, "the Prefect server", every=0.5, seconds=SERVER_SECONDS)

    def host(self, name: str) -> Host:
        """Return a host with homes of its own."""
        place = self.place / name
        place.mkdir()
        return Host(name, place, self.environment | {"HOLDFAST_HOME": str(place / "home"), "PREFECT_HOME": str(place / "prefect")})

    def worker(self, host: Host) -> Program:
        """Return a Prefect worker on *host* that runs one flow at a time."""
        argv = [
            sys.executable,
            "-m",
            "prefect",
            "worker",
            "start",
            "--pool",
            POOL,
            "--type",
            "process",
            "--name",
            host.name,
            "--limit",
            "1",
        ]
        host.environment |= {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        return host.program("worker", *argv)

    def deploy(self) -> None:
        """Deploy what is shipped."""
        for argv in (
            ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
            ["deploy", "--all", "--prefect-file", "deployments/prefect.yaml"],
        ):
            command = [sys.executable, "-m", "prefect", "--no-prompt", *argv]
            subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def submit(self, described: dict[str, Any]) -> None:
        """Have a worker run the job as soon as the server is reachable."""
        job, standby = TrainingJob.model_validate(described["job"]), bool(described.get("standby"))
        parameters = parameters_of(job, described["cluster"], standby=standby)

        def asked() -> bool:
            try:
                deployment = self.ask(f"/deployments/name/{DEPLOYMENT}")["id"]
                self.ask(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters, "state": {"type": "SCHEDULED"}})
            except (OSError, ValueError):
                return False
            return True

        wait_for(asked, "the Prefect server to take a flow run", every=0.5, seconds=SERVER_SECONDS)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 (JSON)
        """Return what the Prefect server answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}{path}", data=data, headers={"Content-Type": "application/json"})  # noqa: S310 (our own server)
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            return json.load(answer)

    def close(self) -> None:
        """End the servers."""
        self.server.kill()
        self.postgres.remove()


@contextmanager
def plane(place: Path) -> Iterator[Plane]:
    """Yield PostgreSQL and a Prefect server on it."""
    made = Plane(place)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def idle(worker: Program) -> bool:
    """Return whether no flow of the worker runs."""
    return not worker.lives() or not children_of(worker.pid)


def nap(seconds: float) -> None:
    """Sleep, as part of a fault."""
    time.sleep(seconds)
