"""What a user writes about a cluster on this machine or reached by SSH; clusters of Slurm are in `holdfast.spec.slurm`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    StrictInt,
    Tag,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from holdfast import paths
from holdfast.policies.nodes.maintenance import MaintenanceWindow
from holdfast.security.secrets import is_secret_reference
from holdfast.spec.cluster_settings import (
    BurnInField,
    BurnInSettings,
    DomainsField,
    MaintenanceField,
    MaintenanceFileField,
    PreemptionNotice,
    PreemptionNoticeField,
    Quarantine,
    QuarantineField,
    check_maintenance,
)
from holdfast.spec.files.names import PLAIN_NAME, Interface, NodeNames, Program, contradiction, expand_names, matches
from holdfast.spec.job import NAME, NonEmptyText, SpecModel
from holdfast.spec.slurm import SlurmCluster

MAX_LOCAL_NODES = 256
"""Each is a process on this machine; a larger number is a typing error."""


def _secret_location(text: str) -> str:
    """Refuse what may be a passphrase itself, and do not show it."""
    if not is_secret_reference(text) and "/" not in text:
        cure = "Write `env:VARIABLE`, `block:NAME`, or a file with its folder (`./passphrase`); never the passphrase itself"
        raise PydanticCustomError("spelling", "does not say where the passphrase is", {"cure": cure})
    return text


Address = Annotated[str, matches(r"[A-Za-z0-9:][A-Za-z0-9:._%-]{0,253}", "Write the name or the address of a machine, and nothing else")]
Addresses = Annotated[
    str,
    matches(
        r"[A-Za-z0-9:][A-Za-z0-9:._%-]{0,253}|[A-Za-z0-9:][A-Za-z0-9:._%-]{0,200}(\[[0-9,-]{1,200}\][A-Za-z0-9:._%-]{0,200}){1,4}",
        "Write the name or the address of a machine, or a range such as '10.0.3.[1-16]', and nothing else",
    ),
]
Login = Annotated[str, matches(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,254}[$]?", "Write the name of an account")]
Passphrase = Annotated[NonEmptyText, AfterValidator(_secret_location)]
Gpus = Annotated[StrictInt, Field(ge=0, le=1024)]
Label = Annotated[str, matches(PLAIN_NAME, "Use letters, digits, dots and dashes")]
Port = Annotated[StrictInt, Field(ge=1, le=65535)]


class LocalCluster(SpecModel):
    """A cluster on this machine: each node is a directory and an agent process."""

    kind: Literal["local"] = Field(default="local", description="Where the nodes come from; `local`: this machine.")
    name: Annotated[str, Field(pattern=NAME)] = Field(
        default="local", description="Name of the cluster: lowercase letters, digits and dashes."
    )
    nodes: StrictInt = Field(
        default=4,
        ge=1,
        le=MAX_LOCAL_NODES,
        description="Nodes in the cluster. Each has its own part of this machine's GPUs (`CUDA_VISIBLE_DEVICES`), no two share one.",
    )
    directory: NonEmptyText | None = Field(
        default=None, description="Folder that holds the nodes; empty: `clusters/NAME` in Holdfast's own folder."
    )
    failure_domains: DomainsField = Field(default={})
    quarantine: QuarantineField = Quarantine()
    burn_in: BurnInField = BurnInSettings()
    maintenance: MaintenanceField = Field(default=[])
    preemption_notice: PreemptionNoticeField = PreemptionNotice()
    maintenance_file: MaintenanceFileField = None

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        known = self.names
        for node in self.failure_domains:
            if node not in known:
                reason = f"there is no node '{node[:80]}' in a cluster of {self.nodes}"
                raise contradiction(f"failure_domains.{node[:80]}", reason, f"Name one of {known[0]} to {known[-1]}")
        check_maintenance(self.maintenance, known, self.failure_domains)
        return self

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes."""
        return [f"node-{number}" for number in range(self.nodes)]

    def labelled(self, wanted: Mapping[str, str]) -> list[str]:
        """Return the names of the nodes that have all the labels *wanted*: local nodes have none."""
        return [] if wanted else self.names

    @property
    def gpus_of(self) -> dict[str, int]:
        """Return nothing: all nodes share the GPUs of this machine."""
        return {}

    @property
    def windows(self) -> tuple[MaintenanceWindow, ...]:
        """Return the maintenance windows, each with its nodes."""
        return tuple(one.window(self.names, self.failure_domains) for one in self.maintenance)

    @property
    def home(self) -> Path:
        """Return the folder that holds the nodes."""
        return Path(self.directory).expanduser().absolute() if self.directory else paths.cluster_directory(self.name)


