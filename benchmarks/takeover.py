"""Take-over of lost ranks and planned moves, measured from the fault itself.

    python -m benchmarks.takeover --json takeover.json [--rounds N] [--only KEY ...]

One job under a real flow (an MLP of about 10 million parameters under DDP, 2 nodes of 2 ranks, 1 spare, 2 standbys) is broken again
and again: each rank in turn is killed, stopped and made to raise. Between these faults, in the same run, the same script runs under
``torchrun`` and under Holdfast with torch's own groups, where only a restart helps; and a bare script regroups gloo and moves the
same state. Nothing is simulated. The clock starts at the fault (the signal, or the file that makes the script raise) and ends
with the first step that all ranks have committed after it.

Keys: ``unplanned``, ``floor``, ``planned``, ``memory``, each with median, p99, n, goal and met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import ROOT, prefect, wait_for
from benchmarks.restart import attempt_log
from holdfast.chaos import Chaos
from holdfast.cluster.local import LocalNodes
from holdfast.history import History, queries
from holdfast.process import marked

SCRIPT: Final = ROOT / "benchmarks" / "train.py"
RANKS: Final = 4
FAULTS: Final = ("killed", "raising", "stopped")
SAVE_EVERY: Final = 5
MEMORY: Final = 1.05
"""Peak of survivors during a recovery over their steady peak."""
OVER_FLOOR: Final = 3.0
PREPARING: Final = 1.05
"""Step time while a move is prepared over that before."""
STEPS: Final = 3
"""Steps without disturbance before a fault."""
TORCHRUN_SECONDS: Final = 10
"""The collective time-out of the torchrun side: with torch's default a stopped rank would cost it 30 minutes."""


# -- Holdfast ----------------------------------------------------------------------------------------------------------


class Job:
    """A job under a real flow, and what breaks it."""

    def __init__(self, place: Path, environment: dict[str, str], *, stock: bool) -> None:
        home = place / "home"
        home.mkdir(parents=True)
        self.place, self.stock = place, stock
        self.nodes = LocalNodes(place.name, home / "nodes", 3)
        job = {
            "name": "bench",
            "script": str(SCRIPT),
            "args": ["--stock-groups"] if stock else [],
            "directory": str(place),
            "nodes": {"wanted": 2, "ranks": 2, "spare": 1, "standbys": 0 if stock else 2},
            "checkpoint": {"every": SAVE_EVERY if stock else 0, "directory": str(place / "checkpoints")},
            "budget": {"recoveries": 10_000, "in_place": 10_000, "fruitless": 1000},
        }
        cluster = {"kind": "local", "name": place.name, "nodes": 3, "directory": str(home / "nodes")}
        (place / "spec.json").write_text(json.dumps({"job": job, "cluster": cluster}))
        self.environment = environment | {"HOLDFAST_HOME": str(home), "PREFECT_LOGGING_LEVEL": "WARNING"}
        self.history = History.open(f"sqlite:///{home / 'history.db'}")
        with (place / "flow.log").open("wb") as out:
            command = [sys.executable, "-m", "flows.training_job", str(place / "spec.json")]
            self.flow = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        self.chaos = Chaos(self.nodes, self.history, "bench")
        wait_for(self.step, "the first step")

    def step(self) -> int:
        """Return the newest step, 0 before there is a job."""
        with suppress(Exception):
            return self.chaos.step()
        return 0

    def state(self) -> str:
        """Return the job's state."""
        move = queries.state_of(self.history, queries.newest_job(self.history, "bench").id)
        return move.after if move else ""

    def settle(self) -> None:
        """Wait until training runs, standbys are parked again, and some steps have gone by."""
        wait_for(lambda: self.state() == "RUNNING" and (self.stock or self.chaos.parked() >= 1), "a job that runs")
        step = self.step()
        wait_for(lambda: self.step() >= step + STEPS, "some steps")

    def pids(self) -> dict[int, int]:
        """Return every rank's process."""
        return {rank: placed.pid for rank, placed in self.chaos.ranks().items()}

    def breaks(self, rank: int, how: str) -> float:
        """Break *rank*; return when."""
        if how == "raising":
            at = time.time()
            (self.place / f"raise-{rank}").touch()
            return at
        return self.chaos.kill(rank) if how == "killed" else self.chaos.stop(rank)

    def recover(self, rank: int, how: str) -> dict[str, Any]:
        """Break *rank*, wait for the end of the incident, and return what it cost."""
        self.settle()
        job = queries.newest_job(self.history, "bench").id
        known = len(queries.incidents(self.history, job))
        survivors = {other: pid for other, pid in self.pids().items() if other != rank}
        before = steady_peak(survivors, self)
        at = self.breaks(rank, how)
        rows = wait_for(lambda: (found := queries.incidents(self.history, job)[known:]) and found[0].closed_at and found, "a recovery")
        row, after = rows[0], {pid: peak(pid) for pid in survivors.values()}
        ratios = [after[pid] / before[pid] for pid in before if after.get(pid) and before[pid]]
        return {
            "rank": rank,
            "fault": how,
            "rung": row.rung,
            "seconds": row.fault_at + (row.downtime_s or 0.0) - at,
            "detect": row.detected_at - at,
            "steps_lost": row.steps_lost or 0,
            "memory": max(ratios, default=None),
        }

    def step_seconds(self) -> list[float]:
        """Return the seconds of all steps so far."""
        job = queries.newest_job(self.history, "bench").id
        return [row.seconds for row in queries.steps(self.history, job) if row.seconds > 0]

    def move(self, rank: int) -> dict[str, float]:
        """Move *rank* to another process by plan, and return the pause and what preparing cost."""
        self.settle()
        begin = time.time()
        command = [sys.executable, "-m", "holdfast", "migrate", "bench", "--rank", str(rank)]
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        end = time.time()
        step = self.step()
        wait_for(lambda: self.step() >= step + 5, "steps after the move")
        job = queries.newest_job(self.history, "bench").id
        rows = sorted(queries.steps(self.history, job), key=lambda one: one.at)
        gaps = [(later.at, later.at - earlier.at) for earlier, later in pairwise(rows)]
        before = statistics.median(gap for at, gap in gaps if begin - 30 < at < begin)
        during = [gap for at, gap in gaps if begin < at < end + 2]
        if ran.returncode or not during:
            raise RuntimeError(f"the move of rank {rank} failed: {ran.stdout}{ran.stderr}")
        return {
            "pause": max(during) - before,
            "step": before,
            "preparing": statistics.median(sorted(during)[:-1] or during) / before,
            "seconds": end - begin,
        }

    def close(self) -> None:
        """End the job."""
        self.flow.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.flow.wait(30)
        self.flow.kill()
        self.flow.wait()
        for node in self.nodes.names():
            self.nodes.fence(node)
        self.history.close()


