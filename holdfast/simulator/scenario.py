"""Scenario files: what `holdfast simulate` simulates. YAML, validated as job files are; raises `BadFile`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from holdfast.errors import BadFile, Problem
from holdfast.simulator.systems import SYSTEMS
from holdfast.spec.files.load import YAML, fields_of, located, read_yaml, validated
from holdfast.spec.files.problems import nearest, shown
from holdfast.spec.files.units import Bandwidth, Duration, Percent, PositiveDuration, Size, duration_field, format_duration
from holdfast.spec.files.yaml_text import Unreadable
from holdfast.spec.job import NAME, POLICIES, Nnodes, NonEmptyText, PolicyRecoveryTimeouts, SpecModel, is_policy_file

MAX_NODES: Final = 200_000
LONGEST: Final = timedelta(days=3650)
UNSIZED_WRITE: Final = timedelta(minutes=1)
"""How long a save is written of a job without a stated size. An assumption."""
TRACE: Final = "infinitehbd"
"""The trace that comes with Holdfast."""
Share = Annotated[Percent, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)]


def _system(name: str) -> str:
    if name not in SYSTEMS:
        cure = nearest(name, list(SYSTEMS)) or f"Write some of {', '.join(SYSTEMS)}"
        raise PydanticCustomError("system", "no system is called {shown}", {"shown": shown(repr(name)), "cure": cure})
    return name


class ScenarioCheckpoints(SpecModel):
    """Checkpoints on disk, and in-memory snapshots for the systems that take them."""

    interval: PositiveDuration | Literal["auto"] = Field(
        default="auto",
        description="Training time between two checkpoints on disk; `auto`: what `holdfast checkpoint advise` advises for such saves, "
        "steps and faults.",
    )
    stall: Duration | None = Field(
        default=None,
        description="Time that training stops for one save; empty: what copying the job's `state` to host memory takes, or 5s without one.",
    )
    overlapped: Duration | None = Field(
        default=None,
        description="Time that a save is written while training continues; it cannot be used before. Empty: what writing the job's `state` "
        "to storage takes, or 1m without one.",
    )
    snapshot_interval: StrictInt = Field(
        default=1,
        ge=1,
        description="Steps between two in-memory snapshots; more where a snapshot takes longer to reach its replica nodes over `links`.",
    )
    load_once: StrictBool = Field(
        default=False,
        description="Storage is read once and the copies of the model pass the state on to each other; else each copy reads all of it.",
    )
    snapshot_replicas: StrictInt = Field(
        default=1,
        ge=0,
        le=8,
        description="Replicas of each snapshot, on nodes one rack further each; with 0 the snapshot of a lost node is lost, and the job "
        "goes back to the disk.",
    )
    snapshot_overhead: Share = Field(
        default=0.01, description="Share of the training time that in-memory snapshots cost.", json_schema_extra={"default": "1%"}
    )


class ScenarioJob(SpecModel):
    """A training job that runs during the whole scenario, or until it has trained for `work`."""

    name: Annotated[str, Field(pattern=NAME)] = Field(default="training", description="Name in the results.")
    nnodes: Nnodes = Field(
        description='Nodes, or `"MIN:MAX"`: it continues with as few as MIN while nodes are missing, under systems that can.'
    )
    step: PositiveDuration = duration_field("10s", description="Time of one step on all nodes.")
    copies: StrictInt = Field(
        default=1,
        ge=1,
        description="Copies of the model (data-parallel replicas), each on as many nodes; what torchft and `shrink-live` lose at a time.",
    )
    stages: StrictInt = Field(
        default=1,
        ge=1,
        le=1024,
        description="Pipeline stages of each copy. Only Bamboo depends on them: a stage and the one before must not be lost together.",
    )
    state: Size | None = Field(
        default=None,
        description="Training state of one copy of the model: parameters and optimizer, 12 to 18 bytes a parameter. With `cluster.links` "
        "it decides how long loads, saves and replicas of snapshots take; empty: published times at 8,192 GPUs, whatever the job's size.",
    )
    work: PositiveDuration | None = Field(
        default=None, description="Training time without faults after which the job is complete; empty: it trains to the end."
    )
    checkpoint: ScenarioCheckpoints = Field(default=ScenarioCheckpoints(), description="Checkpoints and in-memory snapshots.")
    timeouts: PolicyRecoveryTimeouts = Field(
        default=PolicyRecoveryTimeouts(),
        description="How long each recovery action may take under the Holdfast systems, as `timeouts.recovery` of a job file: "
        "without a value, as long as two starts and three steps of the job.",
    )

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the whole job."""
        return int(str(self.nnodes).rpartition(":")[2])

    @property
    def min_nodes(self) -> int:
        """Return the number of nodes below which it does not train."""
        return int(str(self.nnodes).partition(":")[0])


