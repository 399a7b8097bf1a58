"""Results of simulations: of one run, of all runs of a system, and the file that keeps finished runs."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError

from holdfast import __version__
from holdfast.errors import BadFile, Problem
from holdfast.simulator import accounts
from holdfast.simulator.accounts import CATEGORIES, JobAccount
from holdfast.simulator.scenario import Scenario
from holdfast.simulator.systems import SYSTEMS, RecoverySystem
from holdfast.spec.files.problems import shown

WEEK: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What happened to one job."""

    incidents: int
    faults: int
    actions: Mapping[str, int]
    """Decided recovery actions."""
    timed_out: Mapping[str, int]
    """Attempts that were cut off by the policy's timeouts."""
    failures: int
    failed_reason: str
    steps_lost: int
    downtime_median: float | None
    """Seconds from an incident until training went on, without the rollback; None: no incident."""
    downtime_p99: float | None
    downtime_total: float
    """Seconds of all incidents."""
    completed_at: float | None
    interval: float
    """Seconds of training between two checkpoints on disk."""

    @classmethod
    def of(cls, account: JobAccount, interval: float) -> Self:
        """Return the result in *account*."""
        ordered = sorted(account.downtime)
        return cls(
            incidents=account.incidents,
            faults=account.faults,
            actions={str(name): number for name, number in account.actions.items()},
            timed_out={str(name): number for name, number in account.timed_out.items()},
            failures=account.failures,
            failed_reason=account.failed_reason,
            steps_lost=account.steps_lost,
            downtime_median=statistics.median(ordered) if ordered else None,
            downtime_p99=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else None,
            downtime_total=sum(ordered),
            completed_at=account.completed_at,
            interval=interval,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one system made of one run."""

    system: str
    run: int
    seconds: float
    """Simulated time: to the end, or until all jobs were complete."""
    gpus: int
    """GPUs of all jobs."""
    jobs: Mapping[str, JobResult]
    events: int
    """Faults, slow nodes and planned outages in the cluster."""
    idle_gpu_seconds: float
    """Of free nodes."""
    gpu_seconds: Mapping[str, float]
    """By category, of all jobs."""
    most_out: int
    """Most nodes that were out of service at once."""
    most_isolated: int = 0
    """Most nodes that programs had isolated at once."""

    @property
    def held(self) -> float:
        """Return the GPU-seconds of the jobs."""
        return max(1e-9, sum(self.gpu_seconds.values()))

    @property
    def goodput(self) -> float:
        """Return the share of the jobs' GPU time in steps that were kept."""
        return self.gpu_seconds.get(accounts.PRODUCTIVE, 0.0) / self.held

    @property
    def ettr(self) -> float:
        """Return the share of the jobs' time in steps that were kept, on however many nodes."""
        kept = (accounts.PRODUCTIVE, accounts.LOST_CAPACITY, accounts.SLOWDOWN)
        return sum(self.gpu_seconds.get(one, 0.0) for one in kept) / self.held

    @property
    def lost_per_week(self) -> float:
        """Return the GPU-hours of the jobs that made no progress, in a week."""
        lost = self.held - self.gpu_seconds.get(accounts.PRODUCTIVE, 0.0)
        return lost / 3600 / (self.seconds / WEEK)

    @property
    def idle_per_week(self) -> float:
        """Return the GPU-hours of free nodes in a week."""
        return self.idle_gpu_seconds / 3600 / (self.seconds / WEEK)

    @property
    def wasted_per_week(self) -> float:
        """Return the GPU-hours that made no progress, free nodes included, in a week."""
        return self.lost_per_week + self.idle_per_week


RESULT: Final = TypeAdapter(RunResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of the runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the spread of *values*, of which there is at least one."""
        known = sorted(values)
        return cls(median=statistics.median(known), low=known[0], high=known[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """All runs of one system."""

    system: str
    runs: Sequence[RunResult]

    def spread(self, value: Callable[[RunResult], float]) -> Spread:
        """Return the spread of a *value* of each run."""
        return Spread.of(map(value, self.runs))

    def shares(self) -> dict[str, float]:
        """Return the mean share of the jobs' GPU time in each category that has any, in their order."""
        means = {name: statistics.mean(one.gpu_seconds.get(name, 0.0) / one.held for one in self.runs) for name in CATEGORIES}
        return {name: share for name, share in means.items() if abs(share) > 1e-12}  # noqa: PLR2004 (rounding)

    def total(self, count: Callable[[JobResult], int]) -> int:
        """Return the sum of a *count* over all jobs and runs."""
        return sum(count(job) for run in self.runs for job in run.jobs.values())

    @property
    def timed_out(self) -> dict[str, int]:
        """Return how many attempts the timeouts cut off, by action."""
        found = dict[str, int]()
        for run in self.runs:
            for job in run.jobs.values():
                for action, number in job.timed_out.items():
                    found[action] = found.get(action, 0) + number
        return found

    def record(self) -> dict[str, Any]:
        """Return the result as JSON values; GPU-hours are of a week."""
        values: dict[str, Callable[[RunResult], float]] = {
            "ettr": lambda one: one.ettr,
            "goodput": lambda one: one.goodput,
            "lost_gpu_hours_per_week": lambda one: one.lost_per_week,
            "idle_gpu_hours_per_week": lambda one: one.idle_per_week,
            "wasted_gpu_hours_per_week": lambda one: one.wasted_per_week,
            "most_nodes_out": lambda one: one.most_out,
        }
        spreads = {name: self.spread(value) for name, value in values.items()}
        return {
            "system": self.system,
            **{name: {"median": one.median, "low": one.low, "high": one.high} for name, one in spreads.items()},
            "shares": self.shares(),
            "failures": self.total(lambda job: job.failures),
            "timed_out": self.timed_out,
            "runs": [RESULT.dump_python(one, mode="json") for one in self.runs],
        }


def fingerprint(scenario: Scenario, systems: Mapping[str, RecoverySystem]) -> str:
    """Return what tells results of *scenario* from those of another one, of other figures, or of another version."""
    content = scenario.model_dump_json(exclude={"runs", "systems"})
    measured = sorted(repr(one.plans) for one in systems.values() if one != SYSTEMS.get(one.name))
    content = "\n".join([content, *measured])
    return hashlib.sha256(f"{__version__}\n{content}".encode()).hexdigest()[:16]


class ResultFile:
    """A file with one finished run a line, from which an interrupted simulation goes on."""

    def __init__(self, path: Path, scenario: Scenario, systems: Mapping[str, RecoverySystem]) -> None:
        self._path, self._of = path, fingerprint(scenario, systems)
        self.known: dict[tuple[str, int], RunResult] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]  # what was being written when the program ended is not a line
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                fields = json.loads(line)
                found = RESULT.validate_python(fields["result"])
            except (ValueError, KeyError, TypeError, ValidationError):
                reason, cure = "is no result of a simulation", "Name another file, or one that this command wrote"
                raise BadFile(shown(str(self._path)), (Problem(field=f"line {number}", reason=reason, cure=cure),)) from None
            if fields.get("scenario") == self._of:
                self.known[found.system, found.run] = found
        if whole != text:
            self._path.write_text(whole, encoding="utf-8")

    def add(self, result: RunResult) -> None:
        """Write a finished run."""
        self.known[result.system, result.run] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"scenario": self._of, "result": RESULT.dump_python(result, mode="json")}) + "\n")
