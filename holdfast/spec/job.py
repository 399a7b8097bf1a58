"""What a user writes about a job: the `TrainingJob` and its parts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from holdfast import paths
from holdfast.errors import Problem
from holdfast.spec.files.units import Duration, Percent, PositiveDuration, Size, duration_field, percent_bounds

MODULE: Final = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""Names become folders, parts of URLs and host labels: the strictest of the three decides."""
RESERVED: Final = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
})  # fmt: skip
"""Variables that the agent sets for each worker; a job cannot."""
POLICIES: Final = ("patient", "balanced", "aggressive")
"""Names of policies; any other value of `policy` is the path of a file."""
PROGRAMS: Final = ("script", "module", "command")
"""Fields of which every job has one, and no cluster."""
COUNTED: Final = ("auto", "gpu", "cpu")
"""Values of `nproc_per_node` that are counted on each node, as torchrun does."""
AUTO_START: Final = 100
"""Checkpoint interval in steps with which ``auto`` begins."""


def _text(value: str) -> str:
    """Refuse text that no file name and no argument can hold."""
    if "\0" in value:
        raise PydanticCustomError("nul", "contains a NUL character", {"cure": "Remove it"})
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise PydanticCustomError("surrogate", "contains half a character", {"cure": "Remove it; write text as UTF-8"})
    return value


def _variable(name: str) -> str:
    """Refuse a name that the environment cannot hold or that the agent sets."""
    if not name or "=" in name or any(letter.isspace() or not letter.isprintable() for letter in name):
        raise PydanticCustomError("variable", "is not a name of an environment variable", {"cure": "Use letters, digits and underscores"})
    if name in RESERVED or name.startswith("HOLDFAST_"):
        raise PydanticCustomError("variable", "is set by Holdfast for every worker", {"cure": "Remove it from `env`"})
    return name


def is_policy_file(policy: str) -> bool:
    """Return whether *policy* is the path of a file rather than a name."""
    return policy not in POLICIES and (policy.lower().endswith((".yaml", ".yml", ".json")) or "/" in policy)


def _policy(policy: str) -> str:
    """Refuse an unknown name."""
    if policy in POLICIES or is_policy_file(policy):
        return policy
    near = difflib.get_close_matches(policy[:120], POLICIES, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Write {', '.join(POLICIES)}, or the path of a policy file (.yaml)"
    raise PydanticCustomError("policy", "no policy is called {shown}", {"shown": repr(policy)[:80], "cure": cure})


def _number_or_auto(zero: str, unit: str = "steps") -> BeforeValidator:
    """Return a validator that refuses what is neither a number nor `auto` with one message; pydantic has one for each of the two."""

    def checked(value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        cure = f"Write a number of {unit}, 0 for {zero}, or `auto`, without quotes around a number"
        raise PydanticCustomError(
            "interval", "{shown} is neither an integer of at least 0 nor `auto`", {"shown": repr(value)[:80], "cure": cure}
        )

    return BeforeValidator(checked)


Text = Annotated[str, AfterValidator(_text)]
NonEmptyText = Annotated[Text, Field(min_length=1)]
Variable = Annotated[Text, AfterValidator(_variable)]


class SpecModel(BaseModel):
    """Base of everything a user writes: unknown fields are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse_nnodes(value: object) -> int | str:
    """Return a number of nodes, or ``MIN:MAX`` (as torchrun's ``--nnodes``); raise `PydanticCustomError` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,6})(?:\s*:\s*(\d{1,6}))?\s*", value, re.ASCII)):
        least, most = int(found[1]), int(found[2] or found[1])
        if 0 < least <= most:
            return most if least == most else f"{least}:{most}"
        if least > most > 0:
            context = {"least": least, "most": most, "cure": f'Write the smaller number first: "{most}:{least}"'}
            raise PydanticCustomError("nnodes", "the minimum ({least}) is above the maximum ({most})", context)
    cure = 'Write a number of nodes, at least 1, or "MIN:MAX", e.g. "2:4": start with 4 nodes, and continue with as few as 2'
    raise PydanticCustomError("nnodes", "{shown} is not a number of nodes", {"shown": repr(value)[:80], "cure": cure})


def _nproc_per_node(value: object) -> object:
    """Return a number of ranks, or one of `COUNTED`; a number in quotes is a number, as on torchrun's command line."""
    if value in COUNTED or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and re.fullmatch(r"[1-9][0-9]{0,3}", value, re.ASCII):
        return int(value)
    cure = "Write a number of ranks, at least 1, or `auto`, `gpu` or `cpu`, which count them on each node"
    raise PydanticCustomError("nproc", "{shown} is not a number of ranks", {"shown": repr(value)[:80], "cure": cure})


Nnodes = Annotated[
    int | str,
    BeforeValidator(parse_nnodes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*0*[1-9][0-9]*(\s*:\s*0*[1-9][0-9]*)?\s*$"}]}
    ),
]
NprocPerNode = Annotated[
    int | Literal["auto", "gpu", "cpu"],
    BeforeValidator(_nproc_per_node),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "gpu", "cpu"]}, {"type": "string", "pattern": "^[1-9][0-9]{0,3}$"}]}
    ),
]