def _parse_hop(value: object) -> object:
    """Return the fields that `user@host:port` is short for."""
    if not isinstance(value, str):
        return value
    user, at, rest = value.rpartition("@")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):  # a bare IPv6 address has no port
        host, port = rest, ""
    return {"address": host.strip("[]"), **({"user": user} if at else {}), **({"port": int(port)} if port else {})}


class SshHop(SpecModel):
    """A machine that connections go through. `user@host:port` is short for its fields."""

    address: Address = Field(description="Name or address of the machine.")
    port: Port = Field(default=22, description="Port that its SSH server listens on.")
    user: Login | None = Field(default=None, description="Login name; empty: as on the nodes.")
    key: NonEmptyText | None = Field(default=None, description="File of the private key; empty: as for the nodes.")
    passphrase: Passphrase | None = Field(default=None, description="Where the passphrase of the key is; empty: as for the nodes.")


JumpHosts = Annotated[
    list[Annotated[SshHop, BeforeValidator(_parse_hop)]], BeforeValidator(lambda value: value if isinstance(value, list) else [value])
]


class SshHost(SpecModel):
    """A node that is reached by SSH, or several alike. A name alone is short for its fields."""

    name: NodeNames = Field(description="Name of the node; a range (`gpu[001-128]`, `gpu-[1-4,7]`) stands for as many nodes.")
    address: Addresses | None = Field(
        default=None, description="Name or address under which it is reached, or a range of as many; empty: its name."
    )
    port: Port | None = Field(default=None, description="Port that its SSH server listens on; empty: the cluster's.")
    user: Login | None = Field(default=None, description="Login name; empty: the cluster's.")
    key: NonEmptyText | None = Field(default=None, description="File of the private key; empty: the cluster's.")
    passphrase: Passphrase | None = Field(default=None, description="Where the passphrase of the key is; empty: the cluster's.")
    jump: JumpHosts | None = Field(default=None, description="Jump hosts, first to last; empty: the cluster's; `[]`: none.")
    python: Program | None = Field(default=None, description="Interpreter on it; empty: the cluster's.")
    directory: Program | None = Field(
        default=None,
        description="Folder on it for Holdfast's files; empty: the cluster's. Hosts with different interpreters that share one home need "
        "separate folders.",
    )
    interface: Interface | None = Field(default=None, description="Its interface for training traffic; empty: the cluster's.")
    failure_domain: NonEmptyText | None = Field(default=None, description="Its failure domain, e.g. `rack-a`: what `maintenance` may name.")
    gpus: Gpus | None = Field(default=None, description="Number of its GPUs; empty: the cluster's.")
    labels: dict[Label, NonEmptyText] = Field(
        default={}, description="Its properties, e.g. `{gpu: h200}`: a job may require them with `node_labels`."
    )

    @model_validator(mode="after")
    def _has_an_address_for_each(self) -> Self:
        names, addresses = expand_names(self.name), expand_names(self.address or "")
        if len(addresses) not in {1, len(names)}:
            cure = "Write a range of as many, or one address and each host by itself with a port of its own"
            raise contradiction("address", f"{len(addresses)} addresses for {len(names)} names", cure)
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset fields: of thousands of nodes that is nearly all, and Prefect accepts half a megabyte of parameters."""
        return {name: value for name, value in whole(self).items() if value is not None and value != {}}

    def each(self) -> list[Self]:
        """Return the nodes that it stands for."""
        names = expand_names(self.name)
        if names == [self.name]:
            return [self]
        addresses = expand_names(self.address) if self.address is not None else [None]
        addresses *= len(names) // len(addresses)
        return [self.model_copy(update={"name": name, "address": one}) for name, one in zip(names, addresses, strict=True)]


class SshCluster(SpecModel):
    """A cluster of machines that are reached by SSH. Health checks need their python3 alone; for jobs see `holdfast node bootstrap`."""

    kind: Literal["ssh"] = Field(description="Where the nodes come from; `ssh`: machines with an SSH server.")
    name: Annotated[str, Field(pattern=NAME)] = Field(
        default="ssh", description="Name of the cluster: lowercase letters, digits and dashes."
    )
    hosts: Annotated[
        list[Annotated[SshHost, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]], Field(min_length=1)
    ] = Field(description="The nodes: a name, a range of names (`gpu[001-128]`), or fields.")
    port: Port = Field(default=22, description="Port that the nodes' SSH servers listen on.")
    user: Login | None = Field(default=None, description="Login name; empty: the user that runs Holdfast.")
    key: NonEmptyText | None = Field(
        default=None,
        description="File of the private key, or the `.pub` file of one that the SSH agent has; `env:VARIABLE` and `block:NAME` take it "
        "from the environment or from a Prefect block of the type Secret; empty: all keys of the SSH agent, then `~/.ssh/id_*`.",
    )
    passphrase: Passphrase | None = Field(
        default=None,
        description="Where the passphrase of the key is, or of `~/.ssh/id_*`: `env:VARIABLE`, `block:NAME`, or a file. Empty: keys that "
        "have one must be in the SSH agent.",
    )
    known_hosts: NonEmptyText | None = Field(
        default=None,
        description="File of the nodes' and jump hosts' keys, or of authorities (`@cert-authority`) that sign them, as OpenSSH writes it; "
        "empty: `~/.ssh/known_hosts`. Only `holdfast node trust` writes to it. `/etc/ssh/ssh_known_hosts` is read as well.",
    )
    jump: JumpHosts = Field(default=[], description="Jump hosts, first to last: `user@host:port`, or fields.")
    python: Program = Field(
        default="python3",
        description="Interpreter on the nodes, 3.10 or newer: a name, an absolute path, or a path relative to the home of the login.",
    )
    directory: Program = Field(
        default=".holdfast",
        description="Folder on each node for what `holdfast node bootstrap` installs (`env`), its agent's files (`nodes/NAME`) and the "
        "logs of jobs (`jobs`): a path, or one relative to the home of the login.",
    )
    interface: Interface | None = Field(
        default=None,
        description="Interface for training traffic on each node: its name (`ib0`), or its network (`10.1.0.0/16`); empty: "
        "the one by which the node is reached.",
    )
    gpus: Gpus | None = Field(
        default=None,
        description="GPUs of each node: `holdfast node preflight` finds nodes with another number; empty: it only compares them.",
    )
    failure_threshold: StrictInt = Field(
        default=3, ge=1, le=100, description="Consecutive health checks without an answer before a node counts as unreachable."
    )
    quarantine: QuarantineField = Quarantine()
    burn_in: BurnInField = BurnInSettings()
    maintenance: MaintenanceField = Field(default=[])
    preemption_notice: PreemptionNoticeField = PreemptionNotice()
    maintenance_file: MaintenanceFileField = None

    @property
    def machines(self) -> list[SshHost]:
        """Return the nodes one by one."""
        return [one for host in self.hosts for one in host.each()]

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes."""
        return [host.name for host in self.machines]

    def labelled(self, wanted: Mapping[str, str]) -> list[str]:
        """Return the names of the nodes that have all the labels *wanted*."""
        return [host.name for host in self.machines if wanted.items() <= host.labels.items()]

    @property
    def gpus_of(self) -> dict[str, int]:
        """Return the number of GPUs of each node for which the file states it."""
        counts = {host.name: self.gpus if host.gpus is None else host.gpus for host in self.machines}
        return {name: count for name, count in counts.items() if count is not None}

    @property
    def failure_domains(self) -> dict[str, str]:
        """Return the failure domain of each node that has one."""
        return {host.name: host.failure_domain for host in self.machines if host.failure_domain is not None}

    @property
    def directories(self) -> dict[str, str]:
        """Return Holdfast's folder on each node that has its own setting."""
        return {host.name: host.directory for host in self.machines if host.directory is not None}

    @property
    def interfaces(self) -> dict[str, str]:
        """Return the interface for training traffic of each node that has its own setting."""
        return {host.name: host.interface for host in self.machines if host.interface is not None}

    @property
    def windows(self) -> tuple[MaintenanceWindow, ...]:
        """Return the maintenance windows, each with its nodes."""
        return tuple(one.window(self.names, self.failure_domains) for one in self.maintenance)

    @model_validator(mode="after")
    def _check_maintenance(self) -> Self:
        check_maintenance(self.maintenance, self.names, self.failure_domains)
        return self

    @model_validator(mode="after")
    def _names_each_node_once(self) -> Self:
        for name, times in Counter(self.names).items():
            if times > 1:
                ranges = [f"'{host.name}'" for host in self.hosts if host.name != name and name in expand_names(host.name)]
                cure = "Give each a name of its own"
                if ranges:
                    cure += f". To set fields of it alone, take it out of {ranges[0]}: a range may have gaps, as 'n[1-4,6-9]'"
                raise contradiction("hosts", f"{times} hosts are called '{name}'", cure)
        return self

    @model_validator(mode="after")
    def _names_each_machine_once(self) -> Self:
        """Refuse one machine under two names: its faults would count twice, and a job could get it twice."""
        first: dict[tuple[object, ...], str] = {}
        for host in self.machines:
            jump = tuple((hop.address, hop.port) for hop in (self.jump if host.jump is None else host.jump))
            machine = (host.address or host.name, host.port or self.port, jump)
            if (other := first.setdefault(machine, host.name)) != host.name:
                reason = f"'{other}' and '{host.name}' are one machine, {machine[0]} port {machine[1]}"
                raise contradiction("hosts", reason, "Remove one, or fix its address or port")
        return self


