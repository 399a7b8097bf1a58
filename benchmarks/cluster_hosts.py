"""Rows of `benchmarks.cluster` on real hosts: network namespaces of this machine with SSH servers, jobs over SSH (see `tests/hosts/`).

- ``hosts-faults``: 3 hosts that train, one rank each, and a spare host with a hot spare on it. A rank is killed (SIGKILL); a host loses its
  power without a word; the switch loses all that a host sends and is sent. The clock starts at the fault and ends when the last rank is
  done with the first new step. Each round is a job of its own. Beside it the whole launch, from the start of the flow to that of training.
- ``hosts-reconnect``: a host that trains is cut off from the orchestrator alone for some seconds. The clock starts when its cable is mended
  and ends when the history has a step that was made after that; `steps` are those that went on meanwhile, `incidents` must be none.
- ``hosts-takeover``: a second flow stands by; the first is killed. The clock ends when the second holds the lease, and when the history
  has a step that was made after the kill.
- ``hosts-launch-16``: the launch of 16 hosts, one rank each.

All hosts share the cores of this machine, and all ranks import torch on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import spread, wait_for
from benchmarks.steps import Done
from holdfast.cli.watch import request_stop
from holdfast.history import holder_of, queries
from tests.hosts.job import HostJob, set_up
from tests.hosts.rack import Rack

Line = dict[str, Any]
GOALS: Final = {"killed rank": 1.0, "killed host": 4.0, "cut host": 5.0}
TAKEOVER: Final = 5.0
CUT_SECONDS: Final = 5.0
QUIET: Final = 20
"""Steps without disturbance before a fault."""
SPARE_MEMORY: Final = "256m"


def faults(folder: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Yield what faults of ranks and hosts cost, and launches."""
    seconds: dict[str, list[float]] = {name: [] for name in GOALS}
    actions: dict[str, set[str]] = {name: set() for name in GOALS}
    launches: list[float] = []
    with Rack(folder / "rack", 4, memory=SPARE_MEMORY) as rack:
        set_up(rack)
        for number in range(rounds):
            for what in ("killed host", "cut host"):
                with running(rack, folder / f"job-{number}-{what.partition(' ')[0]}", environment, launches) as job:
                    for kind in ("killed rank", what):
                        took, action = recovered(job, (number + len(kind)) % job.ranks, kind)
                        seconds[kind].append(took)
                        actions[kind].add(action)
                for host in rack:
                    host.heal()
                    if not host.is_on:
                        host.power_on()
                        host.serve()
    for kind, goal in GOALS.items():
        yield row(f"fault to first new step, {kind}", seconds[kind], goal, actions=sorted(actions[kind]))
    yield row("launch of 4 hosts", launches, None)


@contextmanager
def running(rack: Rack, place: Path, environment: dict[str, str], launches: list[float], **given: Any) -> Iterator[HostJob]:  # noqa: ANN401 (fields of a job)
    """Yield a job that trains, its hot spare parked; stop it afterwards."""
    job = HostJob(rack, place, environment, **given)
    try:
        begun = time.time()
        flow = job.start()
        job.until(lambda: job.step() >= 1, "the first step", 600)
        launches.append(max(min(one.at for one in lines) for lines in job.done().values()) - begun)
        job.settles(QUIET)
        yield job
        request_stop(job.history, job.row)
        flow.wait(120)
    finally:
        job.close()


def recovered(job: HostJob, rank: int, kind: str) -> tuple[float, str]:
    """Break *rank* or its host; return the seconds until all ranks were done with a new step, and how the job recovered."""
    job.settles(QUIET)
    known, before = len(job.incidents()), job.step()
    host, pid = job.host_of(rank), job.chaos.ranks()[rank].pid
    breaks: dict[str, Callable[[], object]] = {
        "killed rank": lambda: host.run("kill", "-KILL", str(pid)),
        "killed host": host.power_off,
        "cut host": host.strand,
    }
    at = time.time()
    breaks[kind]()
    job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), f"the end of {kind}")
    job.runs(QUIET)
    row = job.incidents()[known]
    if row.outcome != "recovered" or row.fault_at < at - 1:
        raise RuntimeError(f"{kind}: {row.outcome}, {row.reason}")
    assert job.step() > before
    return max(back(lines, at) for lines in job.done().values()) - at, str(row.action)


