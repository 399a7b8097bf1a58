"""What a user writes about a job: the `TrainingJob` and its parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from holdfast import paths
from holdfast.errors import Problem
from holdfast.spec.units import Duration, PositiveDuration, Size, duration_field

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
        raise PydanticCustomError("variable", "is set by Holdfast for every worker", {"cure": "Remove it from `environment`"})
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


def _number_or_auto(zero: str) -> BeforeValidator:
    """Return a validator that refuses what is neither a number nor `auto` with one message; pydantic has one for each of the two."""

    def checked(value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        cure = f"Write a number of steps, 0 for {zero}, or `auto`, without quotes around a number"
        raise PydanticCustomError(
            "every", "{shown} is neither an integer of at least 0 nor `auto`", {"shown": repr(value)[:80], "cure": cure}
        )

    return BeforeValidator(checked)


Text = Annotated[str, AfterValidator(_text)]
NonEmptyText = Annotated[Text, Field(min_length=1)]
Variable = Annotated[Text, AfterValidator(_variable)]


class SpecModel(BaseModel):
    """Base of everything a user writes: unknown fields are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Nodes(SpecModel):
    """How many nodes a job takes, and how many workers run on each."""

    wanted: StrictInt = Field(default=1, ge=1, description="Nodes that train.")
    least: StrictInt | None = Field(
        default=None, ge=1, description="Minimum number of nodes that the job may shrink to when nodes are lost; empty: it never shrinks."
    )
    spare: StrictInt = Field(
        default=0, ge=0, description="Additional nodes reserved to replace lost ones; refilled from free nodes while training runs."
    )
    ranks: StrictInt = Field(default=1, ge=1, description="Ranks (workers) on each node.")
    labels: dict[NonEmptyText, NonEmptyText] = Field(
        default={},
        description="Labels that nodes must have, as the cluster's file gives them to its hosts, e.g. `{gpu: h200}`; empty: any node.",
    )
    standbys: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Hot spares: warm processes that replace lost ranks, placed on nodes with free slots first, then alongside workers; "
        "empty: as many as the spare nodes have ranks, while there is room, if the script's groups can be repaired (`holdfast.join`), else "
        "none.",
    )

    @property
    def min_nodes(self) -> int:
        """Return the minimum number of nodes that the job may run on."""
        return self.wanted if self.least is None else self.least


