"""Whether jobs keep their promises while their control plane is being killed, part by part and in pairs, and how soon a standby takes over.

    python -m benchmarks.control_plane --json FILE [--rounds 100] [--takeovers 10] [--seed S] [--only KEY ...]

PostgreSQL holds the history and Prefect's own database; two hosts with a Prefect worker each run the deployed flow, one of them as the
standby. Hosts are process groups with homes and, as root, host names of their own; nodes are groups of processes of this machine.

- ``takeover``: from SIGKILL, or SIGSTOP, of the flow that steers, to the moment when the standby on the other host has adopted the job.
- ``chaos``: each round is one job of two ranks whose flow, worker, Prefect server or PostgreSQL is killed, alone or in pairs, while it
  trains or at some moment of a recovery. Promised, or the exit status is 1: it ends with the losses and parameters of an undisturbed run,
  bit for bit; each step, and each move, incident and decision is on record; no process, memory, spilled row or lease is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_run import TRAINING, losses, result
from benchmarks.control_parts import Plane, Program, idle, nap, plane
from benchmarks.measuring import ROOT, spread, wait_for
from holdfast import vault
from holdfast.chaos import Chaos
from holdfast.cli.watching import request_stop
from holdfast.cluster.local import LocalNodes
from holdfast.errors import HistoryTrouble
from holdfast.history import History, holder_of, models, queries
from holdfast.leftovers import leftovers
from holdfast.process import mark_of

KEYS: Final = ("takeover", "chaos")
GOAL: Final = {"median": 5.0}
PLAN: Final = {"wanted": 2, "ranks": 1, "spare": 1}
STEPS: Final = 300
REST: Final = "0.04"
NODES: Final = 3
LONGEST: Final = 240.0
LEFT: Final = 90.0
"""Seconds after which nothing may be left: an agent that no flow gave an order ends by itself after 60."""
PARTS: Final = ("flow", "worker", "prefect-server", "postgresql")
DRAWN: Final = [(one,) for one in PARTS] + list(combinations(PARTS, 2))
RECOVERY: Final = 0.8
"""Seconds from the end of a rank within which a part is killed: longer than most recoveries."""


class Broken(Exception):
    """A promise that was not kept."""


class Job:
    """One job on nodes of its own."""

    def __init__(self, place: Path, history: History, **fields: Any) -> None:  # noqa: ANN401 (fields of a job)
        place.mkdir(parents=True)
        self.place, self.name, self.history, self.ranks = place, place.name, history, PLAN["wanted"]
        self.nodes = LocalNodes(self.name, place / "nodes", NODES)
        self.chaos = Chaos(self.nodes, history, self.name)
        args = [*TRAINING, "--rest", REST, "--result", str(place / "result.json"), "--steps", str(STEPS)]
        job = {"name": self.name, "script": str(ROOT / "benchmarks" / "train_troubled.py"), "args": args, "directory": str(place)}
        checkpoint = {"directory": str(place / "checkpoints"), "every": 20}
        cluster = {"kind": "local", "name": self.name, "nodes": NODES, "directory": str(place / "nodes")}
        self.described = {"job": {**job, "nodes": PLAN, "checkpoint": checkpoint, **fields}, "cluster": cluster}

    @property
    def row(self) -> models.Job:
        """Return the job's row."""
        return queries.newest_job(self.history, self.name)

    def state(self) -> str:
        """Return the job's state; empty before it has one, and while nobody can tell."""
        with suppress(HistoryTrouble):
            rows = queries.jobs(self.history, self.name, limit=1)
            move = queries.state_of(self.history, rows[0].id) if rows else None
            return move.after if move else ""
        return ""

    def steerer(self) -> models.Lease | None:
        """Return who steers."""
        with suppress(HistoryTrouble):
            rows = queries.jobs(self.history, self.name, limit=1)
            return holder_of(self.history, rows[0].id) if rows else None
        return None

    def step(self) -> int:
        """Return the newest step on record."""
        with suppress(HistoryTrouble):
            return self.chaos.step()
        return 0

    def adopted(self) -> list[float]:
        """Return when flows have adopted the job."""
        return [one.at for one in queries.remarks(self.history, self.row.id) if one.text.startswith("a new flow adopted")]

    def left(self) -> list[str]:
        """Return what is left of it: processes, and what nodes keep in memory."""
        return leftovers(self.place) + [
            str(one) for node in self.nodes.names() for one in vault.vaults_of(mark_of(self.nodes.folder(node)))
        ]

    def close(self) -> None:
        """End what still runs."""
        for node in self.nodes.names():
            self.nodes.clear(node)