def peak(pid: int) -> int:
    """Return the most memory (KiB) that a process has held since `forget_peak`; 0 when it is gone."""
    with suppress(OSError):
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return 0


def forget_peak(pid: int) -> None:
    """Let the peak of a process begin anew; see proc_pid_clear_refs(5)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def steady_peak(pids: dict[int, int], job: Job) -> dict[int, int]:
    """Return each process's peak over three steps that nothing disturbs, and let it begin anew."""
    for pid in pids.values():
        forget_peak(pid)
    step = job.step()
    wait_for(lambda: job.step() >= step + STEPS, "steps")
    found = {pid: peak(pid) for pid in pids.values()}
    for pid in pids.values():
        forget_peak(pid)
    return found


# -- torchrun ----------------------------------------------------------------------------------------------------------


@contextmanager
def torchrun(place: Path) -> Iterator[None]:
    """Run the same script under torchrun."""
    place.mkdir(parents=True)
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        "HOLDFAST_CHECKPOINT_DIR": str(place / "checkpoints"),
        "HOLDFAST_SAVE_EVERY": str(SAVE_EVERY),
        "BENCH_MARK": str(place),
    }
    code = (
        f"import datetime,runpy,sys,torch.distributed.constants as c,torch.distributed.distributed_c10d as d\n"
        f"d.default_pg_timeout=c.default_pg_timeout=datetime.timedelta(seconds={TORCHRUN_SECONDS})\n"
        f"sys.argv=[{str(SCRIPT)!r}]\nrunpy.run_path({str(SCRIPT)!r},run_name='__main__')\n"
    )
    (place / "timed.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    command += [f"--log-dir={place / 'logs'}", "--redirects=3", str(place / "timed.py")]
    run = subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        run.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            run.wait(20)
        for pid in marked("BENCH_MARK", str(place)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()


def torchrun_round(place: Path, rank: int, how: str) -> float:
    """Return the seconds from the fault to the first step of the ranks that torchrun starts again."""
    with torchrun(place):
        wait_for(lambda: last_step(attempt_log(place / "logs", 0)) > SAVE_EVERY + 1, "torchrun's first steps")
        pid = next(pid for pid in marked("BENCH_MARK", str(place)) if pid in set(marked("RANK", str(rank))))
        at = time.time()
        if how == "raising":
            (place / f"raise-{rank}").touch()
        else:
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        wait_for(lambda: last_step(attempt_log(place / "logs", 1)) > 0, "torchrun's first new step")
        return time.time() - at


def last_step(log: Path | None) -> int:
    """Return the last step that a log tells of."""
    if log is None or not log.exists():
        return 0
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("step ")]
    return int(lines[-1].split()[1].rstrip(":")) if lines else 0


# -- the floor ---------------------------------------------------------------------------------------------------------


def bare(rank: int, ports: list[int], told: Any, size: int) -> None:  # noqa: ANN401 (a queue)
    """Regroup gloo and receive the state from rank 0, again and again: what no recovery can be faster than."""
    import torch  # noqa: PLC0415 (in the processes of the floor alone)
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    state = torch.zeros(size)
    for port in ports:
        begin = time.time()
        store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=60))
        group: Any = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60))
        if rank in (0, RANKS - 1):
            (group.send([state], RANKS - 1, 0) if rank == 0 else group.recv([state], 0, 0)).wait()
        group.barrier().wait()
        told.put((port, begin, time.time()))