class ScenarioLinks(SpecModel):
    """Bandwidths that the state of the jobs is moved with, each as a transfer really gets it. Latency is left out: transfers are large."""

    network: Bandwidth = Field(description="Of each node to other nodes and to storage, such as `400Gbit/s`.")
    storage: Bandwidth = Field(description="Of the storage for all nodes together, such as `200GB/s`.")
    host: Bandwidth = Field(
        default=50e9,
        description="Of each GPU to the memory of its node. 50 GB/s: somewhat less than PCIe 5.0 with 16 lanes.",
        json_schema_extra={"default": "50GB/s"},
    )


class ScenarioCluster(SpecModel):
    """The nodes, and how they come back after a fault."""

    nodes: StrictInt = Field(ge=1, le=MAX_NODES, description="All nodes: those of the jobs and the spares.")
    gpus_per_node: StrictInt = Field(default=8, ge=1, le=1024, description="GPUs of each node.")
    nodes_per_rack: StrictInt = Field(default=4, ge=1, description="Nodes that share a rack, for faults of racks and for replica nodes.")
    links: ScenarioLinks | None = Field(default=None, description="Bandwidths; needed by jobs with a `state`, and by nothing else.")
    hot_spares: StrictInt = Field(default=0, ge=0, description="Spare nodes that hold warm processes, under systems that use them.")
    warm_up: Duration = duration_field("5m", description="Time until a free node holds warm processes.")
    repair_crews: StrictInt | None = Field(
        default=None,
        ge=1,
        description="Nodes that are repaired at once, the others wait; empty: all, as repair times include waiting.",
    )
    burn_in: Duration = duration_field("20m", description="Time of the burn-in after which a quarantined node may return.")
    operator: Duration = duration_field(
        "1h", description="Time until a person starts a failed job again. An assumption: nothing public says."
    )
    replacement: Duration = duration_field(
        "7d", description="Time until a person has replaced a decommissioned node that is not under repair. An assumption."
    )


class ConstantRate(SpecModel):
    """Faults of single nodes at a constant rate: independent, with exponential times between them."""

    per_1000_node_days: Rate = Field(
        default=6.5, description="Faults per 1,000 node-days. 6.5: Meta's RSC-1 (arXiv:2410.21680); the Llama 3 run had 3.8."
    )
    shape: float = Field(
        default=1.0,
        ge=0.1,
        le=10,
        allow_inf_nan=False,
        description="Shape of a Weibull distribution with the same mean: below 1 faults of a node come in bursts; 1: exponential.",
    )
    mix: Literal["llama-3", "trace", "nodes", "processes"] = Field(
        default="llama-3",
        description="Causes: of the Llama 3 run (arXiv:2407.21783, table 5), of the trace, only lost nodes, or only crashed processes.",
    )
    repair: Duration | None = Field(
        default=None, description="Time until a node with a fault of its own works again; empty: as in the trace (median 20 h, P90 13 d)."
    )


class TraceReplay(SpecModel):
    """Faults as a real cluster had them, scaled to other sizes by drawing its nodes anew."""

    file: NonEmptyText = Field(
        default=TRACE,
        description="`infinitehbd` (400 servers over 348 days), or a JSON file of the same form, relative to the scenario.",
    )


class LemonNodes(SpecModel):
    """Nodes that pass every burn-in and fail again."""

    share: Share = Field(description="Share of all nodes, e.g. `1%`.")
    interval: PositiveDuration = duration_field("2d", description="Mean time between two faults of such a node.")
    repair: Duration = duration_field("30m", description="Time until it seems to work again.")