class Bench:
    """Two hosts, a plane, and what was measured."""

    def __init__(self, place: Path, made: Plane, seed: int) -> None:
        self._lease: models.Lease | None = None
        self.place, self.plane, self.dice = place, made, random.Random(seed)  # noqa: S311 (the same faults for the same seed)
        self.history = History.open(made.history)
        self.hosts = [made.host(f"host-{name}") for name in "ab"]
        self.workers: list[Program] = []

    # -- takeovers ----------------------------------------------------------------------------------------------------

    def takeovers(self, count: int) -> list[dict[str, Any]]:
        """Have flows die, and standbys take their jobs over, *count* times each by SIGKILL and by SIGSTOP."""
        return [self._takeovers(name, number, count) for name, number in (("sigkill", signal.SIGKILL), ("sigstop", signal.SIGSTOP))]

    def _takeovers(self, name: str, number: int, count: int) -> dict[str, Any]:
        job, times = Job(self.place / f"takeover-{name}", self.history, args=[*TRAINING, "--rest", "0.05"]), list[float]()
        spec = job.place / "spec.json"
        spec.write_text(json.dumps({**job.described, "standby": True}))
        flows = [host.program(f"flow-{name}", sys.executable, "-m", "flows.training_job", str(spec)) for host in self.hosts]
        flows[0].begin()
        wait_for(lambda: job.step() > 0, "the first step", every=0.1, seconds=LONGEST)
        flows[1].begin()
        for turn in range(count):
            times.append(self._takeover(job, number, flows[turn % 2], flows[(turn + 1) % 2]))
            print(f"takeover after {name}: {times[-1]:.2f} s", flush=True)
        incidents = [one.kind for one in queries.incidents(self.history, job.row.id)]
        request_stop(self.history, job.row)
        wait_for(lambda: not any(flow.lives() for flow in flows), "the end of both flows", every=0.1, seconds=LONGEST)
        left = job.left()
        job.close()
        return {"key": f"takeover: {name}", **spread(times), "goal": GOAL, "met": met(times), "incidents": incidents, "left": left}

    def _takeover(self, job: Job, number: int, old: Program, new: Program) -> float:
        """Have the flow *old* end or stop, and *new* follow it; return after how many seconds it did, with *old* standing by."""
        wait_for(lambda: waits(new), "the standby", every=0.1, seconds=LONGEST)
        seen, first, at = len(job.adopted()), job.step(), time.time()
        os.killpg(old.pid, number)
        wait_for(lambda: len(job.adopted()) > seen, "the takeover", every=0.05, seconds=LONGEST)
        seconds = job.adopted()[-1] - at
        wait_for(lambda: job.step() > first + 5, "further steps", every=0.05, seconds=LONGEST)
        old.kill()
        old.log.write_text("")
        old.begin()
        return seconds

    # -- chaos --------------------------------------------------------------------------------------------------------

    def calm(self) -> Job:
        """Return a job of the same training that nobody disturbed."""
        job = Job(self.place / "calm", self.history, checkpoint={"every": 0, "memory": {"every": 0}})
        spec = job.place / "spec.json"
        spec.write_text(json.dumps(job.described))
        flow = self.hosts[0].program("flow-calm", sys.executable, "-m", "flows.training_job", str(spec))
        flow.begin()
        wait_for(lambda: not flow.lives(), "the undisturbed run", every=0.2, seconds=2 * LONGEST)
        if job.state() != "COMPLETED" or queries.incidents(self.history, job.row.id):
            raise Broken(f"the undisturbed run did not go undisturbed: {job.state()}")
        return job

    def chaos(self, rounds: int) -> list[dict[str, Any]]:
        """Kill parts of the control plane in as many jobs as there are *rounds*; return what came of each."""
        calm = self.calm()
        self.plane.deploy()
        self.workers = [self.plane.worker(host) for host in self.hosts]
        for worker in self.workers:
            worker.begin()
        bag, found = list[tuple[str, ...]](), list[dict[str, Any]]()
        for number in range(rounds):
            bag = bag or self.dice.sample(DRAWN, len(DRAWN))
            parts, begun = bag.pop(), time.monotonic()
            try:
                told = self.round(number, parts, calm)
            except (Broken, TimeoutError, HistoryTrouble) as error:
                told = {"broken": [str(error)]}
            found.append({"round": number, "parts": "+".join(parts), "seconds": round(time.monotonic() - begun, 1), **told})
            print(json.dumps(found[-1]), flush=True)
        return found

    def round(self, number: int, parts: tuple[str, ...], calm: Job) -> dict[str, Any]:
        """Play one job, kill *parts* in it once, and look at what is left."""
        job = Job(self.place / f"round-{number:03d}", self.history)
        try:
            for _ in self.workers:
                self.plane.submit({**job.described, "standby": True})
            wait_for(lambda: job.step() > self.dice.randrange(10, 60), "the first steps", every=0.05, seconds=LONGEST)
            recovering = self.dice.random() < 0.8  # noqa: PLR2004 (four rounds of five)
            if recovering:
                job.chaos.kill(self.dice.randrange(job.ranks))
                nap(self.dice.uniform(0.0, RECOVERY))
            at, back = time.time(), list[Callable[[], None]]()
            for part in parts:
                back.append(self.kill(part, job))
                nap(self.dice.uniform(0.0, 0.3))
            if self.dice.random() < 0.5 and "postgresql" in parts:  # noqa: PLR2004 (every other one)
                with suppress(KeyError, ProcessLookupError, HistoryTrouble):
                    self.kill_a_rank(job)
            for again in self.dice.sample(back, len(back)):
                nap(self.dice.uniform(0.0, 4.0))
                again()
            self.restock(job)
            wait_for(lambda: job.state() == "COMPLETED", "the end of the job", every=0.2, seconds=LONGEST)
            wait_for(lambda: all(idle(worker) for worker in self.workers), "the end of both flows", every=0.2, seconds=LONGEST)
            return {"recovering": recovering, "in_state": state_at(job, at), **self.judged(job, calm)}
        except (TimeoutError, Broken) as error:
            raise Broken(f"{error}; state {job.state()}; see {job.place}") from error
        finally:
            job.close()

    def kill_a_rank(self, job: Job) -> None:
        """End a rank while PostgreSQL is away: where ranks live the agents say."""
        node = self.dice.choice(job.nodes.names())
        with suppress(Exception):
            pids = json_of(job, node)["workers"]
            os.kill(int(self.dice.choice(sorted(pids.values()))), signal.SIGKILL)

    def kill(self, part: str, job: Job) -> Callable[[], None]:
        """Kill a part; return what brings it back."""
        if part == "postgresql":
            self.plane.postgres.stop()
            return self.plane.postgres.start
        if part == "prefect-server":
            self.plane.server.kill()
            return self.plane.begin
        lease = self.lease_of(job)
        worker = next(
            (one for host, one in zip(self.hosts, self.workers, strict=True) if lease and host.name == lease.host.partition("/")[0]), None
        )
        if part == "worker":
            worker = worker or self.dice.choice(self.workers)
            worker.kill()
            return worker.begin
        if lease is not None:
            with suppress(ProcessLookupError):
                os.kill(lease.pid, signal.SIGKILL)
        return lambda: None

    def lease_of(self, job: Job) -> models.Lease | None:
        """Return who steers *job*, or did when the history could last be asked."""
        self._lease = job.steerer() or self._lease
        return self._lease

    def restock(self, job: Job) -> None:
        """Bring back what a service manager would, and have a flow for the job on each host."""
        if not self.plane.server.lives():
            self.plane.begin()
        for worker in self.workers:
            if not worker.lives():
                worker.begin()
        if job.state() not in {"COMPLETED", "FAILED"}:
            self.plane.submit({**job.described, "standby": True})

    # -- what came of it ----------------------------------------------------------------------------------------------

    def judged(self, job: Job, calm: Job) -> dict[str, Any]:
        """Return which promises were broken, and what happened."""
        row, broken = job.row, list[str]()
        every = set(range(1, STEPS + 1))
        if result(job.place) is None or result(job.place) != result(calm.place):
            broken.append("parameters differ")
        mine, theirs = losses(job), losses(calm)
        if differing := [key for key, loss in mine.items() if theirs.get(key) != loss]:
            broken.append(f"losses differ at {differing[:3]}")
        curve = {one.step: one.loss for one in queries.curve(self.history, row.id)}
        if missing := sorted(every - curve.keys()):
            broken.append(f"steps without a record: {missing[:10]}")
        moves = queries.moves(self.history, row.id)
        broken += [f"{one.after} is followed by a move from {two.before}" for one, two in pairwise(moves) if one.after != two.before]
        incidents = queries.incidents(self.history, row.id)
        for one in incidents:
            if one.closed_at is None or one.outcome not in {"recovered", "passed"}:
                broken.append(f"incident {one.number} ended as {one.outcome}")
            if one.outcome == "recovered" and not queries.decisions(self.history, incident_id=one.id):
                broken.append(f"incident {one.number} has no decision")
        numbers = [one.number for one in queries.generations(self.history, row.id)]
        with suppress(TimeoutError):
            wait_for(lambda: not job.left(), "the end of all processes", every=0.2, seconds=LEFT)
        broken += [f"left over: {one}" for one in job.left()]
        broken += [f"lease held by {one.holder}" for one in [holder_of(self.history, row.id)] if one]
        spilled = [str(one) for host in self.hosts for one in host.place.glob(f"home/jobs/{job.name}/*.jsonl")]
        broken += [f"spilled rows left in {one}" for one in spilled]
        refused = sum(
            len(one.read_text().splitlines()) for host in self.hosts for one in host.place.glob(f"home/jobs/{job.name}/*.refused")
        )
        return {
            "broken": broken,
            "incidents": [one.kind for one in incidents],
            "generations": numbers,
            "flows": len(job.adopted()) + 1,
            "rows_refused": refused,
        }


