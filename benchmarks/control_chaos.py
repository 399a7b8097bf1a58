"""Jobs on real hosts over SSH with parts of their control plane killed, and which guarantees they keep."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_run import losses, result
from benchmarks.control_jobs import NODES, STEPS, HostsJob
from benchmarks.control_parts import Host as FlowHost
from benchmarks.control_parts import Plane, Program, idle, nap
from benchmarks.measuring import spread, wait_for
from holdfast.errors import HistoryError, WorldError
from holdfast.history import History, holder_of, models, queries
from tests.hosts.job import set_up
from tests.hosts.rack import Rack

PARTS: Final = ("flow", "worker", "prefect-server", "postgresql", "agent", "sshd")
DRAWN: Final[list[tuple[str, ...]]] = [*((one,) for one in PARTS), *combinations(PARTS, 2)]
LONGEST: Final = 240.0
LEFT: Final = 90.0
"""Seconds after which nothing may be left: an agent that no flow gave an order ends by itself after 60."""
RECOVERING: Final = 0.8
"""Share of the rounds in which a rank is killed before, so that a recovery is in work."""
RECOVERY: Final = 1.5
"""Seconds from the end of a rank within which a part is killed: longer than most recoveries."""
AWAY: Final = 4.0
"""Seconds after which a part is brought back, at most; parts come back one after another."""


class Broken(Exception):
    """A broken guarantee."""


class ControlChaos:
    """Rounds on the same hosts: three with SSH servers for agents and ranks, two with a Prefect worker each for the flows."""

    def __init__(self, place: Path, made: Plane, history: History, hosts: list[FlowHost], seed: int) -> None:
        self.place, self.plane, self.history, self.hosts, self.seed = place, made, history, hosts, seed
        self.dice = random.Random(seed)  # noqa: S311 (the same faults for the same seed)
        self.workers: list[Program] = []
        self._lease: models.Lease | None = None
        self._missed: list[str] = []

    def play(self, count: int, only: list[tuple[str, ...]]) -> dict[str, Any]:
        """Play *count* rounds, with *only* these parts where some are named; return what came of them."""
        with Rack(self.place / "rack", NODES) as rack:
            set_up(rack)
            return summary_of(self._rounds(rack, count, only or DRAWN), self.seed)

    def _rounds(self, rack: Rack, count: int, drawn: list[tuple[str, ...]]) -> list[dict[str, Any]]:
        self.plane.deploy()
        self.workers = [self.plane.worker(host) for host in self.hosts]
        for worker in self.workers:
            worker.begin()
        calm = self._calm(rack)
        bag, found = list[tuple[str, ...]](), list[dict[str, Any]]()
        for number in range(count):
            bag = bag or self.dice.sample(drawn, len(drawn))
            parts, begun = bag.pop(), time.monotonic()
            try:
                came = self._round(number, parts, calm, rack)
            except (Broken, TimeoutError, HistoryError) as error:
                came = {"broken": [str(error)]}
            found.append({"round": number, "parts": "+".join(parts), "seconds": round(time.monotonic() - begun, 1), **came})
            print(json.dumps(found[-1]), flush=True)
        return found

    def _calm(self, rack: Rack) -> HostsJob:
        """Return a job of the same training that nobody disturbed."""
        job = HostsJob(self.place / "calm", self.history, rack, checkpoint={"interval": 0, "memory": {"interval": 0}})
        self.plane.submit(job.described)
        self._ends(job)
        job.close()
        if queries.incidents(self.history, job.row.id):
            raise Broken("the undisturbed run failed")
        return job

    def _ends(self, job: HostsJob) -> None:
        wait_for(lambda: job.state() in {"COMPLETED", "FAILED", "CANCELLED"}, "the end of the job", every=0.2, seconds=LONGEST)
        if job.state() != "COMPLETED":
            raise Broken(f"the job ended as {job.state()}")
        wait_for(lambda: all(idle(worker) for worker in self.workers), "the end of both flows", every=0.2, seconds=LONGEST)

    def _round(self, number: int, parts: tuple[str, ...], calm: HostsJob, rack: Rack) -> dict[str, Any]:
        """Play one job, kill *parts* in it once, and look at what is left."""
        job = HostsJob(self.place / f"round-{number:03d}", self.history, rack)
        try:
            for _ in self.workers:
                self.plane.submit({**job.described, "standby": True})
            first = self.dice.randrange(10, 60)
            wait_for(lambda: job.step() > first, "the first steps", every=0.05, seconds=LONGEST)
            killed, at = self._break(parts, job)
            self._restock(job)
            self._ends(job)
            return {"ranks_killed": killed, "missed": self._missed, "in_state": state_at(job, at), **self._judged(job, calm)}
        except (TimeoutError, Broken) as error:
            raise Broken(f"{error}; state {job.state()}; see {job.place}") from error
        finally:
            job.close()
            for worker in self.workers:
                if not idle(worker):  # a flow that did not end must not spoil the next round
                    worker.kill()
                    worker.begin()

    def _break(self, parts: tuple[str, ...], job: HostsJob) -> tuple[int, float]:
        """Kill *parts*, mostly within a recovery, and bring them back; return how many ranks were killed too, and when it began."""
        killed, self._missed = 0, []
        if self.dice.random() < RECOVERING:
            killed += job.kill_rank(self.dice)
            nap(self.dice.uniform(0.0, RECOVERY))
        at, back = time.time(), list[Callable[[], None]]()
        for part in parts:
            back.append(self._kill(part, job))
            nap(self.dice.uniform(0.0, 0.3))
        if self.dice.random() < 0.5 and "postgresql" in parts:  # noqa: PLR2004 (every other one)
            with suppress(WorldError):
                killed += job.kill_rank(self.dice)
        for again in self.dice.sample(back, len(back)):
            nap(self.dice.uniform(0.0, AWAY))
            again()
        return killed, at

    def _kill(self, part: str, job: HostsJob) -> Callable[[], None]:
        """Kill a part; return what brings it back."""
        match part:
            case "postgresql":
                self.plane.postgres.stop()
                return self.plane.postgres.start
            case "prefect-server":
                self.plane.server.kill()
                return self.plane.server.begin
            case "agent":
                self._note(part, hit=job.kill_agent(self.dice))
                return lambda: None
            case "sshd":
                return job.kill_sshd(self.dice)
        lease = self._lease = (
            job.lease_holder() or self._lease
        )  # of the controller, or of the last one when the history could last be asked
        if part == "worker":
            holders = [
                one for host, one in zip(self.hosts, self.workers, strict=True) if lease and host.name == lease.host.partition("/")[0]
            ]
            worker = holders[0] if holders else self.dice.choice(self.workers)
            worker.kill()
            return worker.begin
        self._note(part, hit=lease is not None and ended(lease.pid))
        return lambda: None

    def _note(self, part: str, *, hit: bool) -> None:
        """Remember a part that was not there to be killed."""
        if not hit:
            self._missed.append(part)

    def _restock(self, job: HostsJob) -> None:
        """Bring back what a service manager would, and have a flow for the job on each host."""
        self.plane.begin()
        for worker in self.workers:
            if not worker.lives():
                worker.begin()
        if job.state() not in {"COMPLETED", "FAILED"}:
            self.plane.submit({**job.described, "standby": True})

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _judged(self, job: HostsJob, calm: HostsJob) -> dict[str, Any]:
        """Return which guarantees were broken, and what happened."""
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
        moves = queries.transitions(self.history, row.id)
        broken += [f"{one.after} is followed by a move from {two.before}" for one, two in pairwise(moves) if one.after != two.before]
        incidents = queries.incidents(self.history, row.id)
        for one in incidents:
            if one.closed_at is None or one.outcome not in {"recovered", "passed"}:
                broken.append(f"incident {one.number} ended as {one.outcome}")
            if one.outcome == "recovered" and not queries.decisions(self.history, incident_id=one.id):
                broken.append(f"incident {one.number} has no decision")
        numbers = [one.number for one in queries.generations(self.history, row.id)]
        with suppress(TimeoutError):  # a flow whose worker was killed is nobody's child, and may still be at its last words
            wait_for(lambda: not job.left() and not holder_of(self.history, row.id), "the end of all", every=0.2, seconds=LEFT)
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
            "flows": len(job.reattached()) + 1,
            "rows_refused": refused,
        }


def ended(pid: int) -> bool:
    """End a process of this machine; return whether it was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def state_at(job: HostsJob, at: float) -> str:
    """Return the state that the job was in at a moment."""
    before = [one.after for one in queries.transitions(job.history, job.row.id) if one.at <= at]
    return before[-1] if before else ""


def summary_of(rounds: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the line of the chaos: how many rounds kept all guarantees."""
    bad = [one for one in rounds if one["broken"]]
    parts = Counter(one["parts"] for one in rounds)
    states = Counter(one.get("in_state", "") for one in rounds)
    return {
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