class RackFaults(SpecModel):
    """Faults that take all nodes of a rack at once, such as a power feed or a switch."""

    per_rack_year: Rate = Field(description="Faults of each rack in a year.")
    repair: Duration = duration_field("4h", description="Time until the rack works again.")


class SlowNodes(SpecModel):
    """Nodes that slow all others down for a time."""

    per_1000_node_days: Rate = Field(description="Per 1,000 node-days.")
    slowdown: Share = Field(default=0.1, description="Share by which the job slows down.", json_schema_extra={"default": "10%"})
    duration: PositiveDuration = duration_field("24m", description="How long it lasts, unless the node is replaced.")


class SilentCorruption(SpecModel):
    """Wrong results that nothing reports at once: all later checkpoints are corrupt."""

    per_1000_node_days: Rate = Field(description="Per 1,000 node-days. The Llama 3 run had 6 in 110,592 node-days: 0.054.")
    detected_after: PositiveDuration = duration_field("1h", description="Time until it is noticed, under all systems. An assumption.")


class ScriptBug(SpecModel):
    """A bug of the script that ends it at the same step wherever it runs."""

    at: PositiveDuration = Field(description="Training time after which every attempt crashes.")


class ScenarioFaults(SpecModel):
    """Where faults come from; all that are named come together."""

    constant_rate: ConstantRate | None = Field(default=None, description="Independent faults of single nodes.")
    trace: TraceReplay | None = Field(default=None, description="Faults of a real cluster.")
    lemons: LemonNodes | None = Field(default=None, description="Nodes that fail again and again.")
    racks: RackFaults | None = Field(default=None, description="Whole racks.")
    stragglers: SlowNodes | None = Field(default=None, description="Nodes that slow the others down.")
    silent_corruption: SilentCorruption | None = Field(default=None, description="Wrong results.")
    bug: ScriptBug | None = Field(default=None, description="A bug of the script.")


class PlannedMaintenance(SpecModel):
    """Nodes that are taken out as planned, again and again; each time other ones."""

    interval: PositiveDuration = Field(description="From one time to the next.")
    nodes: StrictInt = Field(ge=1, description="Nodes each time.")
    duration: PositiveDuration = duration_field("4h", description="How long they are out.")
    lead_time: Duration = duration_field("30m", description="How long before it is announced.")


