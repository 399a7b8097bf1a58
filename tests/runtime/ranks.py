"""Run a scenario on real gloo ranks: `Ranks` starts them, and returns the result or the exit status of each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.host.ports import free_port
from tests.imported import Program, imported

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def torch_imported(place: Path) -> Iterator[Path]:
    """Give the socket of a process that has imported what ranks need, with its files in *place* (see `tests.imported`)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")} | {"OMP_NUM_THREADS": "1"}
    with imported(place, environment, "tests.runtime.group_server", "tests.runtime.rank_server") as server:
        yield server


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank exited: its exit *status* (negative: the signal), its *result*, and its *log*."""

    status: int
    result: Any
    log: str


class Run:
    """Ranks at work; `wait` for their ends."""

    def __init__(self, server: Program, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.ended = False
        self.pids: list[int] = server.answer()["pids"]

    def wait(self) -> list[Ended]:
        """Return how each rank ended."""
        statuses = self._server.answer()["statuses"]
        self.ended = True
        return [Ended(status, self._result(rank), (self._folder / f"{rank}.log").read_text()) for rank, status in enumerate(statuses)]

    def results(self) -> list[Any]:
        """Return the result of each rank; all exited with status 0."""
        ended = self.wait()
        logs = "\n".join(f"--- rank {rank}: {one.status}\n{one.log}" for rank, one in enumerate(ended))
        assert all(one.status == 0 for one in ended), logs
        return [one.result for one in ended]

    def _result(self, rank: int) -> Any:
        path = self._folder / f"{rank}.json"
        return json.loads(path.read_text() or "null")


class Ranks:
    """A process that has torch imported and forks ranks from itself; one run at a time."""

    def __init__(self, torch: Path, base: Path) -> None:
        """Have the process at the socket *torch* fork it; each run has a folder in *base*."""
        self._base, self._runs = base, 0
        self._latest: Run | None = None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        self._server = Program(torch, "tests.runtime.rank_server", environment=environment | {"OMP_NUM_THREADS": "1"})
        assert "ready" in self._server.answer()

    def start(self, scenario: str, ranks: int, environment: Mapping[str, str] | None = None, **arguments: Any) -> Run:
        """Start *scenario* (a function of ``scenarios.py``) on so many *ranks*."""
        self._end_latest()
        self._runs += 1
        folder = self._base / str(self._runs)
        folder.mkdir()
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        order = {
            "scenario": f"tests.runtime.scenarios:{scenario}",
            "ranks": ranks,
            "folder": str(folder),
            "environment": {**world, **(environment or {})},
            "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        }
        self._server.say(order)
        self._latest = Run(self._server, folder)
        return self._latest

    def run(self, scenario: str, ranks: int = 1, environment: Mapping[str, str] | None = None, **arguments: Any) -> list[Any]:
        """Run *scenario* and return the result of each rank."""
        return self.start(scenario, ranks, environment, **arguments).results()

    def _end_latest(self) -> None:
        """Kill the ranks that a failed test has left running."""
        if self._latest is None or self._latest.ended:
            return
        for pid in self._latest.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._latest.wait()

    def close(self) -> None:
        """End the server."""
        self._end_latest()
        self._server.close()