class MemoryPlan(SpecModel):
    """In-memory snapshots: copies of the state, taken while training runs, so that a fault costs a step and not all since a checkpoint."""

    interval: StrictInt = Field(default=1, ge=0, description="Steps between two in-memory snapshots; 0 takes none.")
    max_overhead: Annotated[Percent, percent_bounds()] = Field(
        default=0.01,
        description="Share of the training time that snapshots may cost, measured against steps without one, before they become rarer, "
        "e.g. `1%`.",
        json_schema_extra={"default": "1%"},
    )
    when_late: Literal["skip", "pause"] = Field(
        default="skip",
        description="What to do when a copy does not fit into the idle time: skip takes every n-th step, pause delays the step a little.",
    )
    max_pause: PositiveDuration = duration_field("100ms", description="Maximum delay of one step under `when_late: pause`.")
    max_memory: Size | None = Field(
        default=None, description="Memory of each node that snapshots and replicas may take, e.g. `8GB`; empty: half of what is free."
    )
    replicas: StrictInt = Field(
        default=1, ge=0, le=1, description="Replica nodes for each snapshot; 0: a lost node loses its ranks' snapshots."
    )
    bandwidth: Size | None = Field(
        default=None, description="Bytes per second that each node may send for its replicas, e.g. `500MB`; empty: no limit."
    )


class CheckpointPlan(SpecModel):
    """Where checkpoints go, how often, and how many are kept."""

    directory: NonEmptyText | None = Field(
        default=None, description="Folder of the checkpoints, seen by every node; empty: `checkpoints` in the job's folder."
    )
    interval: Annotated[Annotated[StrictInt, Field(ge=0)] | Literal["auto"], _number_or_auto("no checkpoints")] = Field(
        default=100,
        description="Checkpoint interval in steps; 0 saves none; `auto` follows the measured cost of saves and rate of faults, from the "
        "third save on (`holdfast checkpoint advise` shows the numbers).",
    )
    min_interval: StrictInt = Field(default=10, ge=1, description="Shortest interval in steps that `interval: auto` may choose.")
    max_interval: StrictInt = Field(default=10_000, ge=1, description="Longest interval in steps that `interval: auto` may choose.")
    keep: StrictInt = Field(default=2, ge=2, description="Checkpoints kept; at least 2, so that a corrupt one never is the last.")
    bandwidth: Size | None = Field(
        default=None,
        description="Bytes per second that each node may write for checkpoints during training, e.g. `500MB`; empty: no limit.",
    )
    memory: MemoryPlan = Field(default=MemoryPlan(), description="In-memory snapshots on the nodes, between checkpoints.")

    @property
    def first(self) -> int:
        """Return the interval in steps before anything has been measured."""
        return max(self.min_interval, min(self.max_interval, AUTO_START)) if self.interval == "auto" else self.interval


