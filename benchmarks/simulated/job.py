"""One job on simulated nodes: the process that plays them, a real controller that runs it, and its history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.measuring import ROOT, wait_for
from benchmarks.simulated.host import names
from benchmarks.simulated.nodes import SimulatedNodes
from benchmarks.watched import Watched
from holdfast.cli.watch import request_stop
from holdfast.history import History, queries

POLICY: Final = (
    "max_restarts_in_place: 100000\nmax_recoveries: 100000\nmax_recoveries_without_progress: 100000\n"
    "recurring: {times: 0, process_times: 0}\nflapping: {times: 0}\ncorrelated: {min_nodes: 0, min_share: 0%}\n"
)
"""Incident after incident must be answered like the first: no budget, and no memory of what happened before."""
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class SimulatedJob(Watched):
    """A job of *wanted* nodes, with *spare* ones to replace those that are lost."""

    def __init__(self, place: Path, environment: dict[str, str], *, wanted: int, spare: int, ranks: int = 1, **job: Any) -> None:  # noqa: ANN401 (fields of a job)
        self.place, self.name, self.wanted = place, "simulated", wanted
        home, count = place / "home", wanted + spare
        home.mkdir(parents=True)
        (place / "policy.yaml").write_text(POLICY)
        self.nodes = SimulatedNodes("simulated", place, count)
        command = [sys.executable, "-m", "benchmarks.simulated.host", str(place), str(count)]
        self.environment = environment | {"HOLDFAST_HOME": str(home), "PREFECT_LOGGING_LEVEL": "WARNING", "PYTHONPATH": str(ROOT)}
        self.host = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        assert self.host.stdout is not None
        if self.host.stdout.readline().strip() != "ready":
            raise RuntimeError("the process that plays the nodes did not come up")
        fields = {
            "name": self.name,
            "command": ["true"],
            "workdir": str(place),
            "policy": str(place / "policy.yaml"),
            "preflight": False,
            "progress": "steps",
            "checkpoint": {"interval": 0, "memory": {"interval": 0}},
            "nnodes": wanted,
            "spare_nodes": spare,
            "nproc_per_node": ranks,
            "hot_spares": 0,
            **job,
        }
        cluster = {"kind": "ssh", "name": "simulated", "hosts": names(count), "quarantine": {"approval_timeout": 0}}
        (place / "spec.json").write_text(json.dumps({"job": fields, "cluster": cluster}))
        self.history = History.open(f"sqlite:///{home / 'history.db'}")
        flow = [sys.executable, "-m", "benchmarks.simulated.flow", str(place / "spec.json"), str(place), str(count)]
        with (place / "flow.log").open("ab") as out:
            self.flow = subprocess.Popen(flow, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- looking ------------------------------------------------------------------------------------------------------

    def trains(self, incidents: int = 0) -> bool:
        """Return whether all ranks step, after so many *incidents*."""
        known = self.incidents() if incidents else []
        return self.state() == "RUNNING" and len(known) == incidents and all(one.closed_at is not None for one in known)

    def until(self, condition: Callable[[], object], what: str, *, seconds: float = 120.0) -> None:
        """Wait for *condition*; a failure shows what the flow said."""
        try:
            wait_for(lambda: condition() or self._is_over(), what, every=0.05, seconds=seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; state {self.state()}\n{self.log()}") from error

    def _is_over(self) -> bool:
        if self.flow.poll() is not None:
            raise RuntimeError(f"the flow ended with status {self.flow.returncode}, state {self.state()}\n{self.log()}")
        return False

    def log(self) -> str:
        """Return the end of what the flow wrote."""
        return (self.place / "flow.log").read_text(errors="replace")[-4000:]

    def cpu(self) -> float:
        """Return the seconds of CPU that the flow has used."""
        fields = Path(f"/proc/{self.flow.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> int:
        """Return the bytes of memory that the flow holds."""
        return int(Path(f"/proc/{self.flow.pid}/statm").read_text().split()[1]) * PAGE

    # -- acting -------------------------------------------------------------------------------------------------------

    def members(self) -> list[str]:
        """Return the nodes that hold ranks now."""
        row = queries.newest_generation(self.history, self.row.id)
        return list(row.ranks) if row is not None else []

    def lose(self, count: int) -> float:
        """Take power from *count* nodes that hold ranks, spread over all of them; return when (wall clock)."""
        members = self.members()
        return self.nodes.lose(members[1 :: max(1, len(members) // count)][:count])

    def stop(self, seconds: float = 120.0) -> int:
        """Have a person stop the job; return the flow's exit status."""
        request_stop(self.history, self.row)
        return self.flow.wait(seconds)

    def close(self) -> None:
        """End what still runs."""
        for process in (self.flow, self.host):
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.host.stdout is not None:
            self.host.stdout.close()
        self.history.close()
