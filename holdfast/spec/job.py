"""What a user writes about a job: the `TrainingJob` and its parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from holdfast import paths
from holdfast.errors import Problem
from holdfast.spec.durations import Duration, PositiveDuration, lasting
from holdfast.spec.sizes import Size

NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""Names become folders, parts of URLs and host labels: the strictest of the three decides."""

OURS: Final = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
})  # fmt: skip
"""Variables that the agent sets for each worker; a job cannot."""

POLICIES: Final = ("patient", "balanced", "aggressive")
"""Names of policies; anything else that a job may say there is the path of a file."""


def _text(value: str) -> str:
    """Refuse what no file name and no argument can hold."""
    if "\0" in value:
        raise PydanticCustomError("nul", "contains a NUL character", {"cure": "Remove it"})
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise PydanticCustomError("surrogate", "contains half a character", {"cure": "Remove it; write text as UTF-8"})
    return value


def _variable(name: str) -> str:
    """Refuse a name that the environment cannot hold or that the agent sets."""
    if not name or "=" in name or any(letter.isspace() or not letter.isprintable() for letter in name):
        raise PydanticCustomError("variable", "is not a name of an environment variable", {"cure": "Use letters, digits and underscores"})
    if name in OURS or name.startswith("HOLDFAST_"):
        raise PydanticCustomError("variable", "is set by Holdfast for every worker", {"cure": "Remove it from `environment`"})
    return name


def is_policy_file(policy: str) -> bool:
    """Tell whether *policy* is the path of a file rather than a name."""
    return policy not in POLICIES and (policy.lower().endswith((".yaml", ".yml", ".json")) or "/" in policy)