class Checks(SpecModel):
    """What is monitored while training runs."""

    replicas: Annotated[StrictInt | Literal["auto"], _number_or_auto("no comparison")] = Field(
        default="auto",
        description="Steps between two comparisons of the parameters of replicated ranks, which detect silent corruption; `auto`: as often "
        "as costs less than half a percent of the training time; 0: never.",
    )
    nodes: bool = Field(
        default=True,
        description="Run a monitor with each agent that detects faults of its node during the job (kernel log, GPUs, network, disks).",
    )
    straggler: Literal["report", "auto", "migrate"] = Field(
        default="report",
        description="What follows when one rank slows the others down for long, or a node has a fault that training continues through: "
        "report it; `auto`: migrate it to a spare node if its slowness costs more than that, by the policy; or migrate a slow rank in any "
        "case.",
    )


class PolicyRecoveryTimeouts(SpecModel):
    """How long each recovery action may take; the next one is tried right after it."""

    retry_step: PositiveDuration | None = Field(
        default=None, description="No rank is lost: rebuild the groups and repeat the step; else at least 20s."
    )
    replace_ranks: PositiveDuration | None = Field(
        default=None, description="Keep the live ranks, and replace the lost ones by hot spares or new processes; else at least 20s."
    )
    shrink_live: PositiveDuration | None = Field(
        default=None, description="Keep the live ranks, and continue with fewer replicas of the model; else at least 20s."
    )
    restart_workers: PositiveDuration | None = Field(default=None, description="Restart the workers on the same nodes; else at least 2m.")
    replace_node: PositiveDuration | None = Field(default=None, description="Replace a node by a spare one; else at least 3m.")
    shrink_restart: PositiveDuration | None = Field(
        default=None, description="Restart on fewer nodes, where the job allows it; else at least 3m."
    )
    wait_for_capacity: Duration | None = Field(default=None, description="Wait for nodes to return before the job fails; else 1d.")


class RecoveryTimeouts(PolicyRecoveryTimeouts):
    """How long each recovery action may take; the next one is tried right after it. Empty: the policy's value."""

    migrate: PositiveDuration = duration_field(
        "10m", description="A live migration, while training runs; one that takes longer is cancelled and changes nothing."
    )


class Timeouts(SpecModel):
    """How long things may take before they count as a fault. Write `90s`, `5m`, `1h30m` or `2d`."""

    startup: PositiveDuration = duration_field("30m", description="From the start of the workers to the first step.")
    hang_min: PositiveDuration = duration_field("2s", description="A shorter gap between two steps is never reported.")
    hang_multiplier: float = Field(
        default=3.0,
        gt=1,
        allow_inf_nan=False,
        description="A step this many times longer than the median of the job's own steps is reported, and is a hang if the ranks are "
        "proven to wait for each other.",
    )
    hang: PositiveDuration = duration_field(
        "5m",
        description="A gap between two steps that is acted on without proof of a hang, and only once it is three times as long as the "
        "longest after which the job continued by itself: an undeclared evaluation or save is not a hang.",
    )
    section: PositiveDuration = duration_field(
        "30m", description="A declared long section (compile, save, evaluation) that states no limit of its own."
    )
    termination_grace: Duration = duration_field("10s", description="From SIGTERM to SIGKILL when a person stops the job.")
    final_checkpoint: Duration = duration_field(
        "30s",
        description="When a job ends before its last step, time to write its in-memory snapshots to disk as the final checkpoint; 0: none "
        "is written.",
    )
    stopped_process: Duration = duration_field("1s", description="A worker stopped by a signal for longer is a fault.")
    heartbeat: PositiveDuration = duration_field("5s", description="An agent that sends nothing for this long is checked.")
    lease: PositiveDuration = duration_field(
        "30m", description="Agents end their workers when no controller has contacted them for this long."
    )
    log_silence: PositiveDuration | None = Field(
        default=None,
        description="A script without heartbeats of which no rank prints anything for this long is hung, until its first output not before "
        "`startup`; empty: never.",
    )
    exit_grace: PositiveDuration = duration_field(
        "5m",
        description="When some ranks have exited with status 0, the others may take this long without a step, an output or an exit; if "
        "rank 0 has exited after a longer run than this, or after a step, the job is completed then.",
    )
    recovery: RecoveryTimeouts = Field(
        default=RecoveryTimeouts(),
        description="How long each recovery action may take. Without a value an action may take as long as two starts of the job (the "
        "longest so far, or `startup` before there was one) and three steps, if that is more than the default.",
    )