def floor(rounds: int) -> list[float]:
    """Return the seconds of each bare regroup with the state moved to one rank, all ranks being there already."""
    import multiprocessing  # noqa: PLC0415

    from holdfast.agent.orders import FIRST_PORT  # noqa: PLC0415

    ports = [FIRST_PORT + 1 + (os.getpid() * 7 + number * 13) % 15_000 for number in range(rounds + 1)]
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    size = 3 * 9 * (1024 * 1024 + 1024)
    ranks = [context.Process(target=bare, args=(rank, ports, told, size)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    found: dict[int, list[tuple[float, float]]] = {}
    for _ in range(RANKS * len(ports)):
        port, begin, end = told.get()
        found.setdefault(port, []).append((begin, end))
    for one in ranks:
        one.join()
    return [max(end for _, end in found[port]) - max(begin for begin, _ in found[port]) for port in ports[1:]]


# -- all ---------------------------------------------------------------------------------------------------------------


def figure(values: list[float], goal: Any, *, met: bool, **more: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """Return what a key of the result holds."""
    ordered = sorted(values)
    facts: dict[str, Any] = {"median": None, "p99": None, "n": len(ordered), "goal": goal, "met": met and bool(ordered)}
    if ordered:
        facts |= {"median": round(statistics.median(ordered), 4), "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4)}
        facts["range"] = [round(ordered[0], 4), round(ordered[-1], 4)]
    return {**facts, **more}


def unplanned(rounds: list[dict[str, Any]], step: float, stock: list[float], theirs: dict[str, list[float]]) -> dict[str, Any]:
    """Judge the take-overs."""
    taken = [one for one in rounds if one["rung"] == "take-over"]
    medians = {how: statistics.median(one["seconds"] for one in taken if one["fault"] == how) for how in {one["fault"] for one in taken}}
    quick = [one["seconds"] for one in taken if one["fault"] != "stopped"]
    by_rank = {
        rank: statistics.median(one["seconds"] for one in taken if one["rank"] == rank and one["fault"] != "stopped")
        for rank in range(RANKS)
    }
    limits = {"killed": 0.3 + step, "raising": 0.3 + step, "stopped": 0.3 + step + max(3 * step, 2.0)}
    ratios = {how: statistics.median(theirs[how]) / medians[how] for how in medians if theirs.get(how)}
    goals = {
        "seconds": all(medians[how] <= limits[how] for how in medians),
        "torchrun_ratio": all(ratio >= 20 for how, ratio in ratios.items() if how != "stopped"),  # noqa: PLR2004 (the goal)
        "roles": max(by_rank.values()) <= 1.2 * min(by_rank.values()),
        "p99": max(quick) <= 3 * statistics.median(quick),
        "steps_lost": all(one["steps_lost"] <= 1 for one in taken),
        "rung": len(taken) == len(rounds),
    }
    return figure(
        quick,
        {name: round(limit, 4) for name, limit in limits.items()},
        met=all(goals.values()),
        goals_met=goals,
        by_fault={how: round(value, 4) for how, value in medians.items()},
        by_rank={str(rank): round(value, 4) for rank, value in by_rank.items()},
        step=round(step, 4),
        torchrun={how: [round(value, 3) for value in values] for how, values in theirs.items()},
        torchrun_ratio={how: round(value, 1) for how, value in ratios.items()},
        restart_rung=[round(value, 3) for value in stock],
        rounds=rounds,
    )


class Bench:
    """All that is measured, round by round."""

    def __init__(self, folder: Path, environment: dict[str, str], only: set[str]) -> None:
        self.folder, self.environment, self.only = folder, environment, only
        self.taken: list[dict[str, Any]] = []
        self.moves: list[dict[str, float]] = []
        self.stock: list[float] = []
        self.bare: list[float] = []
        self.theirs: dict[str, list[float]] = {how: [] for how in FAULTS}
        self.steps: list[float] = []

    def round(self, number: int) -> None:
        """Measure everything once, each next to what it is compared with."""
        self._managed(number)
        if self.only & {"unplanned", "floor"}:
            self.bare += floor(5)
        if "unplanned" in self.only:
            self._others(number)

    def _managed(self, number: int) -> None:
        job = Job(self.folder / f"managed-{number}", self.environment, stock=False)
        try:
            for how in FAULTS if self.only & {"unplanned", "memory"} else ():
                for rank in range(RANKS):
                    self.taken.append(job.recover(rank, how))
                    print(f"round {number + 1}: {self.taken[-1]}", flush=True)
            if "planned" in self.only:
                self.moves.append(job.move(number % RANKS))
                print(f"round {number + 1}: rank {number % RANKS} moved by plan: {self.moves[-1]}", flush=True)
            self.steps += job.step_seconds()
        finally:
            job.close()

    def _others(self, number: int) -> None:
        restarted = Job(self.folder / f"stock-{number}", self.environment, stock=True)
        try:
            self.stock.append(restarted.recover(number % RANKS, "killed")["seconds"])
        finally:
            restarted.close()
        for how in FAULTS:
            self.theirs[how].append(torchrun_round(self.folder / f"torchrun-{how}-{number}", (number + 1) % RANKS, how))
            print(f"round {number + 1}: torchrun, {how}: {self.theirs[how][-1]:.2f} s; restart rung: {self.stock[-1]:.2f} s", flush=True)

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        step, found = statistics.median(self.steps), dict[str, Any]()
        if self.taken:
            found["unplanned"] = unplanned(self.taken, step, self.stock, self.theirs)
            memory = [one["memory"] for one in self.taken if one["memory"]]
            found["memory"] = figure(memory, MEMORY, met=bool(memory) and statistics.median(memory) <= MEMORY)
        if self.bare:
            ours = found["unplanned"]["by_fault"].get("killed") if self.taken else None
            ratio = 0.0 if ours is None else (ours - step) / statistics.median(self.bare)
            goal = "a killed rank, one step left out, within 3 times of it"
            found["floor"] = figure(self.bare, goal, met=0 < ratio <= OVER_FLOOR, ratio=round(ratio, 2))
        if self.moves:
            pauses, slow = [one["pause"] for one in self.moves], statistics.median(one["preparing"] for one in self.moves)
            met = statistics.median(pauses) <= step + 0.1 and slow <= PREPARING
            more = {"preparing": round(slow, 3), "step": round(step, 4), "moves": self.moves}
            found["planned"] = figure(pauses, round(step + 0.1, 4), met=met, **more)
        return found


def main() -> None:
    """Measure, tell, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all faults; each takes about three minutes")
    parser.add_argument("--only", nargs="*", default=["unplanned", "floor", "planned", "memory"], metavar="KEY")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder, prefect(Path(folder)) as environment:
        bench = Bench(Path(folder), environment, set(given.only))
        for number in range(given.rounds):
            bench.round(number)
        found = bench.result()
    found["setting"] = {"ranks": RANKS, "cores": os.cpu_count(), "rounds": given.rounds, "simulated": "nothing"}
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
