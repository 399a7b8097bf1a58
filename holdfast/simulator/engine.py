"""Run a scenario: SimPy's clock, the events of the fault sources, the nodes, and the jobs under one system."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any, Final

import simpy

from holdfast.detectors.catalogue import Fault
from holdfast.errors import UnknownPolicy
from holdfast.policies.checkpoint_interval import IntervalCase, IntervalLimits, advise
from holdfast.policies.recovery.policy import NAMED, Policy
from holdfast.simulator.causes import Symptom
from holdfast.simulator.fault_sources import (
    ControllerAway,
    NodeFault,
    NodesLeaving,
    NodeSlowdown,
    PacedEvent,
    SimulatedEvent,
    events_of,
    fault_rate,
)
from holdfast.simulator.incidents import Hit
from holdfast.simulator.job import SimulatedJob
from holdfast.simulator.nodes import NodePool
from holdfast.simulator.progress import TrainingPace
from holdfast.simulator.results import JobResult, RunResult
from holdfast.simulator.scenario import Scenario, ScenarioJob
from holdfast.simulator.systems import SYSTEMS, RecoverySystem, Restore
from holdfast.simulator.transfers import StateTransfers, save_times
from holdfast.spec.job import is_policy_file
from holdfast.spec.policy import load_policy, with_timeouts

MAX_STEPS: Final = 1_000_000
LIVE_SHARE: Final = 0.05
"""Share of the faults that send a job with in-memory snapshots back to the disk, for `interval: auto`. A controller measures it."""
PACE: Final = 0.02
"""Seconds between two looks at a job that does not train while an event waits for that."""
Steps = Generator[simpy.Event, Any, None]


def policy_in(scenario: Scenario) -> Policy:
    """Return the policy of *scenario*; raise `BadFile` for a file that cannot be used."""
    return policy_named(scenario.policy)


def policy_named(name: str) -> Policy:
    """Return the policy of this *name*, or in the file *name*; raise `UnknownPolicy`, or `BadFile` for a file that cannot be used."""
    if is_policy_file(name):
        return load_policy(name)
    if name not in NAMED:
        raise UnknownPolicy(name, tuple(difflib.get_close_matches(name, NAMED, n=1)), tuple(NAMED))
    return NAMED[name]


def simulate(
    scenario: Scenario,
    system: RecoverySystem | str,
    run: int,
    *,
    events: Sequence[SimulatedEvent | PacedEvent] | None = None,
    policy: Policy | None = None,
) -> RunResult:
    """Return what *system* makes of *run*, in which it gets the same *events* as every other system."""
    system = SYSTEMS[system] if isinstance(system, str) else system
    events = events_of(scenario, run) if events is None else events
    policy = policy_in(scenario) if policy is None else policy
    env = simpy.Environment()
    cluster = scenario.cluster
    pool = NodePool(env, cluster, isolates=system.managed, hot_spares=cluster.hot_spares if system.hot_spares else 0)
    transfers = {job.name: StateTransfers.of(job, cluster.links, cluster.gpus_per_node) for job in scenario.jobs}
    moved = {name: system if some is None else some.applied_to(system) for name, some in transfers.items()}
    paces = {job.name: pace_of(job, scenario, moved[job.name], events, transfers[job.name]) for job in scenario.jobs}
    bug = scenario.faults.bug
    jobs = [
        SimulatedJob(
            env,
            job,
            system=moved[job.name],
            policy=with_timeouts(policy, job.timeouts),
            pool=pool,
            pace=paces[job.name],
            gpus_per_node=cluster.gpus_per_node,
            nodes_per_rack=cluster.nodes_per_rack,
            operator=cluster.operator.total_seconds(),
            end=scenario.duration.total_seconds(),
            bug_at=bug.at.total_seconds() if bug is not None else None,
            count_startup=scenario.count_startup,
            seed=f"{scenario.seed}/{run}/{system.name}/{job.name}",
        )
        for job in scenario.jobs
    ]
    env.process(_happen(env, events, pool, jobs))
    horizon = scenario.duration.total_seconds()
    if all(job.work is not None for job in scenario.jobs):
        done = env.all_of([job.process for job in jobs])
        env.run(until=done | env.timeout(horizon))
    else:
        env.run(until=horizon)
    pool.count()
    for job in jobs:
        job.close(env.now)
    return RunResult(
        system=system.name,
        run=run,
        seconds=env.now,
        gpus=sum(job.spec.nodes for job in jobs) * cluster.gpus_per_node,
        jobs={job.spec.name: JobResult.of(job.account, paces[job.spec.name].interval) for job in jobs},
        events=len(events),
        idle_gpu_seconds=pool.idle_seconds * cluster.gpus_per_node,
        gpu_seconds=_total(scenario, jobs),
        most_out=pool.most_out,
        most_isolated=pool.most_isolated,
    )


def _pace(env: simpy.Environment, paced: SimulatedEvent | PacedEvent, job: SimulatedJob) -> Steps:
    """Wait for the time of an event, or until *job* has trained as long as it asks for."""
    if not isinstance(paced, PacedEvent):
        yield env.timeout(max(0.0, paced.at - env.now))
        return
    if paced.uptime is None:
        yield env.timeout(paced.after)
    while paced.uptime is not None and (left := paced.uptime - job.uptime(env.now)) > 0:
        yield env.timeout(max(left, PACE))


def _happen(env: simpy.Environment, events: Sequence[SimulatedEvent | PacedEvent], pool: NodePool, jobs: Sequence[SimulatedJob]) -> Steps:
    """Let *events* happen at their times."""
    for one in events:
        yield from _pace(env, one, jobs[0])
        event = one.event if isinstance(one, PacedEvent) else one
        if isinstance(event, NodesLeaving):
            for number in event.nodes:
                _leave(env, pool.names[number], event, pool, jobs)
        elif isinstance(event, ControllerAway):
            for job in jobs:
                job.lose_controller(event.seconds)
        elif (node := _node_of(event, pool, jobs)) is not None:
            _disturb(env, event, node, pool, jobs)


def _disturb(env: simpy.Environment, event: NodeFault | NodeSlowdown, node: str, pool: NodePool, jobs: Sequence[SimulatedJob]) -> None:
    """Let *node* fail or be slow."""
    job = next((one for one in jobs if one.has(node)), None)
    if isinstance(event, NodeFault):
        _fail(env, event, node, job, pool)
    elif job is not None:
        job.slow_down(node, event.slowdown, event.seconds)


def _node_of(event: NodeFault | NodeSlowdown, pool: NodePool, jobs: Sequence[SimulatedJob]) -> str | None:
    """Return the node that *event* is about; None where there is no such node by then."""
    if isinstance(event, NodeFault) and event.spare:
        return next(iter(pool.free), None)
    if isinstance(event, NodeFault) and event.rank is not None:
        return jobs[0].node_of(event.rank)
    return pool.names[event.node]


def _fail(env: simpy.Environment, event: NodeFault, node: str, job: SimulatedJob | None, pool: NodePool) -> None:
    """Break *node*, or end a process on it, or let its results be wrong."""
    if event.cause.symptom is Symptom.SILENT and job is not None:
        env.process(_notice(env, event, job, pool))
    elif node not in pool.broken:
        breaks = event.repair > 0 and not (event.cause.degrades and job is not None)
        if breaks:
            pool.fail(node, event.repair)
            if job is None:
                pool.see(Fault(kind=event.cause.kind, at=env.now, node=node, quote=event.cause.name))
        if job is not None:
            job.hit(Hit(node=node, cause=event.cause, at=env.now, breaks=breaks, repair=event.repair))


def _notice(env: simpy.Environment, event: NodeFault, job: SimulatedJob, pool: NodePool) -> Steps:
    """Let a silent corruption be noticed, and answered, after its time."""
    node, corrupt_since = pool.names[event.node], job.done_now(env.now)
    yield env.timeout(event.noticed_after)
    if job.has(node) and node not in pool.broken and corrupt_since < job.done_now(env.now):
        pool.fail(node, event.repair)
        job.hit(Hit(node=node, cause=event.cause, at=env.now, breaks=True, corrupt_since=corrupt_since))


def _leave(env: simpy.Environment, node: str, event: NodesLeaving, pool: NodePool, jobs: Sequence[SimulatedJob]) -> None:
    job = next((one for one in jobs if one.has(node)), None)
    if job is not None:
        job.announce_leaving(node, env.now + event.lead_time, event.seconds)
    else:
        pool.leave(node, event.lead_time + event.seconds)


def pace_of(
    job: ScenarioJob,
    scenario: Scenario,
    system: RecoverySystem,
    events: Sequence[SimulatedEvent | PacedEvent],
    transfers: StateTransfers | None,
) -> TrainingPace:
    """Return what training costs *job* under *system*; `interval: auto` is what the policy advises for the faults of this run."""
    plan, step = job.checkpoint, job.step.total_seconds()
    stall, overlapped = save_times(job, transfers)
    to_replica = transfers.replica if transfers is not None and plan.snapshot_replicas else 0.0
    if plan.interval == "auto":
        rate = max(fault_rate(events, scenario), 1e-9)
        between = 3600 / (rate * job.nodes)
        back = 1.0 if all(one.restore is Restore.DISK for one in system.plans.values()) else LIVE_SHARE
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
        interval = max(plan.interval.total_seconds(), overlapped)  # the next save waits until this one is written
    snapshot_steps = max(plan.snapshot_interval, math.ceil(plan.snapshot_replicas * to_replica / step))  # so does the next snapshot
    return TrainingPace(
        step=step,
        interval=interval,
        stall=stall,
        overlapped=overlapped,
        snapshot_steps=snapshot_steps if system.snapshots else 0,
        snapshot_lag=to_replica,
        snapshot_overhead=plan.snapshot_overhead,
        step_overhead=system.step_overhead,
    )


def _total(scenario: Scenario, jobs: Sequence[SimulatedJob]) -> dict[str, float]:
    """Return the GPU-seconds of all *jobs* by category."""
    total = defaultdict[str, float](float)
    for job in jobs:
        for category, seconds in job.account.seconds.items():
            total[category] += seconds * job.spec.nodes * scenario.cluster.gpus_per_node
    return dict(total)