def back(lines: list[Done], since: float) -> float:
    """Return when the longest pause of a rank ended that ended after *since*: steps that were in flight end soon, and are no new ones."""
    passed = [(later.at - earlier.at, later.at) for earlier, later in pairwise(lines) if later.at > since]
    return max(passed)[1]


def reconnect(folder: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Yield how long it takes until a host is reachable again, and what went on meanwhile."""
    found, steps = [], []
    with Rack(folder / "rack", 4, memory=SPARE_MEMORY) as rack:
        set_up(rack)
        with running(rack, folder / "job", environment, []) as job:
            for number in range(rounds):
                host, before = job.host_of(number % job.ranks), job.step()
                host.cut("orchestrator")
                time.sleep(CUT_SECONDS)
                steps.append(job.step() - before)
                newest, at = job.step(), time.time()
                host.heal()
                history_has(job, newest)
                found.append(time.time() - at)
                job.runs(QUIET)
            incidents = len(job.incidents())
    yield row("host reachable again after its network path to the orchestrator is restored", found, None, steps=steps, incidents=incidents)


def history_has(job: HostJob, newest: int) -> None:
    """Wait until the history has a step after *newest*."""
    wait_for(lambda: newest_step(job) > newest, f"a step after {newest} in the history")


def await_takeover(job: HostJob, epoch: int) -> None:
    """Wait until somebody holds the lease who took it after *epoch*."""

    def taken() -> bool:
        lease = holder_of(job.history, job.row.id)
        return lease is not None and lease.epoch > epoch

    wait_for(taken, "another holder of the lease")


def newest_step(job: HostJob) -> int:
    """Return the newest step that the history has."""
    newest = queries.last_step(job.history, job.row.id)
    return newest.step if newest is not None else 0


def takeover(folder: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Yield how soon a standby controller takes over a job whose controller was killed."""
    held, resumed = [], []
    with Rack(folder / "rack", 4, memory=SPARE_MEMORY) as rack:
        set_up(rack)
        with running(rack, folder / "job", environment, []) as job:
            flow = job.flows[-1]
            for _ in range(rounds):
                following = job.start(standby=True)
                job.until(lambda: job.stands_by(len(job.flows) - 1), "a flow that stands by")
                lease, newest, at = holder_of(job.history, job.row.id), job.step(), time.time()
                assert lease is not None
                flow.kill()
                flow.wait()
                await_takeover(job, lease.epoch)
                held.append(time.time() - at)
                history_has(job, newest)
                resumed.append(time.time() - at)
                job.runs(QUIET)
                flow = following
            incidents = len(job.incidents())
    yield row("failover from a dead controller, until its place is taken", held, TAKEOVER, incidents=incidents)
    yield row("failover from a dead controller, until the history goes on", resumed, TAKEOVER, incidents=incidents)


def launch(count: int, folder: Path, environment: dict[str, str], rounds: int) -> Iterator[Line]:
    """Yield how long a job on *count* hosts takes from the flow's start to the first step of all ranks, and setting the hosts up before."""
    launches: list[float] = []
    with Rack(folder / "rack", count, memory="96m") as rack:
        begun = time.time()
        set_up(rack)
        bootstrapped = time.time() - begun
        for number in range(rounds):
            with running(rack, folder / f"job-{number}", environment, launches, spare=0):
                pass
    yield row(f"launch of {count} hosts", launches, None)
    yield row(f"bootstrap of {count} hosts", [bootstrapped], None)


def row(what: str, seconds: list[float], goal: float | None, **details: Any) -> Line:  # noqa: ANN401 (JSON)
    """Return a line of the results."""
    found = spread(seconds)
    met = None if goal is None else bool(seconds) and found["median"] <= goal
    return {"what": what, **found, "goal": goal, "met": met, **details}