KINDS: Final[dict[str, type[LocalCluster | SshCluster | SlurmCluster]]] = {"local": LocalCluster, "ssh": SshCluster, "slurm": SlurmCluster}
"""Every kind of cluster, by the value of its field `kind`."""


def kind_of(value: Any) -> Any:  # noqa: ANN401 (whatever a user wrote)
    """Return the kind of a cluster given as fields or as a model; `local` is the default."""
    return value.get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", "local")


_UNION: Final[Any] = Annotated[
    Annotated[LocalCluster, Tag("local")] | Annotated[SshCluster, Tag("ssh")] | Annotated[SlurmCluster, Tag("slurm")],
    Discriminator(kind_of),
]

if TYPE_CHECKING:
    Cluster: TypeAlias = LocalCluster | SshCluster | SlurmCluster
else:

    class _AnyKind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, LocalCluster | SshCluster | SlurmCluster)

    class Cluster(metaclass=_AnyKind):
        """The type of every cluster, for annotations and ``isinstance``: a `LocalCluster`, an `SshCluster` or a `SlurmCluster`.

        As the annotation of a pydantic field or a flow parameter, it selects the class by ``kind``. It cannot be created itself.

        Raises:
            TypeError: On a call: create one of the three classes.
        """

        def __new__(cls, *_: object, **fields: object) -> NoReturn:
            """Refuse the call, and name the class to create."""
            kind = KINDS.get(str(fields.get("kind", "")))
            names = f"holdfast.{kind.__name__}" if kind else " or ".join(f"holdfast.{one.__name__}" for one in KINDS.values())
            raise TypeError(f"holdfast.Cluster is the type of every cluster and cannot be created: create {names}")

        @classmethod
        def __get_pydantic_core_schema__(cls, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
            """Have pydantic validate a cluster of any kind."""
            return handler.generate_schema(_UNION)


_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter[Any](_UNION)


def cluster_of(fields: object) -> LocalCluster | SshCluster | SlurmCluster:
    """Return the cluster that *fields* describe, as a history or a program wrote them; raise pydantic's `ValidationError`."""
    found: LocalCluster | SshCluster | SlurmCluster = _ADAPTER.validate_python(fields)
    return found
