"""What a user writes about a cluster whose nodes Slurm allocates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from holdfast.policies.nodes.maintenance import MaintenanceWindow
from holdfast.spec.cluster_settings import (
    BurnInField,
    BurnInSettings,
    DomainsField,
    Maintenance,
    MaintenanceField,
    MaintenanceFileField,
    PreemptionNotice,
    Quarantine,
    QuarantineField,
    check_maintenance,
)
from holdfast.spec.files.names import Interface, NodeNames, Program, contradiction, expand_names, matches
from holdfast.spec.files.units import Duration, PositiveDuration, duration_field
from holdfast.spec.job import NAME, NonEmptyText, SpecModel

OptionValue = Annotated[
    str,
    matches(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]{0,254}", "Write it as after the option of sbatch, without blanks or a leading dash"),
]
KILL_WAIT: Final = timedelta(seconds=30)
"""Slurm's default time between SIGTERM and SIGKILL."""
MINUTE: Final = timedelta(minutes=1)
"""Slurm's unit for the time of an allocation."""

RESERVED: Final = {
    "account": "account",
    "array": "",
    "comment": "",
    "constraint": "constraint",
    "dependency": "",
    "error": "",
    "exclude": "exclude",
    "export": "",
    "gpus": "gpus",
    "gpus-per-node": "gpus",
    "gpus-per-task": "gpus",
    "gres": "gres",
    "help": "",
    "input": "",
    "job-name": "",
    "no-kill": "",
    "no-requeue": "",
    "nodelist": "",
    "nodes": "nnodes",
    "ntasks": "",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "partition": "partition",
    "qos": "qos",
    "requeue": "",
    "test-only": "",
    "time": "time",
    "usage": "",
    "version": "",
    "wait": "",
    "wrap": "",
}
"""Options of sbatch that a cluster file must not set, and the field to use instead, if there is one."""


def _option(text: str) -> str:
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f\x7f]*)?", text)
    if found is None or len(text) > 1000:  # noqa: PLR2004 (a typing error)
        cure = "Write the long option and its value as one item, e.g. `--mail-type=FAIL`"
        raise PydanticCustomError("option", "{shown} is not an option of sbatch", {"shown": repr(text)[:80], "cure": cure})
    if found[1] in RESERVED:
        field = RESERVED[found[1]]
        cure = f"Use the field `{field}`" if field else "Leave it out"
        raise PydanticCustomError("option", "--{name} is set by Holdfast", {"name": found[1], "cure": cure})
    return text


def _allocation(value: object) -> object:
    if value in ("auto", "new") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    cure = "Write `auto`, `new`, or the number of one of your Slurm jobs"
    raise PydanticCustomError("allocation", "{shown} does not name an allocation", {"shown": repr(value)[:80], "cure": cure})