def _policy(policy: str) -> str:
    """Refuse a name that no policy has."""
    if policy in POLICIES or is_policy_file(policy):
        return policy
    near = difflib.get_close_matches(policy[:120], POLICIES, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Write {', '.join(POLICIES)}, or the path of a policy file (.yaml)"
    raise PydanticCustomError("policy", "no policy is called {shown}", {"shown": repr(policy)[:80], "cure": cure})


Text = Annotated[str, AfterValidator(_text)]
FilledText = Annotated[Text, Field(min_length=1)]
Variable = Annotated[Text, AfterValidator(_variable)]


class Part(BaseModel):
    """Base of everything a user writes: unknown fields are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Nodes(Part):
    """How many nodes a job takes, and how many workers run on each."""

    wanted: StrictInt = Field(default=1, ge=1, description="Nodes that train.")
    least: StrictInt | None = Field(
        default=None, ge=1, description="Fewest nodes the job may shrink to when nodes are lost; empty: it never shrinks."
    )
    spare: StrictInt = Field(
        default=0, ge=0, description="Further nodes held ready to replace a lost one; filled up from free nodes while training runs."
    )
    ranks: StrictInt = Field(default=1, ge=1, description="Ranks (workers) on each node.")
    labels: dict[FilledText, FilledText] = Field(
        default={},
        description="Labels that nodes must have, as the cluster's file gives them to its hosts, e.g. `{gpu: h200}`; empty: any node.",
    )
    standbys: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Warm processes that wait to take over lost ranks, where nodes have room first, then beside workers; empty: as many as "
        "the spare nodes have ranks, while there is room, if the script's groups can be mended (`holdfast.join`), else none.",
    )

    @property
    def min_nodes(self) -> int:
        """Return the fewest nodes the job may run on."""
        return self.wanted if self.least is None else self.least


class MemoryPlan(Part):
    """Copies of the state in the nodes' memory, taken beside training: what a fault costs is then a step, not all since a checkpoint."""

    every: StrictInt = Field(default=1, ge=0, description="Steps between two snapshots in memory; 0 takes none.")
    overhead: float = Field(
        default=0.01,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the training time that snapshots may take, as steps without one show, before they are taken less often.",
    )
    policy: Literal["skip", "pause"] = Field(
        default="skip",
        description="What to do when a copy does not fit into the idle time: skip takes every n-th step, pause holds the step up a little.",
    )
    pause: PositiveDuration = lasting("100ms", description="The longest that one step is held up under `policy: pause`.")
    limit: Size | None = Field(
        default=None, description="Memory of each node that snapshots and replicas may take, e.g. `8GB`; empty: half of what is free."
    )
    replicas: StrictInt = Field(
        default=1, ge=0, le=1, description="Further nodes on which each snapshot is kept; 0: a lost node takes its ranks' snapshots along."
    )
    bandwidth: Size | None = Field(
        default=None, description="Bytes a second that each node may send for its replicas, e.g. `500MB`; empty: as many as it can."
    )


FIRST: Final = 100
"""Steps between two checkpoints with which ``auto`` begins."""


class CheckpointPlan(Part):
    """Where checkpoints go, how often, and how many stay."""

    directory: FilledText | None = Field(
        default=None, description="Folder of the checkpoints, seen by every node; empty: `checkpoints` in the job's folder."
    )
    every: Annotated[StrictInt, Field(ge=0)] | Literal["auto"] = Field(
        default=100,
        description="Steps between two checkpoints; 0 saves none; `auto` follows what saves cost and how often faults come, from the third "
        "save on (`holdfast advise` shows the figures).",
    )
    every_least: StrictInt = Field(default=10, ge=1, description="Fewest steps between two checkpoints that `every: auto` may choose.")
    every_most: StrictInt = Field(default=10_000, ge=1, description="Most steps between two checkpoints that `every: auto` may choose.")
    keep: StrictInt = Field(default=2, ge=2, description="Checkpoints kept; at least 2, so that a corrupt one never is the last.")
    bandwidth: Size | None = Field(
        default=None,
        description="Bytes a second that each node may write for checkpoints beside training, e.g. `500MB`; empty: as many as it can.",
    )
    memory: MemoryPlan = Field(default=MemoryPlan(), description="Copies of the state in the nodes' memory, between checkpoints.")

    @field_validator("every", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        """Refuse in one sentence what is neither; pydantic has one for each of the two."""
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        cure = "Write a number of steps, 0 for no checkpoints, or `auto`, without quotes around a number"
        raise PydanticCustomError(
            "every", "{shown} is neither a whole number of at least 0 nor `auto`", {"shown": repr(value)[:80], "cure": cure}
        )

    @property
    def first(self) -> int:
        """Return the steps between two checkpoints before anything has been measured."""
        return max(self.every_least, min(self.every_most, FIRST)) if self.every == "auto" else self.every


class Limits(Part):
    """How long things may take before they count as a fault. Write `90s`, `5m`, `2h`, `1d`, or a number of seconds."""

    first_step: PositiveDuration = lasting("30m", description="From start of the workers to the first step.")
    hang_least: PositiveDuration = lasting("2s", description="A shorter silence between two steps is never told of.")
    hang_factor: float = Field(
        default=3.0,
        gt=1,
        allow_inf_nan=False,
        description="A step this many times longer than the median of the job's own steps is told of, and is a hang if the ranks prove "
        "to wait for each other.",
    )
    hang_timeout: PositiveDuration = lasting(
        "5m",
        description="A silence between two steps that is acted on although nothing proves a hang, and only once it is three times as long "
        "as the longest from which the job went on by itself: an evaluation or a save that nobody declared is none.",
    )
    section: PositiveDuration = lasting(
        "30m", description="A declared long section (compile, save, evaluation) that states no limit of its own."
    )
    stop_grace: Duration = lasting("10s", description="From SIGTERM to SIGKILL when a person stops the job.")
    last_save: Duration = lasting(
        "30s",
        description="When a job ends before its goal, what its nodes hold in memory is put on disk for so long at most; 0 lets it go.",
    )
    walltime: PositiveDuration | None = Field(
        default=None,
        description="The job ends so long after it was submitted, as when its allocation ends: what it has is saved before (within "
        "`last_save`), and the same `holdfast run` goes on from there; empty: never.",
    )
    stopped_grace: Duration = lasting("1s", description="A worker stopped by a signal for longer is a fault.")
    agent_silence: PositiveDuration = lasting("5s", description="An agent that says nothing for so long is asked about.")
    lease: PositiveDuration = lasting("30m", description="Agents end their workers when no flow has spoken to them for so long.")
    output_silence: PositiveDuration | None = Field(
        default=None,
        description="A script without heartbeats of which no rank prints anything for so long is hung, until its first output not before "
        "`first_step`; empty: never.",
    )
    end_grace: PositiveDuration = lasting(
        "5m",
        description="When some ranks have ended with status 0, the others may go on for so long without a step, an output or an end; if "
        "rank 0 has ended the job is completed then.",
    )


class Checks(Part):
    """What is looked at while training goes well."""

    copies: StrictInt | Literal["auto"] = Field(
        default="auto",
        description="Steps between two comparisons of the parameters of ranks that hold copies of each other, which tell silent "
        "corruption; `auto`: as often as costs less than half a percent of the training time; 0: never.",
    )
    nodes: bool = Field(
        default=True,
        description="Have a process beside each agent look for faults of its node while the job runs (kernel log, GPUs, network, disks).",
    )
    straggler: Literal["tell", "auto", "migrate"] = Field(
        default="tell",
        description="What follows when one rank holds the others up for long, or something is wrong with a node that training goes on "
        "through: tell of it; `auto`: move it to a spare node meanwhile if its slowness costs more than that, by the policy; or move a "
        "slow rank in any case.",
    )

    @field_validator("copies", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        """Refuse in one sentence what is neither."""
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        cure = "Write a number of steps, 0 for no comparison, or `auto`, without quotes around a number"
        raise PydanticCustomError(
            "copies", "{shown} is neither a whole number of at least 0 nor `auto`", {"shown": repr(value)[:80], "cure": cure}
        )


class Deadlines(Part):
    """How long each recovery action may take; the next is tried at once after it. Empty: as long as the policy says."""

    retry_step: PositiveDuration | None = Field(
        default=None, description="No rank is lost: build the groups anew and do the step again; else 20s."
    )
    take_over: PositiveDuration | None = Field(
        default=None, description="Keep the ranks that live, and replace the lost ones by warm processes; else 20s."
    )
    narrow: PositiveDuration | None = Field(
        default=None, description="Keep the ranks that live, and go on with fewer copies of the model; else 20s."
    )
    restart_in_place: PositiveDuration | None = Field(default=None, description="Restart the workers on the same nodes; else 2m.")
    replace_node: PositiveDuration | None = Field(default=None, description="Replace a node by a spare one; else 3m.")
    shrink: PositiveDuration | None = Field(default=None, description="Go on with fewer nodes, where the job allows it; else 3m.")
    wait_for_capacity: Duration | None = Field(default=None, description="Wait for nodes to come back before giving up; else 1d.")
    migrate: PositiveDuration = lasting(
        "10m", description="A planned move, while training goes on; one that takes longer is given up and changes nothing."
    )


class Budget(Part):
    """How many recoveries a job may have, so that a broken script never loops. Empty: as many as the policy says."""

    in_place: StrictInt | None = Field(
        default=None, ge=0, description="Restarts in place on one node within the window, before it is replaced; else 3."
    )
    window: PositiveDuration | None = Field(default=None, description="The window in which recoveries are counted; else 1h.")
    recoveries: StrictInt | None = Field(
        default=None, ge=0, description="Recoveries of the job within the window, before it is given up; else 20."
    )
    fruitless: StrictInt | None = Field(
        default=None,
        ge=1,
        description="Recoveries in a row without one new step, before the job is given up, a spare node tried first; those that answer a "
        "lost node do not count. A job that reports no steps got on when it ran for three times as long as from its start to its first "
        "output and 5s at least, or for 60s where it prints nothing; else 3.",
    )


class TrainingJob(Part):
    """A training job: what to run, on how many nodes, and how it recovers."""

    name: str = Field(pattern=NAME, description="Name of the job: small letters, digits and dashes.", examples=["gpt-small"])
    script: FilledText | None = Field(
        default=None,
        description="Python script to train with, relative to the directory; started in a process that has torch imported already.",
    )
    command: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None, description="Any command instead of a script: program and arguments, one item each. No shell reads it."
    )
    args: list[Text] = Field(default=[], description="Arguments of the script, one item each.")
    python: FilledText | None = Field(default=None, description="Interpreter for the script; empty: the one that runs the agent.")
    directory: FilledText = Field(default=".", description="Working directory of the workers, relative to the job file.")
    nodes: Nodes = Field(default=Nodes(), description="How many nodes, spares and ranks.")
    environment: dict[Variable, Text] = Field(default={}, description="Environment variables for every worker.")
    checkpoint: CheckpointPlan = Field(default=CheckpointPlan(), description="Where checkpoints go, how often, how many stay.")
    policy: Annotated[Text, AfterValidator(_policy)] = Field(
        default="balanced",
        description="`patient` keeps nodes longest, `aggressive` replaces them first, `balanced` stands between them; or the path of "
        "a policy file (.yaml), relative to the job file.",
        examples=["patient", "balanced", "aggressive"],
    )
    progress: Literal["auto", "steps", "none"] = Field(
        default="auto",
        description="Whether steps are expected: auto from the first worker that announces itself, steps always, none never.",
    )
    preflight: StrictBool = Field(
        default=True,
        description="Whether nodes are looked at before ranks are put on them: unhealthy ones are used only where there are no others.",
    )
    limits: Limits = Field(default=Limits(), description="How long things may take before they count as a fault.")
    checks: Checks = Field(default=Checks(), description="What is looked at while training goes well.")
    deadlines: Deadlines = Field(default=Deadlines(), description="How long each action of the recovery may take.")
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
    """Say which of the *fields*, each fine alone, cannot stand together. Takes them raw too: a bad file is told all at once."""
    script, command, args = fields.get("script"), fields.get("command"), fields.get("args")
    if script is None and command is None:
        yield Problem(field="script", reason="the job says nothing to run", cure="Set `script` (a Python file) or `command` (a list)")
    if script is not None and command is not None:
        yield Problem(field="command", reason="both `script` and `command` are set", cure="Keep one of them")
    if args and command is not None:
        yield Problem(field="args", reason="`args` belong to `script`", cure="Append them to `command`")
    yield from _crossed(fields)


def _crossed(fields: dict[str, object]) -> Iterator[Problem]:
    """Say which lower limits lie above their upper ones."""
    nodes, checkpoint = fields.get("nodes"), fields.get("checkpoint")
    least, wanted = (nodes.get("least"), nodes.get("wanted", 1)) if isinstance(nodes, dict) else (None, None)
    if isinstance(least, int) and isinstance(wanted, int) and least > wanted:
        yield Problem(
            field="nodes.least",
            reason=f"the fewest nodes ({least}) are more than wanted ({wanted})",
            cure="Lower `least`, or raise `wanted`",
        )
    known = {name: field.default for name, field in CheckpointPlan.model_fields.items()}
    given = {**known, **checkpoint} if isinstance(checkpoint, dict) else known
    few, many = given["every_least"], given["every_most"]
    if isinstance(few, int) and isinstance(many, int) and few > many:
        yield Problem(
            field="checkpoint.every_least",
            reason=f"the fewest steps between checkpoints ({few}) are more than the most ({many})",
            cure="Lower `every_least`, or raise `every_most`",
        )