class Scenario(SpecModel):
    """What is simulated: a cluster, its jobs, their faults, and the systems that answer them."""

    name: Annotated[str, Field(pattern=NAME)] = Field(description="Name in the results.")
    duration: Annotated[PositiveDuration, Field(le=LONGEST)] = duration_field("90d", description="Simulated time; at most 3650d.")
    runs: StrictInt = Field(default=5, ge=1, le=1000, description="Repetitions with other faults; intervals come from them.")
    seed: StrictInt = Field(default=1, ge=0, description="Of the random numbers: the same seed gives the same faults for every system.")
    cluster: ScenarioCluster = Field(description="The nodes.")
    jobs: list[ScenarioJob] = Field(min_length=1, description="The jobs.")
    faults: ScenarioFaults = Field(description="Where faults come from.")
    maintenance: PlannedMaintenance | None = Field(default=None, description="Planned maintenance.")
    systems: list[Annotated[str, AfterValidator(_system)]] = Field(
        default=["holdfast-groups", "restart-hot-spares", "torchrun"],
        min_length=1,
        description=f"What answers the faults, each with the same ones: {', '.join(f'`{name}`' for name in SYSTEMS)}.",
    )
    policy: NonEmptyText = Field(
        default="balanced", description="Policy of the Holdfast systems: `patient`, `balanced`, `aggressive`, or a policy file."
    )
    count_startup: StrictBool = Field(default=False, description="Count the start of the jobs; else they are in training at the beginning.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in contradictions(self):
            context = {"reason": problem.reason, "cure": problem.cure, "field": problem.field}
            raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self

    @property
    def spares(self) -> int:
        """Return the nodes that no job needs."""
        return self.cluster.nodes - sum(job.nodes for job in self.jobs)


def contradictions(scenario: Scenario) -> Iterator[Problem]:
    """Yield what does not fit together in *scenario*."""
    yield from _wrong_sizes(scenario)
    yield from _wrong_jobs(scenario)
    names = [job.name for job in scenario.jobs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield Problem(field="jobs", reason=f"two jobs are called '{twice}'", cure="Give each one a `name` of its own")
    sources = scenario.faults.model_dump()
    if not any(value is not None for value in sources.values()):
        known = ", ".join(f"`{name}:`" for name in sources)
        yield Problem(field="faults", reason="no source of faults is named", cure=f"Write at least one of {known} under it")
    bug = scenario.faults.bug
    if bug is not None and bug.at >= scenario.duration:
        reason = f"it comes after the {format_duration(scenario.duration)} that are simulated"
        yield Problem(field="faults.bug.at", reason=reason, cure="Write a shorter time, or a longer `duration`")
    if not is_policy_file(scenario.policy) and scenario.policy not in POLICIES:
        cure = nearest(scenario.policy, list(POLICIES)) or f"Write {', '.join(POLICIES)}, or the path of a policy file"
        yield Problem(field="policy", reason=f"no policy is called {shown(repr(scenario.policy))}", cure=cure)


def _wrong_sizes(scenario: Scenario) -> Iterator[Problem]:
    """Yield where there are not enough nodes."""
    needed, nodes, hot = sum(job.nodes for job in scenario.jobs), scenario.cluster.nodes, scenario.cluster.hot_spares
    if needed > nodes:
        reason = f"the jobs need {needed:,} nodes, and the cluster has {nodes:,}"
        yield Problem(field="cluster.nodes", reason=reason, cure=f"Write at least {needed:,}, and more for spares")
    elif hot > nodes - needed:
        reason = f"{hot:,} hot spares are more than the {nodes - needed:,} nodes that no job needs"
        yield Problem(field="cluster.hot_spares", reason=reason, cure=f"Raise `cluster.nodes` to {needed + hot:,}, or lower it")
    if scenario.cluster.nodes_per_rack > nodes and "nodes_per_rack" in scenario.cluster.model_fields_set:
        reason = f"a rack of {scenario.cluster.nodes_per_rack:,} nodes is larger than the cluster of {nodes:,}"
        yield Problem(field="cluster.nodes_per_rack", reason=reason, cure=f"Write {nodes:,} or fewer")
    planned = scenario.maintenance
    if planned is None:
        return
    if planned.nodes > nodes:
        reason = f"{planned.nodes:,} nodes are more than the cluster's {nodes:,}"
        yield Problem(field="maintenance.nodes", reason=reason, cure="Lower it")
    elif (out := planned.nodes * -(-planned.duration // planned.interval)) > nodes:
        reason = f"{out:,} nodes of {nodes:,} would be out at once: the next ones leave before the others are back"
        yield Problem(field="maintenance.interval", reason=reason, cure="Write a longer interval, a shorter `duration`, or fewer nodes")


def _wrong_jobs(scenario: Scenario) -> Iterator[Problem]:
    """Yield what cannot be of a job by itself, and what would make no difference."""
    links, width = scenario.cluster.links, scenario.cluster.gpus_per_node
    for place, job in enumerate(scenario.jobs):
        field = f"jobs[{place}]"
        if job.nodes % job.copies:
            reason = f"{job.nodes:,} nodes cannot hold {job.copies:,} copies of the model of the same size"
            yield Problem(field=f"{field}.copies", reason=reason, cure=f"Write a divisor of {job.nodes:,}")
        elif (gpus := job.nodes // job.copies * width) % job.stages:
            reason = f"the {gpus:,} GPUs of a copy cannot hold {job.stages:,} pipeline stages of the same size"
            yield Problem(field=f"{field}.stages", reason=reason, cure=f"Write a divisor of {gpus:,}")
        elif "bamboo" in scenario.systems and min(job.stages, job.nodes // job.copies) < 2:  # noqa: PLR2004 (a neighbour)
            reason = "under Bamboo a pipeline stage is computed again on the node before it, and there is none"
            yield Problem(field=f"{field}.stages", reason=reason, cure="Write 2 or more, on two nodes or more, or leave `bamboo` out")
        if job.state is not None and links is None:
            yield Problem(
                field=f"{field}.state",
                reason="without `cluster.links` it is unknown how long a state takes to move",
                cure="Add `links: {network: 400Gbit/s, storage: 200GB/s}` to `cluster`, with your figures",
            )
        yield from _wrong_times(job, field, scenario.duration)
    if links is not None and all(job.state is None for job in scenario.jobs):
        reason = "bandwidths make no difference: no job says how large its state is"
        yield Problem(field="cluster.links", reason=reason, cure="Add `state: 1.8TB` to a job, with your figure, or remove it")


def _wrong_times(job: ScenarioJob, field: str, whole: timedelta) -> Iterator[Problem]:
    """Yield times of *job* that cannot be within the *whole* duration, or between each other."""
    if job.step > whole:
        reason = f"a step of {format_duration(job.step)} does not end within the {format_duration(whole)} that are simulated"
        yield Problem(field=f"{field}.step", reason=reason, cure="Write a shorter one, or a longer `duration`")
    interval, written = job.checkpoint.interval, job.checkpoint.overlapped
    if not isinstance(interval, timedelta):
        return
    written = UNSIZED_WRITE if written is None and job.state is None else written
    if written is not None and written > interval:
        reason = f"a save is written for {format_duration(written)}, and the next one begins {format_duration(interval)} after it"
        cure = "Write a longer interval, or `auto`, or how long the write really takes in `overlapped`"
        yield Problem(field=f"{field}.checkpoint.interval", reason=reason, cure=cure)
    if interval > whole:
        reason = f"no checkpoint is due within the {format_duration(whole)} that are simulated"
        yield Problem(field=f"{field}.checkpoint.interval", reason=reason, cure="Write a shorter interval, or a longer `duration`")


def load_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Return the scenario in the file at *path*; files that it names become absolute. Raise `BadFile` with all problems."""
    file, problems = Path(path), list[Problem]()
    scenario: Scenario | None = None
    if file.suffix.lower() not in YAML:
        raise BadFile(
            shown(str(path)),
            (Problem(field="file", reason=f"the suffix '{shown(file.suffix)}' is not that of YAML", cure="Name it .yaml"),),
        )
    try:
        document = read_yaml(file)
        fields = fields_of(document, "Write `name:`, `cluster:`, `jobs:` and `faults:`; examples/simulation has scenarios")
        _expect_a_scenario(fields)
        scenario = validated(Scenario, fields, problems, document)
    except Unreadable as error:
        problems.append(error.problem)
    else:
        home = file.absolute().parent
        if scenario is not None:
            scenario = _with_absolute_paths(scenario, home)
            problems += [located(document, problem) for problem in _missing_files(scenario)]
    if problems or scenario is None:
        raise BadFile(shown(str(path)), tuple(problems))
    return scenario


def _expect_a_scenario(fields: Mapping[str, Any]) -> None:
    if fields.keys() & {"script", "module", "command", "hosts"}:
        cure = "Name a scenario file, with `cluster:`, `jobs:` and `faults:`; examples/simulation has some"
        raise Unreadable(Problem(field="file", reason="describes a job or a cluster, not a scenario", cure=cure))


def _with_absolute_paths(scenario: Scenario, home: Path) -> Scenario:
    update: dict[str, Any] = {}
    if is_policy_file(scenario.policy):
        update["policy"] = str(Path(home, Path(scenario.policy).expanduser()))
    trace = scenario.faults.trace
    if trace is not None and trace.file != TRACE:
        changed = trace.model_copy(update={"file": str(Path(home, Path(trace.file).expanduser()))})
        update["faults"] = scenario.faults.model_copy(update={"trace": changed})
    return scenario.model_copy(update=update) if update else scenario


def _missing_files(scenario: Scenario) -> Iterator[Problem]:
    trace = scenario.faults.trace
    if trace is not None and trace.file != TRACE and not Path(trace.file).is_file():
        cure = f"Write the path of a trace, or `{TRACE}` for the one that comes with Holdfast"
        yield Problem(field="faults.trace.file", reason=f"{shown(trace.file)} does not exist", cure=cure)
