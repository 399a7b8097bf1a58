"""Run a scenario: SimPy's clock, the events of the fault sources, the nodes, and the jobs under one system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from holdfast.detectors.catalogue import Fault
from holdfast.errors import UnknownPolicy
from holdfast.policies.checkpoint_interval import IntervalCase, IntervalLimits, advise
from holdfast.policies.recovery.policy import NAMED, Policy
from holdfast.simulator import accounts
from holdfast.simulator.accounts import JobAccount
from holdfast.simulator.causes import Symptom
from holdfast.simulator.fault_sources import NodeFault, NodeSlowdown, NodesLeaving, SimulatedEvent, events_of, fault_rate
from holdfast.simulator.job import Hit, SimulatedJob
from holdfast.simulator.nodes import NodePool
from holdfast.simulator.progress import TrainingPace
from holdfast.simulator.scenario import Scenario, ScenarioJob
from holdfast.simulator.systems import SYSTEMS, RecoverySystem, Restore
from holdfast.spec.job import is_policy_file
from holdfast.spec.policy import load_policy, with_timeouts

WEEK = 7 * 86_400.0
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one system made of one run."""

    system: str
    run: int
    seconds: float
    """Simulated time: to the end, or until all jobs were complete."""
    gpus: int
    """GPUs of all jobs."""
    jobs: Mapping[str, JobAccount]
    intervals: Mapping[str, float]
    """Seconds of training between two checkpoints on disk, by job."""
    events: int
    """Faults, slow nodes and planned outages in the cluster."""
    idle_gpu_seconds: float
    """Of free nodes."""
    gpu_seconds: Mapping[str, float]
    """By category, of all jobs."""
    most_out: int
    """Most nodes that were out of service at once."""

    @property
    def goodput(self) -> float:
        """Return the share of the jobs' GPU time in steps that were kept."""
        return self.gpu_seconds.get(accounts.PRODUCTIVE, 0.0) / max(1e-9, sum(self.gpu_seconds.values()))

    @property
    def ettr(self) -> float:
        """Return the share of the jobs' time in steps that were kept, on however many nodes."""
        kept = sum(self.gpu_seconds.get(one, 0.0) for one in (accounts.PRODUCTIVE, accounts.LOST_CAPACITY, accounts.SLOWDOWN))
        return kept / max(1e-9, sum(self.gpu_seconds.values()))

    @property
    def wasted_per_week(self) -> float:
        """Return the GPU-hours a week that made no progress, idle spares included."""
        return (self.lost_gpu_seconds + self.idle_gpu_seconds) / 3600 / (self.seconds / WEEK)

    @property
    def lost_per_week(self) -> float:
        """Return the GPU-hours a week of the jobs that made no progress."""
        return self.lost_gpu_seconds / 3600 / (self.seconds / WEEK)

    @property
    def lost_gpu_seconds(self) -> float:
        """Return the GPU-seconds of the jobs that made no progress."""
        return sum(seconds for name, seconds in self.gpu_seconds.items() if name != accounts.PRODUCTIVE)


def policy_in(scenario: Scenario) -> Policy:
    """Return the policy of *scenario*; raise `BadFile` for a file that cannot be used."""
    if is_policy_file(scenario.policy):
        return load_policy(scenario.policy)
    if scenario.policy not in NAMED:
        raise UnknownPolicy(scenario.policy, (), tuple(NAMED))
    return NAMED[scenario.policy]


def simulate(
    scenario: Scenario,
    system: RecoverySystem | str,
    run: int,
    *,
    events: Sequence[SimulatedEvent] | None = None,
    policy: Policy | None = None,
) -> RunResult:
    """Return what *system* makes of *run*, in which it gets the same *events* as every other system."""
    system = SYSTEMS[system] if isinstance(system, str) else system
    events = events_of(scenario, run) if events is None else events
    policy = policy_in(scenario) if policy is None else policy
    env = simpy.Environment()
    cluster = scenario.cluster
    pool = NodePool(env, cluster, isolates=system.managed, hot_spares=cluster.hot_spares if system.hot_spares else 0)
    paces = {job.name: pace_of(job, scenario, system, events) for job in scenario.jobs}
    bug = scenario.faults.bug
    jobs = [
        SimulatedJob(
            env,
            job,
            system=system,
            policy=with_timeouts(policy, job.timeouts),
            pool=pool,
            pace=paces[job.name],
            gpus_per_node=cluster.gpus_per_node,
            nodes_per_rack=cluster.nodes_per_rack,
            operator=cluster.operator.total_seconds(),
            bug_at=bug.at.total_seconds() if bug is not None else None,
            count_startup=scenario.count_startup,
            seed=f"{scenario.seed}/{run}/{system.name}/{job.name}",
        )
        for job in scenario.jobs
    ]
    env.process(_happen(env, events, pool, jobs, scenario))
    horizon = scenario.duration.total_seconds()
    if all(job.work is not None for job in scenario.jobs):
        done = env.all_of([job.process for job in jobs])
        env.run(until=done | env.timeout(horizon))
    else:
        env.run(until=horizon)
    return _result(scenario, system, run, env, pool, jobs, len(events), {name: pace.interval for name, pace in paces.items()})


