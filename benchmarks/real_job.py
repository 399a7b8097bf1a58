"""The benchmarks' training script as a job under a real flow and real agents: faults, migrations, and their cost."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import steps
from benchmarks.measuring import ROOT, wait_for
from benchmarks.steps import Done, Recovered, gaps
from holdfast.cli.commands.nodes.migrate import request_migration
from holdfast.cluster.local import LocalNodes
from holdfast.history import History, models, queries
from holdfast.host.process import mark_of
from holdfast.testing.chaos import Chaos, Placed

SCRIPT: Final = ROOT / "benchmarks" / "train.py"
RANKS: Final = 4
SAVE_EVERY: Final = 5
"""Steps between two checkpoints of those who need them: the same for torchrun and for the restart action."""
QUIET: Final = 5
"""Steps without disturbance before a fault or a move."""


def steady(lines: list[Done]) -> float:
    """Return the median of a rank's last undisturbed steps."""
    return statistics.median(gap for _, gap in gaps(lines)[-QUIET + 1 :])


def fault(place: Path, rank: int, pid: int, how: str) -> float:
    """Break *rank*; return when that happened."""
    if how == "raising":
        path = place / f"raised-{rank}"
        path.unlink(missing_ok=True)
        (place / f"raise-{rank}").touch()
        return float(wait_for(lambda: path.exists() and path.read_text(), "the exception"))
    at = steps.now()
    os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    return at


