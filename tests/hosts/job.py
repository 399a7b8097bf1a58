"""A job on real hosts: a flow here, agents and ranks there, and what the ranks themselves wrote down of their steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from benchmarks import steps as notes
from benchmarks.steps import Done
from holdfast.bootstrap import Hosts, node_wheel
from holdfast.cluster import open_cluster
from holdfast.history import Generation, History, Incident, queries
from holdfast.spec import SshCluster, cluster_of
from holdfast.testing.chaos import Chaos
from tests.hosts.host import Host
from tests.hosts.rack import Rack
from tests.waiting import wait_until

if TYPE_CHECKING:
    from holdfast.cluster.local import LocalNodes  # whose agents it asks: others can be asked alike

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
SMALL = ["--width", "64", "--layers", "2", "--batch", "8"]
"""A model that costs nothing: what is looked at is not the training."""
DIRECTORY = "hf"


def set_up(rack: Rack) -> None:
    """Put Holdfast on all hosts of the rack."""
    cluster = cluster_of(rack.cluster(directory=DIRECTORY))
    assert isinstance(cluster, SshCluster)
    with Hosts(cluster, node_wheel()) as hosts:
        outcomes = hosts.set_up(cluster.names)
    assert not [one for one in outcomes if one.failed], outcomes


class HostJob:
    """A job on all hosts of a rack: all but *spare* train, one rank each; the spare ones have a hot spare."""

    def __init__(
        self, rack: Rack, place: Path, environment: Mapping[str, str], *, spare: int = 1, pace: float = 0.05, **given: Any
    ) -> None:
        self.rack, self.place, self.name = rack, place, given.pop("name", "bench")
        self._code(place)
        plan = {"nnodes": len(rack) - spare, "nproc_per_node": 1, "spare_nodes": spare, "hot_spares": min(spare, 1)}
        job = {
            "name": self.name,
            "script": str(place / "train.py"),
            "args": [*SMALL, "--pace", str(pace)],
            "workdir": str(place),
            **plan,
            "checkpoint": {"interval": 0, "directory": str(place / "checkpoints")},
            "env": {"OMP_NUM_THREADS": "1"},
            "max_recoveries": 10_000,
            "max_restarts_in_place": 10_000,
            "max_recoveries_without_progress": 1000,
            "timeouts": {"hang": "2s", **given.pop("timeouts", {})},
            **given,
        }
        self.ranks, self.waits, self.has_spare = job["nnodes"] * job["nproc_per_node"], job["hot_spares"], job["spare_nodes"] > 0
        self.spec = place / "spec.json"
        self.spec.write_text(json.dumps({"job": job, "cluster": rack.cluster(name=place.name.lower(), directory=DIRECTORY)}))
        self.environment = {
            **environment,
            "HOLDFAST_HOME": str(place / "home"),
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "PYTHONPATH": str(ROOT),
        }
        (place / "home").mkdir()
        self.history = History.open(f"sqlite:///{place / 'home' / 'history.db'}")
        self.flows: list[subprocess.Popen[bytes]] = []
        self.nodes = open_cluster(cluster_of(rack.cluster(name=place.name.lower(), directory=DIRECTORY)))
        self.chaos = Chaos(cast("LocalNodes", self.nodes), self.history, self.name)

    def _code(self, place: Path) -> None:
        """Lay the script where all hosts see it, with what it imports beside Holdfast."""
        place.mkdir(parents=True, exist_ok=True)
        (place / "benchmarks").mkdir()
        for name in ("train.py", "steps.py"):
            shutil.copy(ROOT / "benchmarks" / name, place / ("benchmarks" if name == "steps.py" else ".") / name)

    # -- the flow -----------------------------------------------------------------------------------------------------

    def start(self, *, standby: bool = False) -> subprocess.Popen[bytes]:
        """Start a flow for the job: the first, or one that stands by."""
        spec = self.standby_spec() if standby else self.spec
        with (self.place / f"flow-{len(self.flows)}.log").open("wb") as out:
            command = [sys.executable, "-m", "holdfast.flows.training_job", str(spec)]
            flow = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.flows.append(flow)
        return flow

    def standby_spec(self) -> Path:
        """Return the file that a flow is given which stands by."""
        spec = self.spec.with_name("standby.json")
        spec.write_text(json.dumps({**json.loads(self.spec.read_text()), "standby": True}))
        return spec

    def close(self) -> None:
        """End the flow, and what is left on the hosts."""
        for flow in self.flows:
            flow.kill()
            flow.wait()
        self.nodes.close()
        self.history.close()
        for host in self.rack:
            if host.is_on:
                for pid, command in host.processes().items():
                    if "holdfast" in command or "train.py" in command or "envs/" in command:
                        with suppress(RuntimeError):
                            subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)

    def person(self, *words: str) -> str:
        """Do what a person does at the command line of the flow's machine; return what it says."""
        cluster = self.place / "cluster.yaml"
        cluster.write_text(json.dumps(json.loads(self.spec.read_text())["cluster"]))
        command = [sys.executable, "-m", "holdfast", *words]
        return subprocess.run(command, env=self.environment, cwd=self.place, check=True, stdout=subprocess.PIPE, text=True).stdout

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def row(self) -> Any:
        """Return the job's row."""
        return queries.newest_job(self.history, self.name)

    def state(self) -> str:
        """Return the job's state; empty before it has one."""
        live = queries.jobs(self.history, self.name)
        move = queries.state_of(self.history, live[0].id) if live else None
        return move.after if move else ""

    def has_event(self, words: str) -> bool:
        """Return whether a remark with these *words* is on record."""
        return any(words in one.text for one in queries.job_events(self.history, self.row.id))

    def incidents(self) -> list[Incident]:
        """Return the job's incidents."""
        return queries.incidents(self.history, self.row.id)

    def generation(self) -> Generation:
        """Return the newest membership."""
        found = queries.newest_generation(self.history, self.row.id)
        assert found is not None
        return found

    def done(self) -> dict[int, list[Done]]:
        """Return what every rank has done."""
        return notes.read(self.place, self.ranks)

    def step(self) -> int:
        """Return the newest step that every rank is done with."""
        return notes.newest_step(self.place, self.ranks)

    def host_of(self, rank: int) -> Host:
        """Return the host on which *rank* lives."""
        return next(self.rack.named(node) for node, ranks in self.generation().ranks.items() if rank in ranks)

    def spare(self) -> Host:
        """Return a host that no rank lives on."""
        return next(host for host in self.rack if not self.generation().ranks.get(host.name))

    def log(self) -> str:
        """Return what a person would read after a failure."""
        places = [*sorted(self.place.glob("flow-*.log")), *sorted(self.rack.place.glob("*/home/hf/jobs/*/logs/*.log"))]
        places += sorted(self.rack.place.glob("*/home/hf/nodes/*/agent.log"))
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in places if path.exists())

    # -- waiting ------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], T], what: str, seconds: float = 120.0) -> T:
        """Wait for *condition*; a failure shows what everybody said."""
        return wait_until(condition, seconds=seconds, explain=lambda: f"{what}; state {self.state()}\n{self.log()}")

    def runs(self, more: int = 3) -> None:
        """Wait until all ranks have done *more* further steps."""
        until = self.step() + more
        self.until(lambda: self.step() >= until, f"step {until}")

    def settles(self, steps: int = 3) -> None:
        """Wait until training runs, with a hot spare ready on a spare host if there is to be one, and makes some further *steps*."""
        self.until(lambda: self.state() == "RUNNING" and self.parked() >= self.waits, "a job that runs, and its hot spare")
        self.runs(steps)

    def parked(self) -> int:
        """Return how many hot spares wait for a rank: on spare hosts, where the job is to have some."""
        return self.chaos.parked(but=self.generation().ranks if self.has_spare else ())

    def stands_by(self, number: int) -> bool:
        """Return whether flow *number* has said that it waits for another one's place."""
        return "standby.waits" in (self.place / f"flow-{number}.log").read_text(errors="replace")
