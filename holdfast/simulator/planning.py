"""Answer how many spares, how often to checkpoint, how many hot spares and which policy: by simulating each choice with the same faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, Final

from holdfast.policies.recovery.case import RecoveryAction
from holdfast.report.text.wording import duration, share
from holdfast.simulator import accounts
from holdfast.simulator.engine import simulate
from holdfast.simulator.phase_times import PhaseTime
from holdfast.simulator.results import RunResult, Spread, SystemResult
from holdfast.simulator.scenario import UNSIZED_WRITE, Scenario
from holdfast.simulator.systems import SYSTEMS, RecoveryPlan, RecoverySystem
from holdfast.spec.files.units import format_bandwidth, format_duration, parse_duration

SYSTEM: Final = "holdfast-groups"
"""What the choices are made for."""
OTHERS: Final = ("holdfast-groups", "holdfast-state", "holdfast-script", "restart-hot-spares", "torchrun")
SPARES: Final = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
"""Shares of the job's nodes."""
HOT_SPARES: Final = (0, 1, 2, 4, 8, 16, 32)
INTERVALS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Times the interval that `auto` chooses."""
POLICIES: Final = ("patient", "balanced", "aggressive")
SIZES: Final = (8, 64, 512, 4096, 16_384, 65_536, 131_072)
"""GPUs."""
FAULTS: Final = 300
"""Faults that a run is long enough for, if it need not last longer than the trace is or ten years."""
MIN_DAYS: Final = 7.0
MAX_DAYS: Final = 3650.0
TRACE_RATE: Final = 4.18
"""Faults in 1,000 node-days of the trace."""
CLEAR: Final = 0.02
"""A choice is better than a smaller one if it wastes at least this share less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned for."""

    gpus: int
    gpus_per_node: int = 8
    step: float = 10.0
    """Seconds of a step."""
    stall: float | None = None
    """Seconds that a save stops training for; None: by the size of the state, or an assumption."""
    state: int | None = None
    """Bytes of one copy of the model and its optimizer; None: loads and saves take published times. Needs `network` and `storage`."""
    network: float | None = None
    """Bytes a second of each node."""
    storage: float | None = None
    """Bytes a second for all nodes together."""
    copies: int | None = None
    """Copies of the model; None: as many of four nodes or more as divide the job."""
    rate: float | None = None
    """Independent faults in 1,000 node-days; None: the trace."""
    policy: str = "balanced"
    runs: int = 3
    seed: int = 1

    @property
    def nodes(self) -> int:
        """Return the nodes of the job."""
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def days(self) -> float:
        """Return the days of a run."""
        wanted = FAULTS / (self.nodes * (TRACE_RATE if self.rate is None else max(self.rate, 1e-3)) / 1000)
        return min(MAX_DAYS, max(MIN_DAYS, wanted))

    @property
    def shortest_interval(self) -> float:
        """Return the seconds that a save is written for, in which no other can begin; with a `state` the simulator waits for it itself."""
        return UNSIZED_WRITE.total_seconds() if self.state is None else 0.0

    def scenario(self, *, spares: int, hot_spares: int, interval: str = "auto", policy: str | None = None, **faults: Any) -> Scenario:  # noqa: ANN401 (fields)
        """Return the scenario with these choices."""
        source = {"trace": {}} if self.rate is None else {"constant_rate": {"per_1000_node_days": self.rate}}
        least = min(4, self.nodes)
        copies = self.copies or next(one for one in (128, 64, 32, 16, 8, 4, 2, 1) if self.nodes % one == 0 and self.nodes // one >= least)
        plan = {"interval": interval, "stall": None if self.stall is None else f"{self.stall:g}s"}
        job = {"nnodes": self.nodes, "step": f"{self.step:g}s", "copies": copies, "checkpoint": plan, "state": self.state}
        cluster: dict[str, Any] = {"nodes": self.nodes + spares, "gpus_per_node": self.gpus_per_node, "hot_spares": min(hot_spares, spares)}
        if self.state is not None and self.network is not None and self.storage is not None:
            cluster["links"] = {"network": format_bandwidth(self.network), "storage": format_bandwidth(self.storage)}
        return Scenario.model_validate(
            {
                "name": "plan",
                "duration": f"{self.days:.3f}d",
                "runs": self.runs,
                "seed": self.seed,
                "cluster": cluster,
                "jobs": [job],
                "faults": faults or source,
                "policy": policy or self.policy,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """One choice and its results."""

    label: str
    value: float
    result: SystemResult

    @property
    def wasted(self) -> Spread:
        """Return the GPU-hours a week that make no progress, those of idle nodes included."""
        return self.result.spread(lambda one: one.wasted_per_week)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSweep:
    """What changes when one choice does."""

    name: str
    points: Sequence[PlanPoint]

    @property
    def best(self) -> PlanPoint:
        """Return the point that wastes least; of those that waste hardly more, the first one under which the job fails most rarely."""
        least = min(one.wasted.median for one in self.points)
        near = [one for one in self.points if one.wasted.median <= least * (1 + CLEAR)]
        return min(near, key=lambda one: one.result.total(lambda job: job.failures))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The answers, and what they rest on."""

    request: PlanRequest
    spares: PlanSweep
    hot_spares: PlanSweep
    interval: PlanSweep
    policy: PlanSweep
    systems: PlanSweep
    sensitivity: PlanSweep
    """The recommended choices under other assumptions; the first point is the plan itself."""

    @property
    def result(self) -> SystemResult:
        """Return the results of the recommended choices."""
        return self.sensitivity.points[0].result

    def caveat(self) -> str:
        """Return a sentence where another system wastes less under the same faults, and why that may be; empty where none does."""
        points = {point.label: point for point in self.systems.points}
        ours, best = points[SYSTEM], min(points.values(), key=lambda point: point.wasted.median)
        if best.wasted.median > ours.wasted.median * (1 - CLEAR):
            return ""
        causes = {name: part for name, part in ours.result.shares().items() if name != accounts.PRODUCTIVE}
        most = max(causes, key=lambda name: causes[name], default="")
        return (
            f"With these faults {best.label} wastes less ({best.wasted.median:,.3g} h a week) than {SYSTEM} "
            f"({ours.wasted.median:,.3g} h), of whose waste most is '{most}' ({share(causes.get(most))} of the time)"
            + (
                ": an assumption, not a measurement; `snapshots cost nothing` below has the plan without."
                if most == accounts.SNAPSHOTS
                else "."
            )
        )