MaxRecoveries = Annotated[
    StrictInt | None, Field(ge=0, description="Recoveries of the job within `recovery_window`, before it fails; empty: 20.")
]
MaxRestartsInPlace = Annotated[
    StrictInt | None,
    Field(
        ge=0,
        description="Restarts of the workers on one node within `recovery_window`, before the node is replaced; empty: 3.",
    ),
]
MaxRecoveriesWithoutProgress = Annotated[
    StrictInt | None,
    Field(
        ge=1,
        description="Consecutive recoveries without one new step, before the job fails, a spare node tried first; those after a lost node "
        "do not count. A job that reports no steps made progress when it ran for three times as long as from its start to its first output "
        "and 5s at least, or for 60s where it prints nothing; empty: 3.",
    ),
]
RecoveryWindow = Annotated[PositiveDuration | None, Field(description="The window in which recoveries are counted; empty: 1h.")]


class TrainingJob(SpecModel):
    """A training job: what to run, on how many nodes, and how it recovers."""

    name: str = Field(pattern=NAME, description="Name of the job: lowercase letters, digits and dashes.", examples=["gpt-small"])
    script: NonEmptyText | None = Field(
        default=None,
        description="Python script to train with, relative to `workdir`; started in a process that has imported torch already.",
    )
    command: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None, description="Any command instead of a script: program and arguments, one item each. No shell reads it."
    )
    module: Annotated[str, Field(pattern=MODULE)] | None = Field(
        default=None, description="Python module to train with instead of a script, as `python -m` runs it.", examples=["gpt.train"]
    )
    args: list[Text] = Field(default=[], description="Arguments of the script or module, one item each.")
    python: NonEmptyText | None = Field(default=None, description="Interpreter for the script; empty: the one that runs the agent.")
    workdir: NonEmptyText = Field(default=".", description="Working directory of the workers, relative to the job file.")
    nnodes: Nnodes = Field(
        default=1,
        description='Nodes that train, or "MIN:MAX" as with torchrun: the job starts with MAX nodes, and continues with as few as MIN when '
        "nodes are lost.",
        examples=[2, "2:4"],
    )
    nproc_per_node: NprocPerNode = Field(
        default=1,
        description="Ranks (workers) on each node, as with torchrun: a number, `gpu` (one for each GPU), `cpu` (one for each CPU), or "
        "`auto` (`gpu` if the node has GPUs, else `cpu`). Other machines are asked when the job is launched on them; all must agree.",
        examples=[8, "auto"],
    )
    spare_nodes: StrictInt = Field(
        default=0, ge=0, description="Additional nodes reserved to replace lost ones; refilled from free nodes while training runs."
    )
    hot_spares: Annotated[Annotated[StrictInt, Field(ge=0)] | Literal["auto"], _number_or_auto("none", "hot spares")] = Field(
        default="auto",
        description="Warm processes that replace lost ranks, placed on nodes with free slots first, then alongside workers; `auto`: as "
        "many as the spare nodes have ranks, while there is room, if the job's process groups are managed (`groups`), else none.",
    )
    groups: Literal["auto", "managed", "stock"] = Field(
        default="auto",
        description="What `torch.distributed.init_process_group` creates in the script or module, whoever calls it: `managed` groups, "
        "which survive the loss of a rank; `stock`: PyTorch's own; `auto`: managed ones where they save a restart and are proven, i.e. on "
        "CPUs if the script uses `holdfast.session`, else PyTorch's own. The log of rank 0 and `holdfast status` say what it is, and why.",
    )
    node_labels: dict[NonEmptyText, NonEmptyText] = Field(
        default={},
        description="Labels that nodes must have, as the cluster's file gives them to its hosts, e.g. `{gpu: h200}`; empty: any node.",
    )
    env: dict[Variable, Text] = Field(default={}, description="Environment variables for every worker.")
    checkpoint: CheckpointPlan = Field(default=CheckpointPlan(), description="Where checkpoints go, how often, and how many are kept.")
    policy: Annotated[Text, AfterValidator(_policy)] = Field(
        default="balanced",
        description="`patient` keeps nodes longest, `aggressive` replaces them first, `balanced` is between them; or the path of "
        "a policy file (.yaml), relative to the job file.",
        examples=["patient", "balanced", "aggressive"],
    )
    progress: Literal["auto", "steps", "none"] = Field(
        default="auto",
        description="Whether steps are expected: auto from the first worker that registers, steps always, none never.",
    )
    preflight: StrictBool = Field(
        default=True,
        description="Whether nodes are checked before ranks are placed on them: unhealthy ones are used only where there are no others.",
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="How long things may take before they count as a fault.")
    walltime: PositiveDuration | None = Field(
        default=None,
        description="The job ends this long after it was submitted, as when its allocation ends: a final checkpoint is saved first (within "
        "`timeouts.final_checkpoint`), and the same `holdfast run` continues from there; empty: never.",
    )
    max_recoveries: MaxRecoveries = None
    max_restarts_in_place: MaxRestartsInPlace = None
    max_recoveries_without_progress: MaxRecoveriesWithoutProgress = None
    recovery_window: RecoveryWindow = None
    checks: Checks = Field(default=Checks(), description="What is monitored while training runs.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in contradictions(self.model_dump(include={"script", "module", "command", "args", "groups", "checkpoint"})):
            context = {"reason": problem.reason, "cure": problem.cure, "field": problem.field}
            raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self

    @property
    def max_nodes(self) -> int:
        """Return the number of nodes with which the job starts."""
        return int(str(self.nnodes).rpartition(":")[2])

    @property
    def min_nodes(self) -> int:
        """Return the minimum number of nodes that the job may run on."""
        return int(str(self.nnodes).partition(":")[0])

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node; `holdfast.spec.nproc` has counted it by then, where it is not a number."""
        assert isinstance(self.nproc_per_node, int), "the ranks are not counted yet"
        return self.nproc_per_node

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.inside(self.checkpoint.directory) if self.checkpoint.directory else paths.job_directory(self.name) / "checkpoints"

    def inside(self, path: str) -> Path:
        """Return *path* as seen from the job's working directory."""
        return Path(Path(self.workdir).expanduser().absolute(), Path(path).expanduser())


def contradictions(fields: dict[str, object]) -> Iterator[Problem]:
    """Yield a problem for *fields* of a job that are valid alone but not together; unvalidated fields are accepted too."""
    given = [name for name in PROGRAMS if fields.get(name) is not None]
    if not given:
        cure = "Set `script` (a Python file), `module` (as `python -m` runs it) or `command` (a list)"
        yield Problem(field="script", reason="the job has nothing to run", cure=cure)
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        yield Problem(field=given[1], reason=f"{'both ' if len(given) == 2 else ''}{names} are set", cure="Keep one of them")  # noqa: PLR2004
    if fields.get("args") and "command" in given:
        yield Problem(field="args", reason="`args` belong to `script` or `module`", cure="Append them to `command`")
    if fields.get("groups") == "managed" and "command" in given:
        reason = "a `command` starts its own interpreter, in which Holdfast cannot replace `init_process_group`"
        yield Problem(field="groups", reason=reason, cure="Set `script` or `module`, or call `holdfast.join()` in the script")
    checkpoint = fields.get("checkpoint")
    defaults = {name: info.default for name, info in CheckpointPlan.model_fields.items()}
    plan = {**defaults, **checkpoint} if isinstance(checkpoint, dict) else defaults
    shortest, longest = plan["min_interval"], plan["max_interval"]
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        reason = f"the shortest checkpoint interval ({shortest}) is above the longest ({longest})"
        yield Problem(field="checkpoint.min_interval", reason=reason, cure="Lower `min_interval`, or raise `max_interval`")
