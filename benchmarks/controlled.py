"""A job of a troubled script (train_troubled.py) under a flow that a benchmark can kill and start again, on a local cluster of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks import troubles
from benchmarks.measuring import ROOT, wait_for
from benchmarks.watched import Watched
from holdfast.cli.watch import request_stop
from holdfast.cluster.local import LocalNodes
from holdfast.history import History
from holdfast.host.process import mark_of
from holdfast.memstore import store_folders
from holdfast.testing.chaos import Chaos
from holdfast.testing.orphans import leftovers

T = TypeVar("T")
SCRIPT: Final = ROOT / "benchmarks" / "train_troubled.py"
TAIL: Final = 3000
"""Bytes of each log that a failure shows."""


class FlowEnded(Exception):
    """The flow has ended by itself while the job was to go on."""


class ControlledJob(Watched):
    """One job, its flow and its nodes."""

    def __init__(self, place: Path, environment: dict[str, str], *, count: int, **job: Any) -> None:  # noqa: ANN401 (fields of a job)
        home = place / "home"
        home.mkdir(parents=True, exist_ok=True)
        self.place, self.checkpoints, self.name = place, place / "checkpoints", place.name
        self.nodes = LocalNodes(place.name, home / "nodes", count)
        most_nodes = int(str(job["nnodes"]).rpartition(":")[2])
        self.ranks = most_nodes * job["nproc_per_node"]
        cluster = {"kind": "local", "name": place.name, "nodes": count, "directory": str(home / "nodes")}
        checkpoint = {"directory": str(self.checkpoints), **job.pop("checkpoint", {})}
        fields = {"name": self.name, "script": str(SCRIPT), "workdir": str(place), "checkpoint": checkpoint, **job}
        (place / "spec.json").write_text(json.dumps({"job": fields, "cluster": cluster}))
        self._environment = environment | {"HOLDFAST_HOME": str(home), "PREFECT_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
        self.history = History.open(f"sqlite:///{home / 'history.db'}")
        self.chaos = Chaos(self.nodes, self.history, self.name)
        self.begin_flow()

    # -- the flow -----------------------------------------------------------------------------------------------------

    def begin_flow(self) -> None:
        """Start a flow; it reattaches to the job when that runs already."""
        command = [sys.executable, "-m", "holdfast.flows.training_job", str(self.place / "spec.json")]
        with (self.place / "flow.log").open("ab") as out:
            self.flow = subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def kill_flow(self) -> None:
        """Kill the flow."""
        self.flow.kill()
        self.flow.wait()

    def ends(self, seconds: float = 180.0) -> int:
        """Wait for the flow's end; return its exit status."""
        self.until(lambda: self.flow.poll() is not None, "the end of the flow", seconds=seconds)
        return int(self.flow.returncode)

    def mark(self, node: str) -> str:
        """Return what every process on *node* carries."""
        return mark_of(self.nodes.folder(node))

    # -- looking ------------------------------------------------------------------------------------------------------

    def at_work(self, parked: int = 0) -> bool:
        """Return whether all ranks train, no incident is open, and so many hot spares wait."""
        if self.state() != "RUNNING" or any(one.closed_at is None for one in self.incidents()) or not self.chaos.complete():
            return False
        return not parked or self.chaos.parked() >= parked

    def goes_on(self, steps: int, *, parked: int = 0, seconds: float = 120.0) -> None:
        """Wait until the job has made that many more steps, and is at work."""
        until = self.chaos.step() + steps
        self.until(lambda: self.has_controller() and self.at_work(parked) and self.chaos.step() >= until, f"step {until}", seconds=seconds)

    def has_controller(self) -> bool:
        """Check that the flow runs; raise `FlowEnded` if it has ended by itself."""
        if self.flow.poll() is None:
            return True
        raise FlowEnded(f"the flow ended with status {self.flow.returncode}, state {self.state()}\n{self.logs()}")

    def until(self, condition: Callable[[], T], what: str, *, seconds: float = 120.0) -> T:
        """Wait for *condition*; a failure shows what flow, agents and ranks have said."""
        try:
            answer: T = wait_for(condition, what, every=0.02, seconds=seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nstate {self.state()}\n{self.logs()}") from error
        return answer

    def logs(self) -> str:
        """Return the ends of what the flow and the ranks wrote."""
        logs = [self.place / "flow.log", *sorted((self.place / "home").glob("jobs/*/logs/*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-TAIL:]}" for path in logs if path.exists())

    # -- acting -------------------------------------------------------------------------------------------------------

    def trouble(self, rank: int, statements: str) -> float:
        """Have *rank* run *statements* in its next step; return when it began to (wall clock)."""
        troubles.trouble(self.checkpoints, rank, statements)
        return self.until(lambda: troubles.troubled_at(self.checkpoints, rank), f"rank {rank} to take {statements!r}") or 0.0

    def trouble_next(self, rank: int, statements: str) -> None:
        """Have the next process of *rank* run *statements* before it joins."""
        troubles.trouble(self.checkpoints / "at-start", rank, statements)

    def stop(self) -> None:
        """Have a person stop the job."""
        request_stop(self.history, self.row)

    def left(self) -> list[str]:
        """Return what is left of the job: processes, and memory stores in memory."""
        kept = [str(place) for node in self.nodes.names() for place in store_folders.memstores_of(mark_of(self.nodes.folder(node)))]
        return [*leftovers(self.place), *kept]

    def close(self) -> None:
        """End whatever still runs."""
        if self.flow.poll() is None:
            self.flow.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.flow.wait(30)
            self.kill_flow()
        for node in self.nodes.names():
            self.nodes.clear(node)
        self.history.close()


def kill_at_start() -> str:
    """Return statements for a process that is to die before it joins."""
    return f"os.kill(os.getpid(), {int(signal.SIGKILL)})"


def power_off_at_start(nodes: LocalNodes) -> str:
    """Return statements for a process that is to lose power with its whole node before it joins."""
    return (
        "from holdfast.cluster.local import LocalNodes\n"
        f"root = Path({str(nodes.root)!r})\n"
        f"node = Path(os.environ[{'HOLDFAST_NODE_MARK'!r}]).name\n"
        f"LocalNodes({nodes.name!r}, root, {nodes.count}).power_off(node)\n"
        "os._exit(1)"
    )