class SlurmCluster(SpecModel):
    """A cluster whose nodes Slurm allocates: a job requests an allocation, or uses the one that it is started in."""

    kind: Literal["slurm"] = Field(description="Where the nodes come from; `slurm`: allocations of Slurm.")
    name: Annotated[str, Field(pattern=NAME)] = Field(
        default="slurm", description="Name of the cluster: lowercase letters, digits and dashes."
    )
    partition: OptionValue | None = Field(
        default=None, description="Partition, or several separated by commas; empty: Slurm's default one."
    )
    account: OptionValue | None = Field(default=None, description="Account that is charged; empty: the user's default one.")
    qos: OptionValue | None = Field(default=None, description="Quality of service; empty: the default one.")
    constraint: OptionValue | None = Field(default=None, description="Features that nodes must have, as sbatch reads it, e.g. `h200&ib`.")
    gpus: StrictInt | None = Field(default=None, ge=1, description="GPUs on each node (`--gpus-per-node`).")
    gres: OptionValue | None = Field(default=None, description="Generic resources on each node, e.g. `gpu:h200:8` (`--gres`).")
    time: PositiveDuration | None = Field(
        default=None,
        description="Length of an allocation, in minutes; when one ends before the job, the job continues in the next one. Empty: the "
        "limit of the partition.",
    )
    lead_time: Duration = duration_field(
        "0s",
        description="How long before an allocation ends the next one is requested, at least half a minute and "
        "`timeouts.final_checkpoint`. If it starts in time, ranks migrate while training runs; else a final "
        "checkpoint is saved, and they continue there when it starts.",
    )
    options: list[Annotated[NonEmptyText, AfterValidator(_option)]] = Field(
        default=[], description="More options of sbatch, one item each, e.g. `--mail-type=FAIL`. No shell reads them."
    )
    exclude: list[NodeNames] = Field(default=[], description="Nodes never to be used: names, or ranges such as `gpu-[01-16]`.")
    allocation: Annotated[int | str, BeforeValidator(_allocation)] = Field(
        default="auto",
        description="`new`: always request an allocation; a number: use that of this Slurm job, and keep it when the job ends; "
        "`auto`: use the one that `holdfast run` is started in, and request one where there is none.",
    )
    exclusive: StrictBool = Field(
        default=True, description="Whether the job gets whole nodes (`--exclusive`); else other jobs may use the rest of them."
    )
    drain: StrictBool = Field(
        default=True,
        description="Whether isolated nodes are also drained in Slurm, where that is permitted; else, and where it is not, Holdfast only "
        "excludes them from its requests.",
    )
    directory: Program | None = Field(
        default=None, description="Folder on each node's own disk for the agents' files (`nodes/NAME`); empty: `/tmp/holdfast-USER`."
    )
    python: Program | None = Field(
        default=None,
        description="Interpreter on the nodes in which Holdfast is installed: a path. Empty: the one that runs the controller.",
    )
    interface: Interface | None = Field(
        default=None,
        description="Interface for training traffic on each node: its name (`ib0`), or its network (`10.1.0.0/16`); empty: "
        "the one with the node's address in Slurm.",
    )
    failure_domains: DomainsField = Field(default={})
    quarantine: QuarantineField = Quarantine()
    burn_in: BurnInField = BurnInSettings()
    maintenance: MaintenanceField = Field(default=[])
    preemption_notice: PreemptionNotice = Field(
        default=PreemptionNotice(lead_time=KILL_WAIT),
        description="Where preemption notices appear. Slurm sends SIGTERM when it preempts an allocation; `lead_time` is its KillWait.",
    )
    maintenance_file: MaintenanceFileField = None

    @property
    def excluded(self) -> list[str]:
        """Return the names of the nodes never to be used."""
        return [name for text in self.exclude for name in expand_names(text)]

    @property
    def minutes(self) -> int | None:
        """Return the length of an allocation in minutes, rounded up."""
        return None if self.time is None else -(-self.time // MINUTE)

    def labelled(self, wanted: Mapping[str, str]) -> list[str]:
        """Return the names of the nodes that have all the labels *wanted*: nodes of Slurm have none."""
        assert wanted
        return []

    @property
    def windows(self) -> tuple[MaintenanceWindow, ...]:
        """Return the maintenance windows, each with its nodes."""
        return tuple(one.window(self._named(one), self.failure_domains) for one in self.maintenance)

    def _named(self, one: Maintenance) -> list[str]:
        """Return the nodes that a window names: only Slurm knows which nodes exist."""
        return [*(name for text in one.nodes for name in expand_names(text)), *self.failure_domains]

    @model_validator(mode="after")
    def _closes_nodes_by_name(self) -> Self:
        for number, one in enumerate(self.maintenance):
            if not one.nodes and not one.failure_domains:
                cure = "Name them, or make a reservation in Slurm, which keeps all jobs away"
                raise contradiction(f"maintenance[{number}].nodes", "only Slurm knows which nodes exist", cure)
        check_maintenance(self.maintenance, [name for one in self.maintenance for name in self._named(one)], self.failure_domains)
        return self

    @model_validator(mode="after")
    def _sets_each_option_once(self) -> Self:
        if self.gpus is not None and self.gres is not None and re.search(r"(^|,)(gres[:/])?gpu\b", self.gres):
            raise contradiction("gpus", "`gres` requests GPUs too", "Keep one of them")
        for option, times in Counter(text.partition("=")[0] for text in self.options).items():
            if times > 1:
                raise contradiction("options", f"{option} is set {times} times", "Keep one")
        return self