def json_of(job: Job, node: str) -> dict[str, Any]:
    """Return what the agent of *node* says of itself."""
    return dict(job.chaos.ask(node))


def waits(flow: Program) -> bool:
    """Tell whether a standby has begun to wait, and lives."""
    return flow.lives() and "standby.waits" in flow.log.read_text(errors="replace")


def state_at(job: Job, at: float) -> str:
    """Return the state that the job was in at a moment."""
    before = [one.after for one in queries.moves(job.history, job.row.id) if one.at <= at]
    return before[-1] if before else ""


def met(times: list[float]) -> bool:
    """Tell whether the goal was met."""
    return bool(times) and spread(times)["median"] <= GOAL["median"]


def main() -> int:
    """Measure, print, and write; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, one object a line")
    parser.add_argument("--rounds", type=int, default=100, help="jobs whose control plane is killed")
    parser.add_argument("--takeovers", type=int, default=10, help="takeovers after SIGKILL, and as many after SIGSTOP")
    parser.add_argument("--seed", type=int, default=1, help="the same seed kills the same parts in the same order")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for homes and logs, which stays")
    given = parser.parse_args()
    lines = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="hf-plane-", ignore_cleanup_errors=True) as temporary:
        folder = given.keep.absolute() if given.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with plane(folder) as made:
            bench = Bench(folder, made, given.seed)
            try:
                if "takeover" in given.only:
                    lines += bench.takeovers(given.takeovers)
                if "chaos" in given.only:
                    lines += told(bench.chaos(given.rounds), given.seed)
            finally:
                for host in bench.hosts:
                    host.close()
                bench.history.close()
    setting = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "simulated": "hosts and nodes are groups of processes on one machine"}
    for line in lines:
        print(json.dumps({**line, **setting}), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps({**line, **setting}) + "\n" for line in lines))
    return 0 if all(line["met"] for line in lines) else 1


def told(rounds: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the line of the chaos: how many rounds kept all promises."""
    bad = [one for one in rounds if one["broken"]]
    parts = Counter(one["parts"] for one in rounds)
    states = Counter(one.get("in_state", "") for one in rounds)
    return [
        {
            "key": "chaos",
            **spread([one["seconds"] for one in rounds]),
            "unit": "s a round",
            "goal": "every promise in every round",
            "met": not bad,
            "kept": len(rounds) - len(bad),
            "seed": seed,
            "parts": dict(parts),
            "killed_in_state": dict(states),
            "broken": bad,
        }
    ]


if __name__ == "__main__":
    sys.exit(main())
