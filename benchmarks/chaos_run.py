"""A training job with random real faults, and which guarantees it keeps.

A DDP job of three ranks on four local nodes with managed groups, a hot spare, snapshots in memory with replicas, and checkpoints. It is
compared with the same job undisturbed, to the same last step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from sqlmodel import select

from benchmarks.controlled import ControlledJob
from benchmarks.havoc import DISK_BYTES, KINDS, LONGEST, Havoc
from benchmarks.measuring import spread
from holdfast.accounting import losses as accounts
from holdfast.detectors.training.groups import REPLACE_RANKS_FAILED
from holdfast.detectors.training.progress import OVERRUN
from holdfast.history import cordons, models, queries

NODES: Final = 4
PLAN: Final[dict[str, Any]] = {"nnodes": 3, "nproc_per_node": 1, "spare_nodes": 1, "hot_spares": 1}
TRAINING: Final = ["--pace", "0", "--momentum", "0.9", "--dropout", "0.1"]
TIMEOUTS: Final[dict[str, Any]] = {"hang": "2s", "recovery": {"retry_step": "8s", "replace_ranks": "8s", "restart_workers": "20s"}}
"""Recoveries take a second; the defaults are for jobs of which that cannot be known."""
REST: Final = "0.03"
SAVE_EVERY: Final = 20
AT_ONCE: Final = 0.2
"""Share of the faults that come while the one before is still being answered."""
QUIET: Final = 4
"""Steps that all ranks make before the next fault, else."""
LAST: Final = 40
"""Steps from the last fault to the end of the training: more than any rank may be ahead of the others."""
LEAST_KINDS: Final = 12
REATTACHED: Final = "a new flow reattached"
"""How the event of a controller begins that has taken over from a killed one."""
POLICY: Final = (
    "max_restarts_in_place: 100000\nmax_recoveries: 100000\n"  # hundreds of faults an hour are not what budgets are made for
    "recurring: {times: 0}\nflapping: {times: 0}\n"  # nor is a node that loses power every other minute to be kept
)


class Broken(Exception):
    """A broken guarantee."""


class ChaosRun:
    """One run of *faults* faults, drawn by *seed*."""

    def __init__(self, place: Path, environment: dict[str, str], faults: int, seed: int, only: list[str]) -> None:
        self.place, self.faults, self.seed, self._environment = place, faults, seed, environment
        self.kinds = only or list(KINDS)
        self.dice = random.Random(seed)  # noqa: S311 (the same faults for the same seed)
        self.done = 0
        """Faults that have happened."""

    def play(self) -> dict[str, Any]:
        """Break a job, let it end, train the same undisturbed, and say what came of it."""
        broken, begin = self.place / "chaos", time.monotonic()
        broken.mkdir(parents=True)
        (broken / "policy.yaml").write_text(POLICY)
        own_disk = self.mount(broken / "checkpoints")
        job = self.start(broken, count=NODES, **PLAN, policy=str(broken / "policy.yaml"), checkpoint={"interval": SAVE_EVERY})
        try:
            havoc = Havoc(job, self.dice, own_disk)
            self.wreak(havoc)
            last = self.end(job)
            left = job.left()
            found = {**self.summary(havoc), **self.record(havoc), "steps": last, "processes_left": left, **self.compare(job, last)}
        finally:
            job.close()
            if own_disk:
                subprocess.run(["/bin/umount", "-l", str(broken / "checkpoints")], check=True)
        return {**found, "minutes": round((time.monotonic() - begin) / 60, 1)}

    def start(self, place: Path, *more: str, rest: str = REST, **fields: Any) -> ControlledJob:  # noqa: ANN401 (fields of a job)
        """Start a job whose end can be compared."""
        args = [*TRAINING, "--rest", rest, "--result", str(place / "result.json"), *more]
        return ControlledJob(place, self._environment, args=args, **{"timeouts": TIMEOUTS, **fields})

    def mount(self, place: Path) -> bool:
        """Give the checkpoints a small file system of their own; return whether that can be."""
        place.mkdir()
        if os.geteuid() != 0:
            return False
        command = ["/bin/mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    # -- the run ------------------------------------------------------------------------------------------------------

    def wreak(self, havoc: Havoc) -> None:
        """Inject all faults: every kind in turn, each round in random order."""
        job, bag = havoc.job, list[str]()
        job.until(lambda: job.chaos.step() > 0 and job.at_work(), "the first step", seconds=180)
        job.goes_on(2 * SAVE_EVERY)
        impossible = 0
        while len(havoc.done) < self.faults:
            bag = bag or self.dice.sample(self.kinds, len(self.kinds))
            if not havoc.wreak(bag.pop()):
                impossible += 1
                if impossible > 20 * self.faults:
                    raise Broken("hardly any fault was possible")
                continue
            self.done, one = len(havoc.done), havoc.done[-1]
            print(f"{len(havoc.done):3d} {one.kind}: {one.what} (step {job.chaos.step()})", flush=True)
            if self.dice.random() < AT_ONCE:
                time.sleep(self.dice.uniform(0.0, 1.0))
            else:
                job.goes_on(QUIET, seconds=LONGEST)
        job.goes_on(QUIET, seconds=LONGEST)

    def end(self, job: ControlledJob) -> int:
        """Have the training end some steps from now; return its last step.

        The ranks' own notes say where they are: the history knows less while a new flow catches up with a killed one.
        """
        last = max(step for _, step in losses(job)) + LAST
        beside = job.checkpoints / ".last-step"
        beside.write_text(str(last))
        beside.replace(job.checkpoints / "last-step")
        status = job.ends()
        if status != 0:
            raise Broken(f"the job ended with status {status}, state {job.state()}\n{job.logs()}")
        if (ended := (result(job.place) or {}).get("step")) != last:
            raise Broken(f"the training was to end after step {last}, and ended after step {ended}: there is nothing to compare it with")
        return last

    # -- what came of it ----------------------------------------------------------------------------------------------

    def summary(self, havoc: Havoc) -> dict[str, Any]:
        """Return what happened, and how it was answered."""
        job = havoc.job
        rows = job.incidents()
        downtimes: dict[str, list[float]] = {}
        for row in rows:
            cause = next((one.kind for one in reversed(havoc.done) if one.at <= row.detected_at), "before the first fault")
            downtimes.setdefault(cause, []).append(row.downtime_s or 0.0)
        kinds = Counter(one.kind for one in havoc.done)
        isolated = {node: [*put_out(job, node), *excluded(job, node)] for node in job.nodes.names()}
        seen = Counter(one.kind for one in queries.faults(job.history, job.row.id))
        return {
            "faults": len(havoc.done),
            "seed": self.seed,
            "kinds": {
                kind: {"faults": count, "incidents": len(downtimes.get(kind, ())), "downtime_s": median(downtimes.get(kind, []))}
                for kind, count in sorted(kinds.items())
            },
            "kept_back": havoc.awaited,
            "impossible": dict(havoc.impossible),
            "incidents": len(rows),
            "decisions": len(queries.decisions(job.history, job.row.id)),
            "attempts_out_of_time": seen[OVERRUN.id],
            "attempts_refused": seen[REPLACE_RANKS_FAILED.id],
            "outcomes": dict(Counter(row.outcome for row in rows)),
            "actions": dict(Counter(row.action for row in rows)),
            "generations": len(queries.generations(job.history, job.row.id)),
            "steps_computed_twice": accounts.losses(job.history, job.row).steps_lost or 0,
            "downtime": spread([row.downtime_s for row in rows if row.downtime_s is not None]),
            "nodes_isolated": {node: reason for node, reason in isolated.items() if reason},
        }

    def record(self, havoc: Havoc) -> dict[str, Any]:
        """Return what the simulator needs to predict the run, and what it is compared with; times are seconds since the first step."""
        job, curve = havoc.job, queries.curve(havoc.job.history, havoc.job.row.id)
        begin, end, costs = curve[0].at - curve[0].seconds, curve[-1].at, accounts.losses(job.history, job.row)
        decisions, phases = defaultdict[str, list[str]](list), defaultdict[str, dict[str, float]](dict)
        for one in queries.decisions(job.history, job.row.id):
            decisions[one.incident_id].append(one.action)
        for phase in queries.phases(job.history, job_id=job.row.id):
            phases[phase.incident_id][phase.name] = round(phases[phase.incident_id].get(phase.name, 0.0) + phase.seconds, 4)

        def since(at: float | None) -> float | None:
            return None if at is None else round(at - begin, 3)

        return {
            "wall_s": round(end - begin, 3),
            "step_s": median([row.seconds for row in curve]),
            "downtime_s": round(costs.downtime_s, 3),
            "steps_recomputed": costs.steps_lost or 0,
            "fault_list": [
                {**asdict(one), "at": since(one.at), "hits": [{**asdict(hit), "at": since(hit.at)} for hit in one.hits]}
                for one in havoc.done
            ],
            "reattached": [since(one.at) for one in queries.job_events(job.history, job.row.id) if one.text.startswith(REATTACHED)],
            "incident_list": [
                {
                    "at": since(row.fault_at), "kind": row.kind, "target": row.target, "actions": decisions[row.id], "outcome": row.outcome,
                    "downtime_s": None if row.downtime_s is None else round(row.downtime_s, 3), "steps_recomputed": row.steps_lost,
                    "phases": phases[row.id],
                }
                for row in job.incidents()
            ],
        }  # fmt: skip

    def compare(self, job: ControlledJob, last: int) -> dict[str, Any]:
        """Train the same undisturbed, and compare every loss and the parameters."""
        calm = self.start(
            self.place / "calm",
            *["--steps", str(last)],
            rest="0",
            count=PLAN["nnodes"],
            nnodes=PLAN["nnodes"],
            nproc_per_node=PLAN["nproc_per_node"],
            checkpoint={"interval": 0, "memory": {"interval": 0}},
        )
        try:
            if calm.ends(600.0) != 0 or calm.incidents():
                raise Broken(f"the undisturbed run failed, state {calm.state()}\n{calm.logs()}")
            curve, whole = ({row.step: row.loss for row in queries.curve(one.history, one.row.id)} for one in (job, calm))
            noted = [losses(one) for one in (job, calm)]
        finally:
            calm.close()
        results = [result(place) for place in (job.place, calm.place)]
        every = set(range(1, last + 1))
        missing = every - {step for _, step in noted[0]}
        differing = sorted(step for (rank, step), loss in noted[0].items() if noted[1].get((rank, step)) != loss)
        return {
            "steps_lost": len(missing),
            "losses_compared": len(noted[0]),
            "losses_not_noted": last * job.ranks - len(noted[0]),
            "losses_differ": len(differing),
            "losses_differ_at": differing[:10],
            "history_without": sorted(every - curve.keys()),
            "history_without_loss": sorted(step for step, loss in curve.items() if loss is None),  # lost with rank 0
            "history_differs_at": sorted(step for step, loss in curve.items() if loss is not None and loss != whole.get(step)),
            "bit_equal": results[0] is not None and results[0] == results[1],
        }


def put_out(job: ControlledJob, node: str) -> list[str]:
    """Return why *node* was ever taken out of service."""
    return [one.reason for one in cordons.history_of(job.history, job.nodes.name, node)]


def excluded(job: ControlledJob, node: str) -> list[str]:
    """Return why the job ever released *node* although it answered."""
    query = select(models.NodeStatusChange).where(models.NodeStatusChange.node == node, models.NodeStatusChange.status == "excluded")
    with job.history.session() as session:
        return [one.reason for one in session.exec(query)]


class Noted(Protocol):
    """A job whose ranks note their losses."""

    @property
    def place(self) -> Path:
        """Return its folder."""
        ...

    @property
    def ranks(self) -> int:
        """Return how many there are."""
        ...


def losses(job: Noted) -> dict[tuple[int, int], str]:
    """Return what every rank noted itself, by rank and step, of steps that count; of what was computed twice the newest."""
    return {
        (rank, int(line.split()[0])): line.split()[1]
        for rank in range(job.ranks)
        for line in (job.place / f"losses-{rank}.txt").read_text().split("\n")[:-1]
    }


def result(place: Path) -> dict[str, Any] | None:
    """Return what a job has written at its end."""
    with suppress(OSError):
        return dict(json.loads((place / "result.json").read_text()))
    return None


def median(values: list[float]) -> float | None:
    """Return the median; nothing of nothing."""
    return round(statistics.median(values), 3) if values else None


def promises(found: dict[str, Any]) -> dict[str, int]:
    """Return how often each guarantee was broken."""
    return {
        "committed steps lost": found["steps_lost"] + found["losses_differ"],
        "losses of the history that differ": len(found["history_differs_at"]),
        "parameters that differ": 0 if found["bit_equal"] else 1,
        "nodes wrongly isolated": len(found["nodes_isolated"]),
        "processes left over": len(found["processes_left"]),
        "incidents that ended badly": sum(count for how, count in found["outcomes"].items() if how not in ("recovered", "passed")),
        "kinds of faults too few": max(0, LEAST_KINDS - len(found["kinds"])) if found["faults"] >= LEAST_KINDS else 0,
    }