class Job:
    """2 nodes of 2 ranks and a spare node with a hot spare; with *stock* groups none, and a checkpoint from time to time.

    *given* replaces fields of the job: another script, other nodes, other places for the state.
    """

    def __init__(self, place: Path, environment: dict[str, str], *, stock: bool, **given: Any) -> None:  # noqa: ANN401 (JSON)
        plan = {"nnodes": 2, "nproc_per_node": 2, "spare_nodes": 1, "hot_spares": 0 if stock else 1}
        plan |= {name: given.pop(name) for name in plan if name in given}
        nodes = plan["nnodes"] + plan["spare_nodes"]
        home = place / "home"
        home.mkdir(parents=True)
        self.place, self.stock, self.checkpoints = place, stock, place / "checkpoints"
        self._nodes = LocalNodes(place.name, home / "nodes", nodes)
        job = {
            "name": "bench",
            "script": str(SCRIPT),
            "args": ["--stock-groups"] if stock else [],
            "workdir": str(place),
            **plan,
            "checkpoint": {"interval": SAVE_EVERY if stock else 0, "directory": str(self.checkpoints)},
            "max_recoveries": 10_000,
            "max_restarts_in_place": 10_000,
            "max_recoveries_without_progress": 1000,
            "timeouts": {"hang": "2s", **given.pop("timeouts", {})},
            **given,
        }
        self._ranks, self._waits = plan["nnodes"] * plan["nproc_per_node"], plan["hot_spares"] > 0
        cluster = {"kind": "local", "name": place.name, "nodes": nodes, "directory": str(home / "nodes")}
        (place / "spec.json").write_text(json.dumps({"job": job, "cluster": cluster}))
        environment = environment | {"HOLDFAST_HOME": str(home), "PREFECT_LOGGING_LEVEL": "WARNING"}
        self.history = History.open(f"sqlite:///{home / 'history.db'}")
        with (place / "flow.log").open("wb") as out:
            command = [sys.executable, "-m", "holdfast.flows.training_job", str(place / "spec.json")]
            self._flow = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        self._chaos = Chaos(self._nodes, self.history, "bench")
        try:
            self.run(1)
        except BaseException:
            self.close()
            raise

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def row(self) -> models.Job:
        """Return the job's row."""
        return queries.newest_job(self.history, "bench")

    def done(self) -> dict[int, list[Done]]:
        """Return what every rank has done."""
        return steps.read(self.place, self._ranks)

    def run(self, more: int) -> None:
        """Wait for that many more steps of every rank."""
        until = steps.newest(self.done()) + more
        self.until(lambda: steps.newest(self.done()) >= until, f"step {until}")

    def until(self, condition: Any, what: str) -> Any:  # noqa: ANN401 (a question and its answer)
        """Wait for *condition*; a failure shows what the flow and rank 0 have said."""
        try:
            return wait_for(condition, what, every=0.05)
        except TimeoutError as error:
            logs = [self.place / "flow.log", *sorted((self.place / "home").glob("jobs/*/logs/*.log"))]
            texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs if path.exists()]
            raise TimeoutError("\n".join([str(error), *texts])) from error

    def _state(self) -> str:
        move = queries.state_of(self.history, self.row.id)
        return move.after if move else ""

    def pids(self) -> dict[int, int]:
        """Return every rank's process."""
        return {rank: placed.pid for rank, placed in self._chaos.ranks().items()}

    def placed(self, rank: int) -> Placed:
        """Return where *rank* lives."""
        return self._chaos.ranks()[rank]

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        return self._nodes.names()

    def mark(self, node: str) -> str:
        """Return what every process on *node* carries."""
        return mark_of(self._nodes.folder(node))

    def settle(self) -> None:
        """Wait until training runs with a parked hot spare, and some steps have gone by without disturbance."""
        hot_spare = 1 if self._waits else 0
        self.until(lambda: self._state() == "RUNNING" and self._chaos.parked() >= hot_spare, "a job that runs, and its hot spare")
        self.run(QUIET)

    # -- acting -------------------------------------------------------------------------------------------------------

    def recover(self, rank: int, how: str) -> dict[str, Any]:
        """Break *rank*, wait for the end of the incident, and return what it cost."""
        self.settle()
        known, pids = len(queries.incidents(self.history, self.row.id)), self.pids()
        survivors = {other: pid for other, pid in pids.items() if other != rank}
        usual, before = self._usual_peaks(survivors), steady(self.done()[0])
        at = fault(self.place, rank, pids[rank], how)
        back: Recovered = self.until(lambda: steps.recovery(self.done(), rank, pids[rank]), f"all ranks after rank {rank} was {how}")
        row = self.until(lambda: self.closed(known), "the incident's end")
        ratios = [now / usual[other] for other, pid in survivors.items() if (now := peak(pid)) and usual[other]]
        return {
            "rank": rank,
            "fault": how,
            "action": row.action,
            "seconds": back.at - at,
            "step": before,
            "detected": row.detected_at - at,
            "ordered": (row.commands_sent_at or row.detected_at) - at,
            "steps_lost": back.steps_lost,
            "memory": max(ratios, default=None),
            "inside": (row.facts or {}).get("seconds", {}),
        }

    def closed(self, known: int) -> models.Incident | None:
        """Return the first incident after the *known* ones, once it is over."""
        rows = queries.incidents(self.history, self.row.id)[known:]
        return rows[0] if rows and rows[0].closed_at else None

    def _usual_peaks(self, pids: dict[int, int]) -> dict[int, int]:
        """Return each process's peak over some steps without disturbance, and reset it."""
        for pid in pids.values():
            forget_peak(pid)
        self.run(2)
        found = {rank: peak(pid) for rank, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        return found

    def move(self, rank: int) -> dict[str, float]:
        """Move *rank* to another process by plan; return the pause, and the length of steps before and while that was prepared."""
        self.settle()
        usual, asked = steady(self.done()[0]), steps.now()
        number = request_migration(self.history, self.row, {"from": None, "to": None, "rank": rank})
        request = self.until(lambda: (row := queries.request(self.history, number)) and row.outcome and row, "the end of the move")
        if not request.done:
            raise RuntimeError(f"rank {rank} was not moved: {request.outcome}")
        self.run(2)
        begun = next(move.at for move in queries.transitions(self.history, self.row.id) if move.after == "MIGRATING" and move.at >= asked)
        stayer = next(other for other in range(RANKS) if other != rank)
        passed = gaps(self.done()[stayer], begun, request.handled_at + 2 * usual)
        switched, longest = max(passed, key=lambda one: one[1])
        preparing = [gap for at, gap in passed if at < switched]
        return {
            "rank": rank,
            "pause": longest - usual,
            "step": usual,
            "preparing": statistics.median(preparing) / usual if preparing else 1.0,
            "seconds": request.handled_at - asked,
        }

    def kill_all(self) -> float:
        """Kill all ranks at once; return when that happened."""
        at, pids = steps.now(), self.pids()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        return at

    def take_node(self) -> float:
        """Take the whole node of rank 0 away, permanently; return when that happened."""
        return self._chaos.power_off(0)[0]

    def lose(self, how: Callable[[], float]) -> dict[str, Any]:
        """Have *how* do it, wait until all train again, and return what that cost."""
        known, before = len(queries.incidents(self.history, self.row.id)), self.pids()
        at = how()
        back: Recovered = self.until(lambda: steps.recovery(self.done(), 0, before[0]), "rank 0 again")
        row = self.until(lambda: self.closed(known), "the incident's end")
        if row.outcome != "recovered":
            raise RuntimeError(f"the job did not recover: {row.reason}")
        return {"seconds": back.at - at, "steps_lost": row.steps_lost, "action": row.action, "resumed_step": row.resumed_step}

    def close(self) -> None:
        """End the job."""
        self._flow.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._flow.wait(30)
        self._flow.kill()
        self._flow.wait()
        for node in self._nodes.names():
            self._nodes.clear(node)
        self.history.close()


def peak(pid: int) -> int:
    """Return the most memory (KiB) that a process has held since `forget_peak`; 0 if it ended."""
    with suppress(OSError, StopIteration):
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return 0


def forget_peak(pid: int) -> None:
    """Reset the memory peak of a process; see proc_pid_clear_refs(5)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def medians(rounds: Sequence[dict[str, Any]], by: str) -> dict[Any, float]:
    """Return the median of the seconds of *rounds*, for each value of the field *by*."""
    keys = dict.fromkeys(one[by] for one in rounds)
    return {key: statistics.median(one["seconds"] for one in rounds if one[by] == key) for key in keys}