Case = tuple[str, float, Scenario, RecoverySystem]
"""Label, value, what is simulated, and under what."""


def cases(plan: PlanRequest) -> int:
    """Return how many simulations a plan takes at most, for a progress bar."""
    assumptions = len(list(_assumptions(plan, 1, 1, "1h", "balanced")))
    return (len(SPARES) + 1 + len(HOT_SPARES) + len(INTERVALS) + len(POLICIES) + len(OTHERS) + assumptions) * plan.runs


def make_plan(request: PlanRequest, *, workers: int = 1, on_done: Callable[[int], None] = lambda _: None) -> JobPlan:
    """Return the plan for *request*; each choice is made with the best ones of those before it."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else nullcontext()
    with pool as executor:

        def sweep(name: str, wanted: Sequence[Case]) -> PlanSweep:
            return PlanSweep(name=name, points=_simulated(wanted, request.runs, executor, on_done))

        system = SYSTEMS[SYSTEM]
        counts = sorted({round(part * request.nodes) for part in SPARES} | {1})
        warm = max(HOT_SPARES)
        spares = sweep(
            "spare nodes", [(_with_share(one, request), one, request.scenario(spares=one, hot_spares=warm), system) for one in counts]
        )
        count = int(spares.best.value)
        hots = [one for one in HOT_SPARES if one <= count] or [0]
        hot = sweep("hot spares", [(f"{one}", one, request.scenario(spares=count, hot_spares=one), system) for one in hots])
        ready = int(hot.best.value)
        usual = next(iter(hot.best.result.runs[0].jobs.values())).interval
        intervals = [max(request.step, request.shortest_interval, factor * usual) for factor in INTERVALS]
        interval = sweep(
            "checkpoint interval",
            [
                (duration(_rounded(one)), one, request.scenario(spares=count, hot_spares=ready, interval=_as_duration(one)), system)
                for one in dict.fromkeys(intervals)
            ],
        )
        every = _as_duration(interval.best.value)
        names = dict.fromkeys([request.policy, *POLICIES])
        scenarios = {name: request.scenario(spares=count, hot_spares=ready, interval=every, policy=name) for name in names}
        policy = sweep("policy", [(name, at, scenario, system) for at, (name, scenario) in enumerate(scenarios.items())])
        chosen = policy.best.label
        scenario = request.scenario(spares=count, hot_spares=ready, policy=chosen)
        systems = sweep("system", [(name, at, scenario, SYSTEMS[name]) for at, name in enumerate(OTHERS)])
        sensitivity = sweep("assumption", list(_assumptions(request, count, ready, every, chosen)))
    return JobPlan(
        request=request, spares=spares, hot_spares=hot, interval=interval, policy=policy, systems=systems, sensitivity=sensitivity
    )


def by_size(request: PlanRequest, *, workers: int = 1, on_done: Callable[[int], None] = lambda _: None) -> PlanSweep:
    """Return what the system wastes on 8 to 131,072 GPUs, with 3 % of spares."""
    wanted = list[Case]()
    for gpus in SIZES:
        one = replace(request, gpus=max(gpus, request.gpus_per_node), copies=None, runs=min(2, request.runs))
        spares = max(1, round(0.03 * one.nodes))
        wanted.append((f"{gpus:,}", gpus, one.scenario(spares=spares, hot_spares=min(16, spares)), SYSTEMS[SYSTEM]))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else nullcontext()
    with pool as executor:
        return PlanSweep(name="GPUs", points=_simulated(wanted, min(2, request.runs), executor, on_done))


def _with_share(spares: int, request: PlanRequest) -> str:
    return f"{spares} ({share(spares / request.nodes)})"


def _rounded(seconds: float) -> int:
    """Return whole seconds, and whole minutes from ten of them on."""
    return 60 * round(seconds / 60) if seconds >= 600 else max(1, round(seconds))  # noqa: PLR2004 (ten minutes)


def _as_duration(seconds: float) -> str:
    return format_duration(parse_duration(f"{_rounded(seconds)}s"))


def _assumptions(request: PlanRequest, spares: int, hot: int, interval: str, policy: str) -> Iterator[Case]:
    """Yield the plan itself, and the plan under one other assumption each."""
    plan = request.scenario(spares=spares, hot_spares=hot, interval=interval, policy=policy)
    system = SYSTEMS[SYSTEM]

    def with_faults(**faults: Any) -> Scenario:  # noqa: ANN401 (fields)
        return request.scenario(spares=spares, hot_spares=hot, interval=interval, policy=policy, **faults)

    rate = TRACE_RATE if request.rate is None else request.rate
    yield "as planned", 0, plan, system
    yield "independent faults, Meta's rate (6.5)", 1, with_faults(constant_rate={"per_1000_node_days": 6.5}), system
    yield "independent faults, twice as many", 2, with_faults(constant_rate={"per_1000_node_days": 2 * rate}), system
    if request.rate is not None:
        yield "faults as in the trace", 3, with_faults(trace={}), system
    yield "pauses twice as long", 4, plan, _changed(system, lambda _, time: _times(time, 2))
    yield "detection ten times as long", 5, plan, replace(system, detect={one: _times(time, 10) for one, time in system.detect.items()})
    job = plan.jobs[0]
    for number, (label, overhead) in enumerate((("snapshots cost nothing", 0.0), ("snapshots cost 3 %", 0.03)), 6):
        changed = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"snapshot_overhead": overhead})})
        yield label, number, plan.model_copy(update={"jobs": [changed]}), system


def _times(time: PhaseTime, factor: float) -> PhaseTime:
    high = None if time.high is None else time.high * factor
    return replace(time, low=time.low * factor, high=high, steps=time.steps * factor)


def _changed(system: RecoverySystem, change: Callable[[str, PhaseTime], PhaseTime]) -> RecoverySystem:
    """Return *system* with each phase of its plans changed."""

    def plans(before: Mapping[RecoveryAction, RecoveryPlan]) -> dict[RecoveryAction, RecoveryPlan]:
        return {
            action: replace(plan, phases=tuple((name, change(name, time)) for name, time in plan.phases)) for action, plan in before.items()
        }

    return replace(system, plans=plans(system.plans), cold=plans(system.cold))


def _simulated(wanted: Sequence[Case], runs: int, executor: Executor | None, on_done: Callable[[int], None]) -> list[PlanPoint]:
    """Return the results of each case."""
    made = [(scenario, system, run) for _, _, scenario, system in wanted for run in range(runs)]
    results: Iterator[RunResult] = map(_one, made) if executor is None else executor.map(_one, made)
    points = list[PlanPoint]()
    for label, value, _, system in wanted:
        of_case = list[RunResult]()
        for _ in range(runs):
            of_case.append(next(results))
            on_done(1)
        points.append(PlanPoint(label=label, value=value, result=SystemResult(system=system.name, runs=of_case)))
    return points


def _one(what: tuple[Scenario, RecoverySystem, int]) -> RunResult:
    scenario, system, run = what
    return simulate(scenario, system, run)