def _happen(
    env: simpy.Environment, events: Sequence[SimulatedEvent], pool: NodePool, jobs: Sequence[SimulatedJob], scenario: Scenario
) -> Generator[simpy.Event, Any, None]:
    """Let *events* happen at their times."""
    silent = scenario.faults.silent_corruption
    for event in events:
        if event.at > env.now:
            yield env.timeout(event.at - env.now)
        if isinstance(event, NodesLeaving):
            for number in event.nodes:
                _leave(env, pool.names[number], event, pool, jobs)
            continue
        node = pool.names[event.node]
        job = next((one for one in jobs if one.has(node)), None)
        if isinstance(event, NodeSlowdown):
            if job is not None:
                job.slow_down(node, event.slowdown, event.seconds)
        elif event.cause.symptom is Symptom.SILENT and job is not None:
            assert silent is not None
            env.process(_notice(env, event, job, pool, silent.detected_after.total_seconds()))
        elif node not in pool.broken:
            _fail(env, event, node, job, pool)


def _fail(env: simpy.Environment, event: NodeFault, node: str, job: SimulatedJob | None, pool: NodePool) -> None:
    """Break *node*, or end a process on it."""
    if event.repair > 0:
        pool.fail(node, event.repair)
        if job is None:
            pool.see(Fault(kind=event.cause.kind, at=env.now, node=node, quote=event.cause.name))
    if job is not None:
        job.hit(Hit(node=node, cause=event.cause, at=env.now, breaks=event.repair > 0))


def _notice(
    env: simpy.Environment, event: NodeFault, job: SimulatedJob, pool: NodePool, seconds: float
) -> Generator[simpy.Event, Any, None]:
    """Let a silent corruption be noticed after *seconds*."""
    node, corrupt_since = pool.names[event.node], job.done_now(env.now)
    yield env.timeout(seconds)
    if job.has(node) and node not in pool.broken and corrupt_since < job.done_now(env.now):
        pool.fail(node, event.repair)
        job.hit(Hit(node=node, cause=event.cause, at=env.now, breaks=True, corrupt_since=corrupt_since))


def _leave(env: simpy.Environment, node: str, event: NodesLeaving, pool: NodePool, jobs: Sequence[SimulatedJob]) -> None:
    job = next((one for one in jobs if one.has(node)), None)
    if job is not None:
        job.announce_leaving(node, env.now + event.lead_time, event.seconds)
    else:
        pool.leave(node, event.lead_time + event.seconds)


def pace_of(job: ScenarioJob, scenario: Scenario, system: RecoverySystem, events: Sequence[SimulatedEvent]) -> TrainingPace:
    """Return what training costs *job* under *system*; `interval: auto` is what the policy advises for the faults of this run."""
    plan = job.checkpoint
    step, stall, overlapped = job.step.total_seconds(), plan.stall.total_seconds(), plan.overlapped.total_seconds()
    if plan.interval == "auto":
        rate = max(fault_rate(events, scenario), 1e-9)
        between = 3600 / (rate * job.nodes)
        back = 1.0 if all(one.restore is Restore.DISK for one in system.plans.values()) else 0.05
        case = IntervalCase(
            save_s=max(stall, 1e-3),
            step_s=step,
            between_s=between,
            rollback=back,
            recovery_s=max(one.seconds(step) for one in system.plans.values()),
            overlapped_s=overlapped,
        )
        interval = advise(case, IntervalLimits(least=1, most=MAX_STEPS)).seconds
    else:
        interval = plan.interval.total_seconds()
    return TrainingPace(
        step=step,
        interval=interval,
        stall=stall,
        overlapped=overlapped,
        snapshot_steps=plan.snapshot_interval if system.snapshots else 0,
        snapshot_overhead=plan.snapshot_overhead,
        step_overhead=system.step_overhead,
    )


def _result(  # noqa: PLR0913 (what the result says)
    scenario: Scenario,
    system: RecoverySystem,
    run: int,
    env: simpy.Environment,
    pool: NodePool,
    jobs: Sequence[SimulatedJob],
    events: int,
    intervals: Mapping[str, float],
) -> RunResult:
    pool.count()
    total = Counter[str]()
    for job in jobs:
        job.close(env.now)
        gpus = job.spec.nodes * scenario.cluster.gpus_per_node
        for category, seconds in job.account.seconds.items():
            total[category] += seconds * gpus
    return RunResult(
        system=system.name,
        run=run,
        seconds=env.now,
        gpus=sum(job.spec.nodes for job in jobs) * scenario.cluster.gpus_per_node,
        jobs={job.spec.name: job.account for job in jobs},
        intervals=intervals,
        events=events,
        idle_gpu_seconds=pool.idle_seconds * scenario.cluster.gpus_per_node,
        gpu_seconds=dict(total),
        most_out=pool.most_out,
    )
