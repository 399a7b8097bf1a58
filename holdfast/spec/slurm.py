"""What a user writes about a cluster that Slurm hands out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from holdfast.spec.burn_in import BurnInSettings
from holdfast.spec.durations import Duration, PositiveDuration, lasting
from holdfast.spec.job import NAME, FilledText, Part
from holdfast.spec.maintenance import Maintenance, Notice, check_plan
from holdfast.spec.quarantine import Quarantine
from holdfast.spec.ranges import names_in
from holdfast.spec.spelling import Inner, NodeNames, Program, contradiction, spelled
from policies.maintenance import MaintenanceWindow

Word = Annotated[
    str,
    spelled(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]{0,254}", "Write it as after the option of sbatch, without blanks or a leading dash"),
]
KILL_WAIT: Final = timedelta(seconds=30)
"""What Slurm leaves between SIGTERM and SIGKILL unless it was told otherwise."""
SHORTEST: Final = timedelta(minutes=1)
"""Slurm counts the time of an allocation in minutes."""

OURS: Final = {
    "account": "account",
    "array": "",
    "comment": "",
    "constraint": "constraint",
    "dependency": "",
    "error": "",
    "exclude": "exclude",
    "export": "",
    "gpus-per-node": "gpus",
    "gres": "gres",
    "help": "",
    "input": "",
    "job-name": "",
    "no-kill": "",
    "no-requeue": "",
    "nodelist": "",
    "nodes": "nodes.wanted",
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
"""Options of sbatch that are not to be given as such, and the field that says the same, if there is one."""


def _option(text: str) -> str:
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f\x7f]*)?", text)
    if found is None or len(text) > 1000:  # noqa: PLR2004 (a slip of the hand)
        cure = "Write the long option and its value as one item, e.g. `--mail-type=FAIL`"
        raise PydanticCustomError("option", "{shown} is no option of sbatch", {"shown": repr(text)[:80], "cure": cure})
    if found[1] in OURS:
        field = OURS[found[1]]
        cure = f"Use the field `{field}`" if field else "Leave it out"
        raise PydanticCustomError("option", "--{name} is Holdfast's to set", {"name": found[1], "cure": cure})
    return text


def _allocation(value: object) -> object:
    if value in ("auto", "new") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    cure = "Write `auto`, `new`, or the number of a Slurm job that you hold"
    raise PydanticCustomError("allocation", "{shown} names no allocation", {"shown": repr(value)[:80], "cure": cure})


class SlurmCluster(Part):
    """A cluster whose nodes Slurm hands out: a job asks for an allocation, or uses the one that it is run inside of."""

    kind: Literal["slurm"] = Field(description="Where the nodes come from; `slurm`: allocations of Slurm.")
    name: Annotated[str, Field(pattern=NAME)] = Field(default="slurm", description="Name of the cluster: small letters, digits and dashes.")
    partition: Word | None = Field(default=None, description="Partition, or several separated by commas; empty: Slurm's default one.")
    account: Word | None = Field(default=None, description="Account that is charged; empty: the user's default one.")
    qos: Word | None = Field(default=None, description="Quality of service; empty: the default one.")
    constraint: Word | None = Field(default=None, description="Features that nodes must have, as sbatch reads it, e.g. `h200&ib`.")
    gpus: StrictInt | None = Field(default=None, ge=1, description="GPUs on each node (`--gpus-per-node`).")
    gres: Word | None = Field(default=None, description="Generic resources on each node, e.g. `gpu:h200:8` (`--gres`).")
    time: PositiveDuration | None = Field(
        default=None,
        description="Length of an allocation, in whole minutes; when one ends before the job, it goes on in the next one. Empty: as long "
        "as the partition gives.",
    )
    ahead: Duration = lasting(
        "0s",
        description="So long before an allocation ends the next one is asked for, but half a minute and `limits.last_save` at least. If it "
        "comes in time, ranks move over while training goes on; else what they have is saved, and they go on there when it comes.",
    )
    options: list[Annotated[FilledText, AfterValidator(_option)]] = Field(
        default=[], description="More options of sbatch, one item each, e.g. `--mail-type=FAIL`. No shell reads them."
    )
    exclude: list[NodeNames] = Field(default=[], description="Nodes never to be used: names, or ranges such as `gpu-[01-16]`.")
    allocation: Annotated[int | str, BeforeValidator(_allocation)] = Field(
        default="auto",
        description="`new`: always ask for an allocation; a number: use that of this Slurm job, and leave it when the job ends; "
        "`auto`: use the one that `holdfast run` is run inside of, and ask for one where there is none.",
    )
    share: StrictBool = Field(default=False, description="Whether others may use what is left of the nodes; else they are asked for whole.")
    drain: StrictBool = Field(
        default=True,
        description="Whether nodes that are isolated are also drained in Slurm, where that is permitted; else, and where it is not, they "
        "are only excluded from what Holdfast asks for.",
    )
    directory: Program | None = Field(
        default=None, description="Folder on each node's own disk for what agents keep (`nodes/NAME`); empty: `/tmp/holdfast-USER`."
    )
    python: Program | None = Field(
        default=None, description="Interpreter on the nodes in which Holdfast is installed: a path. Empty: the one that runs the flow."
    )
    interface: Inner | None = Field(
        default=None,
        description="Interface for training traffic on each node: its name (`ib0`), or the network that it lies in (`10.1.0.0/16`); empty: "
        "the one with the node's address in Slurm.",
    )
    domains: dict[str, FilledText] = Field(
        default={},
        description="Failure domain of nodes, e.g. `gpu-01: rack-a`: what is kept twice is kept in two domains. A node that is not named "
        "fails by itself.",
    )
    quarantine: Quarantine = Field(default=Quarantine(), description="When nodes are taken out of service.")
    burn_in: BurnInSettings = Field(default=BurnInSettings(), description="How nodes are tried before they come back.")
    maintenance: list[Maintenance] = Field(default=[], description="Times at which nodes are taken away; each names its nodes.")
    notice: Notice = Field(
        default=Notice(lasts=KILL_WAIT),
        description="Where nodes are told that they will be taken away. Slurm tells them by SIGTERM when it takes an allocation back; "
        "`lasts` is its KillWait.",
    )
    plan: FilledText | None = Field(
        default=None,
        description="YAML file whose `maintenance` and `notice` are read anew while jobs run; empty: the file that the cluster stands in.",
    )

    @property
    def excluded(self) -> list[str]:
        """Return the names of the nodes never to be used."""
        return [name for text in self.exclude for name in names_in(text)]

    @property
    def minutes(self) -> int | None:
        """Return the length of an allocation, as Slurm counts it."""
        return None if self.time is None else -(-self.time // SHORTEST)

    def labelled(self, wanted: Mapping[str, str]) -> list[str]:
        """Return the names of the nodes that have all the labels *wanted*: here none has any."""
        assert wanted
        return []

    @property
    def windows(self) -> tuple[MaintenanceWindow, ...]:
        """Return the maintenance windows, each with its nodes."""
        return tuple(one.window(self._named(one), self.domains) for one in self.maintenance)

    def _named(self, one: Maintenance) -> list[str]:
        """Return the nodes that a window names: which there are only Slurm knows."""
        return [*(name for text in one.nodes for name in names_in(text)), *self.domains]

    @model_validator(mode="after")
    def _closes_nodes_by_name(self) -> Self:
        for number, one in enumerate(self.maintenance):
            if not one.nodes and not one.domains:
                cure = "Name them, or make a reservation in Slurm, which keeps all jobs away"
                raise contradiction(f"maintenance[{number}].nodes", "which nodes there are only Slurm knows", cure)
        check_plan(self.maintenance, [name for one in self.maintenance for name in self._named(one)], self.domains)
        return self

    @model_validator(mode="after")
    def _asks_for_gpus_once(self) -> Self:
        if self.gpus is not None and self.gres is not None and re.search(r"(^|,)(gres[:/])?gpu\b", self.gres):
            raise contradiction("gpus", "`gres` asks for GPUs too", "Keep one of them")
        for option, times in Counter(text.partition("=")[0] for text in self.options).items():
            if times > 1:
                raise contradiction("options", f"{option} is given {times} times", "Keep one")
        return self