class MemoryPlan(SpecModel):
    """In-memory snapshots: copies of the state, taken while training runs, so that a fault costs a step and not all since a checkpoint."""

    every: StrictInt = Field(default=1, ge=0, description="Steps between two in-memory snapshots; 0 takes none.")
    overhead: float = Field(
        default=0.01,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the training time that snapshots may cost, measured against steps without one, before they become rarer.",
    )
    policy: Literal["skip", "pause"] = Field(
        default="skip",
        description="What to do when a copy does not fit into the idle time: skip takes every n-th step, pause delays the step a little.",
    )
    pause: PositiveDuration = duration_field("100ms", description="Maximum delay of one step under `policy: pause`.")
    limit: Size | None = Field(
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
    every: Annotated[Annotated[StrictInt, Field(ge=0)] | Literal["auto"], _number_or_auto("no checkpoints")] = Field(
        default=100,
        description="Checkpoint interval in steps; 0 saves none; `auto` follows the measured cost of saves and rate of faults, from the "
        "third save on (`holdfast checkpoint advise` shows the numbers).",
    )
    every_least: StrictInt = Field(default=10, ge=1, description="Shortest interval in steps that `every: auto` may choose.")
    every_most: StrictInt = Field(default=10_000, ge=1, description="Longest interval in steps that `every: auto` may choose.")
    keep: StrictInt = Field(default=2, ge=2, description="Checkpoints kept; at least 2, so that a corrupt one never is the last.")
    bandwidth: Size | None = Field(
        default=None,
        description="Bytes per second that each node may write for checkpoints during training, e.g. `500MB`; empty: no limit.",
    )
    memory: MemoryPlan = Field(default=MemoryPlan(), description="In-memory snapshots on the nodes, between checkpoints.")

    @property
    def first(self) -> int:
        """Return the interval in steps before anything has been measured."""
        return max(self.every_least, min(self.every_most, AUTO_START)) if self.every == "auto" else self.every


class Limits(SpecModel):
    """How long things may take before they count as a fault. Write `90s`, `5m`, `2h`, `1d`, or a number of seconds."""

    first_step: PositiveDuration = duration_field("30m", description="From the start of the workers to the first step.")
    hang_least: PositiveDuration = duration_field("2s", description="A shorter gap between two steps is never reported.")
    hang_factor: float = Field(
        default=3.0,
        gt=1,
        allow_inf_nan=False,
        description="A step this many times longer than the median of the job's own steps is reported, and is a hang if the ranks are "
        "proven to wait for each other.",
    )
    hang_timeout: PositiveDuration = duration_field(
        "5m",
        description="A gap between two steps that is acted on without proof of a hang, and only once it is three times as long as the "
        "longest after which the job continued by itself: an undeclared evaluation or save is not a hang.",
    )
    section: PositiveDuration = duration_field(
        "30m", description="A declared long section (compile, save, evaluation) that states no limit of its own."
    )
    stop_grace: Duration = duration_field("10s", description="From SIGTERM to SIGKILL when a person stops the job.")
    last_save: Duration = duration_field(
        "30s",
        description="When a job ends before its last step, time to write its in-memory snapshots to disk as the final checkpoint; 0: none "
        "is written.",
    )
    walltime: PositiveDuration | None = Field(
        default=None,
        description="The job ends this long after it was submitted, as when its allocation ends: a final checkpoint is saved first (within "
        "`last_save`), and the same `holdfast run` continues from there; empty: never.",
    )
    stopped_grace: Duration = duration_field("1s", description="A worker stopped by a signal for longer is a fault.")
    agent_silence: PositiveDuration = duration_field("5s", description="An agent that sends nothing for this long is checked.")
    lease: PositiveDuration = duration_field(
        "30m", description="Agents end their workers when no controller has contacted them for this long."
    )
    output_silence: PositiveDuration | None = Field(
        default=None,
        description="A script without heartbeats of which no rank prints anything for this long is hung, until its first output not before "
        "`first_step`; empty: never.",
    )
    end_grace: PositiveDuration = duration_field(
        "5m",
        description="When some ranks have exited with status 0, the others may take this long without a step, an output or an exit; if "
        "rank 0 has exited, the job is completed then.",
    )


class Checks(SpecModel):
    """What is monitored while training runs."""

    copies: Annotated[StrictInt | Literal["auto"], _number_or_auto("no comparison")] = Field(
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


class RecoveryDeadlines(SpecModel):
    """How long each recovery action may take; the next one is tried right after it."""

    retry_step: PositiveDuration | None = Field(
        default=None, description="No rank is lost: rebuild the groups and repeat the step; else 20s."
    )
    take_over: PositiveDuration | None = Field(
        default=None, description="Keep the live ranks, and replace the lost ones by hot spares or new processes; else 20s."
    )
    narrow: PositiveDuration | None = Field(
        default=None, description="Keep the live ranks, and continue with fewer replicas of the model; else 20s."
    )
    restart_in_place: PositiveDuration | None = Field(default=None, description="Restart the workers on the same nodes; else 2m.")
    replace_node: PositiveDuration | None = Field(default=None, description="Replace a node by a spare one; else 3m.")
    shrink: PositiveDuration | None = Field(default=None, description="Restart on fewer nodes, where the job allows it; else 3m.")
    wait_for_capacity: Duration | None = Field(default=None, description="Wait for nodes to return before the job fails; else 1d.")


class Deadlines(RecoveryDeadlines):
    """How long each recovery action may take; the next one is tried right after it. Empty: the policy's value."""

    migrate: PositiveDuration = duration_field(
        "10m", description="A live migration, while training runs; one that takes longer is cancelled and changes nothing."
    )


class Budget(SpecModel):
    """How many recoveries a job may have, so that a broken script never loops. Empty: the policy's value."""

    in_place: StrictInt | None = Field(
        default=None, ge=0, description="Restarts in place on one node within the window, before it is replaced; else 3."
    )
    window: PositiveDuration | None = Field(default=None, description="The window in which recoveries are counted; else 1h.")
    recoveries: StrictInt | None = Field(
        default=None, ge=0, description="Recoveries of the job within the window, before it fails; else 20."
    )
    fruitless: StrictInt | None = Field(
        default=None,
        ge=1,
        description="Consecutive recoveries without one new step, before the job fails, a spare node tried first; those after a lost node "
        "do not count. A job that reports no steps made progress when it ran for three times as long as from its start to its first output "
        "and 5s at least, or for 60s where it prints nothing; else 3.",
    )


class TrainingJob(SpecModel):
    """A training job: what to run, on how many nodes, and how it recovers."""

    name: str = Field(pattern=NAME, description="Name of the job: lowercase letters, digits and dashes.", examples=["gpt-small"])
    script: NonEmptyText | None = Field(
        default=None,
        description="Python script to train with, relative to the directory; started in a process that has imported torch already.",
    )
    command: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None, description="Any command instead of a script: program and arguments, one item each. No shell reads it."
    )
    args: list[Text] = Field(default=[], description="Arguments of the script, one item each.")
    python: NonEmptyText | None = Field(default=None, description="Interpreter for the script; empty: the one that runs the agent.")
    directory: NonEmptyText = Field(default=".", description="Working directory of the workers, relative to the job file.")
    nodes: Nodes = Field(default=Nodes(), description="How many nodes, spares and ranks.")
    environment: dict[Variable, Text] = Field(default={}, description="Environment variables for every worker.")
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
    limits: Limits = Field(default=Limits(), description="How long things may take before they count as a fault.")
    checks: Checks = Field(default=Checks(), description="What is monitored while training runs.")
    deadlines: Deadlines = Field(default=Deadlines(), description="How long each recovery action may take.")
    budget: Budget = Field(default=Budget(), description="How many recoveries the job may have.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in contradictions(self.model_dump(include={"script", "command", "args", "nodes", "checkpoint"})):
            context = {"reason": problem.reason, "cure": problem.cure, "field": problem.field}
            raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.inside(self.checkpoint.directory) if self.checkpoint.directory else paths.job_directory(self.name) / "checkpoints"

    def inside(self, path: str) -> Path:
        """Return *path* as seen from the job's working directory."""
        return Path(Path(self.directory).expanduser().absolute(), Path(path).expanduser())


def contradictions(fields: dict[str, object]) -> Iterator[Problem]:
    """Yield a problem for *fields* of a job that are valid alone but not together; unvalidated fields are accepted too."""
    script, command, args = fields.get("script"), fields.get("command"), fields.get("args")
    if script is None and command is None:
        yield Problem(field="script", reason="the job has nothing to run", cure="Set `script` (a Python file) or `command` (a list)")
    if script is not None and command is not None:
        yield Problem(field="command", reason="both `script` and `command` are set", cure="Keep one of them")
    if args and command is not None:
        yield Problem(field="args", reason="`args` belong to `script`", cure="Append them to `command`")
    nodes, checkpoint = fields.get("nodes"), fields.get("checkpoint")
    least, wanted = (nodes.get("least"), nodes.get("wanted", 1)) if isinstance(nodes, dict) else (None, None)
    if isinstance(least, int) and isinstance(wanted, int) and least > wanted:
        reason = f"the minimum number of nodes ({least}) is above the wanted one ({wanted})"
        yield Problem(field="nodes.least", reason=reason, cure="Lower `least`, or raise `wanted`")
    defaults = {name: info.default for name, info in CheckpointPlan.model_fields.items()}
    given = {**defaults, **checkpoint} if isinstance(checkpoint, dict) else defaults
    shortest, longest = given["every_least"], given["every_most"]
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        reason = f"the shortest checkpoint interval ({shortest}) is above the longest ({longest})"
        yield Problem(field="checkpoint.every_least", reason=reason, cure="Lower `every_least`, or raise `every_most`")
