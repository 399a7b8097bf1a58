"""Everything Holdfast raises on purpose, named for what the caller can do about it.

HoldfastError
├── JobDetached              this controller was asked to detach from its job; training continues
├── OperatorError            the user can fix it: the message says what is wrong, where, and what to do
│   ├── BadFile              a job, cluster or policy file that cannot be used as it is
│   ├── BadParameters        the parameters of a flow run do not describe a job
│   ├── UnknownCluster       no cluster has this name
│   ├── JobAlreadyRunning    another controller holds the lease of this job
│   ├── VersionMismatch      the job's agents speak another version of the protocol
│   ├── NotEnoughNodes       the job needs more nodes than the cluster has free
│   ├── TooFewFileDescriptors  more nodes than this process may open connections to
│   ├── NotWritable          a directory or file that must be written cannot be
│   ├── NotReadable          a directory or file that must be read cannot be
│   ├── UnusableFolder       a folder of Holdfast that does not exist, or that other users can change
│   ├── UnusableFile         a private key or a file of keys that does not allow a login
│   │   └── SecretUnavailable  the store of a secret does not answer; a later try may succeed
│   ├── NoHostKeys           the cluster is not reached by SSH, so its nodes have no host keys
│   ├── NothingToBootstrap   the cluster is not reached by SSH, so its nodes need no bootstrap
│   ├── UnknownNode          the cluster has no node of this name
│   ├── NodeNotChanged       a request about a node that its present state does not allow
│   ├── NodesBusy            jobs train on these nodes
│   ├── TooFewHealthyNodes   a health check found fewer healthy nodes than required
│   ├── CapacityTimeout      a cluster did not have enough free nodes in time
│   ├── BurnInFailed         nodes did not pass a requested burn-in
│   ├── NoCheckpoint         a job has no complete checkpoint
│   ├── EvaluationFailed     an evaluation of a checkpoint reported no metrics
│   ├── UnknownJob           no job of this name in the history
│   ├── NoJob                no job was named, and there is none
│   ├── UnknownIncident      no incident of this number or id in the history
│   ├── UnknownRank          the job has no rank of this number
│   ├── UnknownFault         no fault kind of this name in the catalogue
│   ├── UnknownPolicy        no policy of this name, and no such file
│   ├── BadSetting           an environment variable with an invalid value
│   ├── UnknownOptionValue   a command-line option with an unknown value
│   ├── NoProfile            no rank of the job has written a step profile
│   ├── NoSlurm              a Slurm cluster, and Slurm's commands are not on this machine
│   ├── AllocationRequired   nodes that can be reached only within a job's allocation
│   ├── SlurmRefused         Slurm refused a command, and would refuse it again
│   └── HistoryError         the history cannot be used
│       ├── HistoryCorrupt   its file is not a database, or is damaged
│       │   └── RowCorrupt   one of its rows cannot be read
│       ├── HistoryLocked    another program keeps it locked
│       ├── HistoryTooNew    a newer Holdfast wrote it
│       ├── HistoryTooOld    an older Holdfast wrote it, and this one cannot migrate it
│       ├── HistoryAccessDenied  the database server refuses this user or database
│       └── HistoryUnreachable  the database server does not answer
│           └── HistoryTooManyConnections  it has no free connection
└── WorldError               something outside failed: policies decide what follows
    ├── NodeError            an error of one node
    │   ├── NodeLost         a node does not respond
    │   ├── NodeStateUnknown  the check of a node could not be made, so its state is unknown
    │   │   └── ProtocolMismatch  the proxy to a node speaks another version of the protocol
    │   ├── RanksNotCounted  a node has no GPU, or another number of them than the job's other nodes
    │   ├── AgentDisconnected  the connection to the agent ended
    │   ├── Superseded       a node has accepted commands of a newer controller of the job
    │   ├── LeaseUnconfirmed  it cannot be confirmed that this controller still holds the job's lease
    │   └── CommandRejected  an agent rejected a command
    ├── SlurmUnavailable     Slurm does not answer
    └── LeaseLost            another controller took over this job

A class declares its fields as annotations; its constructor takes them in that order, and `str()` gives the message. Every class survives
pickling, because Prefect and torch send errors between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, dataclass_transform

from holdfast.plurals import plural

MAX_QUOTED: Final = 120
"""Characters of a user's input that a message repeats."""


def cut(given: str) -> str:
    """Return *given*, cut to the length that a message repeats."""
    return given if len(given) <= MAX_QUOTED else f"{given[:MAX_QUOTED]}..."


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class HoldfastError(Exception):
    """Anything Holdfast raises on purpose."""

    def __init_subclass__(cls) -> None:
        """Make a dataclass of each subclass."""
        dataclass(eq=False, repr=False)(cls)

    def __init__(self, *fields: object) -> None:
        super().__init__(*fields)

    def __reduce__(self) -> tuple[type[HoldfastError], tuple[Any, ...]]:
        given = tuple(getattr(self, one.name) for one in fields(self) if one.init)
        return type(self), given or self.args


class JobDetached(HoldfastError):
    """This controller was asked to detach from its job; what it was doing for the job ends here."""

    job: str
    why: str

    def __str__(self) -> str:
        return f"this controller detaches from job '{self.job}': {self.why}"


class OperatorError(HoldfastError):
    """The user can fix it."""

    def __init__(self, *fields: object) -> None:
        super().__init__(*fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a file: the *field*, the *reason* and the *cure*."""

    field: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}. {self.cure}"


class BadFile(OperatorError):
    """A job, cluster or policy file that cannot be used as it is."""

    path: str
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {plural(len(self.problems), 'problem')}", *(f"  {problem}" for problem in self.problems)])


class BadParameters(OperatorError):
    """The parameters of a flow run, or the options of a command, do not describe a job."""

    problems: tuple[Problem, ...]
    what: str = "the job was not started"
    """What did not happen therefore."""

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.what}: {self.problems[0]}"
        return "\n".join([f"{self.what}: {len(self.problems)} problems", *(f"  {problem}" for problem in self.problems)])


class UnknownCluster(OperatorError):
    """No cluster has this name."""

    name: str
    why: str
    cure: str

    def __str__(self) -> str:
        return f"no cluster is called '{self.name[:80]}'{f': {self.why}' if self.why else ''}. {self.cure}"


class JobAlreadyRunning(OperatorError):
    """Another controller holds the lease of this job."""

    job: str
    holder: str

    def __str__(self) -> str:
        return (
            f"job '{self.job}' is already running, controlled by {self.holder}. "
            f"Watch it with `holdfast status {self.job}`, stop it with `holdfast stop {self.job}`, detach its controller with "
            f"`holdfast detach {self.job}`, or give this job another name."
        )


class VersionMismatch(OperatorError):
    """The job's agents speak another version of the protocol: they and their workers are left untouched."""

    job: str
    node: str
    why: str

    def __str__(self) -> str:
        return (
            f"job '{self.job}' runs under another version of Holdfast on {self.node}: {self.why}. Training continues. "
            f"Run this with the version that started the job, or stop the job with it (`holdfast stop {self.job}`) and run it again"
        )


class NotEnoughNodes(OperatorError):
    """The job needs more nodes than the cluster has free."""

    wanted: int
    free: int
    cluster: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"the job needs {plural(self.wanted, 'node')}, but cluster '{self.cluster}' has {self.free} free{detail}. "
            "Lower `nnodes` or `spare_nodes`, or add nodes to the cluster; `holdfast node ls` lists them."
        )


class TooFewFileDescriptors(OperatorError):
    """More nodes than this process may open connections to."""

    what: str
    nodes: int
    needed: int
    hard: int

    def __str__(self) -> str:
        return (
            f"{self.what} on {self.nodes} nodes needs {self.needed} open files, but the limit of this process is {self.hard}. "
            f"Raise the hard limit: `LimitNOFILE={self.needed}` in its systemd unit, a line `* hard nofile {self.needed}` in "
            f"/etc/security/limits.conf, or `ulimit -Hn {self.needed}` as root before you start it."
        )


class NotWritable(OperatorError):
    """A directory or file that must be written cannot be."""

    what: str
    path: str
    reason: str

    def __str__(self) -> str:
        cure = "Create it, free space, fix its permissions, or name another one."
        return f"{self.what} {self.path} cannot be written: {self.reason}. {cure}"


class NotReadable(OperatorError):
    """A directory or file that must be read cannot be."""

    what: str
    path: str
    reason: str
    cure: str = "Fix its permissions, mount it, or run this on a machine that can read it"

    def __str__(self) -> str:
        return f"{self.what} {self.path} cannot be read: {self.reason}. {self.cure}."


class UnusableFolder(OperatorError):
    """A folder that an environment variable names and that does not exist, or that other users can change."""

    variable: str
    path: str
    why: str
    cure: str

    def __str__(self) -> str:
        return f"{self.variable} ({self.path}) cannot be used: {self.why}. {self.cure}."


class UnusableFile(OperatorError):
    """A private key or a file of keys that does not allow a login."""

    what: str
    path: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what} {self.path} cannot be used: {self.reason}. {self.cure}."


class SecretUnavailable(UnusableFile):
    """The store of a secret does not answer; a later try may succeed."""


class NoHostKeys(OperatorError):
    """The cluster is not reached by SSH, so its nodes have no host keys."""

    cluster: str
    kind: str

    def __str__(self) -> str:
        return f"the nodes of cluster '{self.cluster}' of kind {self.kind} have no host keys: only those of `kind: ssh` do."


class NothingToBootstrap(OperatorError):
    """The cluster is not reached by SSH, so its nodes need no bootstrap."""

    cluster: str
    kind: str

    def __str__(self) -> str:
        return (
            f"the nodes of cluster '{self.cluster}' of kind {self.kind} need no setup: they run the Holdfast of this machine. "
            "Name the file of a cluster of `kind: ssh`."
        )


class UnknownNode(OperatorError):
    """The cluster has no node of this name."""

    node: str
    cluster: str
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        near = f" It has nodes such as {', '.join(self.near)}." if self.near else ""
        return f"cluster '{self.cluster}' has no node '{cut(self.node)}'.{near} Name one of its nodes, or another cluster's file."


class NodeNotChanged(OperatorError):
    """A request about a node that its present state does not allow."""

    node: str
    cluster: str
    why: str

    def __str__(self) -> str:
        were = "were" if "," in self.node else "was"
        return f"{self.node} of cluster '{self.cluster}' {were} not changed: {self.why}."


class NodesBusy(OperatorError):
    """Jobs train on these nodes."""

    what: str
    jobs: tuple[str, ...]
    cure: str

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(self.jobs)}. {self.cure}."


class TooFewHealthyNodes(OperatorError):
    """A health check found fewer healthy nodes than required."""

    cluster: str
    wanted: int
    healthy: int
    detail: str

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        required = f"{self.wanted} {'is' if self.wanted == 1 else 'are'} required"
        return f"cluster '{self.cluster}' has {plural(self.healthy, 'healthy node')}, and {required}{detail}"


class CapacityTimeout(OperatorError):
    """A cluster did not have enough free nodes in time."""

    cluster: str
    wanted: int
    free: int
    waited: str
    detail: str

    def __str__(self) -> str:
        free = plural(self.free, "free node")
        return f"after {self.waited} cluster '{self.cluster}' has {free} of the {self.wanted} required ({self.detail})"


class BurnInFailed(OperatorError):
    """Nodes did not pass a requested burn-in."""

    cluster: str
    failures: tuple[str, ...]

    def __str__(self) -> str:
        failed = plural(len(self.failures), "node")
        return f"{failed} of cluster '{self.cluster}' did not pass the burn-in: {'; '.join(self.failures)}"


class NoCheckpoint(OperatorError):
    """A job has no complete checkpoint."""

    job: str
    directory: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"job '{self.job}' has no complete checkpoint in {self.directory}{detail}"


class EvaluationFailed(OperatorError):
    """An evaluation of a checkpoint reported no metrics."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class UnknownJob(OperatorError):
    """No job of this name in the history."""

    job: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = f" Known jobs: {', '.join(self.known)}." if self.known else ""
        is_file = self.job.endswith((".yaml", ".yml", ".py"))
        file = " A job has the `name` in its file, or that of its script without `.py`." if is_file else ""
        return f"no job '{cut(self.job)}' in the history.{file}{known} `holdfast ps -a` lists all."


class NoJob(OperatorError):
    """No job was named, and there is none."""

    why: str

    def __str__(self) -> str:
        return f"{self.why}. `holdfast run JOB_FILE` starts a job, `holdfast demo` shows one."


class UnknownIncident(OperatorError):
    """No incident of this number or id in the history."""

    incident: str
    job: str = ""
    """The job that was named."""
    run: str = ""
    """The id of the run that this name or id stands for."""

    def __str__(self) -> str:
        if self.job:
            other = "`holdfast ps -a` lists all runs with their ids, which `--job` accepts"
            return f"no incident '{cut(self.incident)}' in run {self.run} of job '{cut(self.job)}'. {other}."
        return f"no incident '{cut(self.incident)}' in the history. `holdfast incidents JOB` lists those of a job."


class UnknownRank(OperatorError):
    """The job has no rank of this number."""

    ranks: str
    job: str
    known: str

    def __str__(self) -> str:
        return f"job '{cut(self.job)}' has no rank {cut(self.ranks)}. Its ranks are {self.known}."


class UnknownFault(OperatorError):
    """No fault kind of this name in the catalogue."""

    name: str
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        guess = f" Did you mean {' or '.join(self.near)}?" if self.near else ""
        return f"The catalogue has no fault kind {cut(self.name)}.{guess} `holdfast faults ls` lists them."


class UnknownPolicy(OperatorError):
    """No policy of this name, and no such file."""

    name: str
    near: tuple[str, ...]
    known: tuple[str, ...]

    def __str__(self) -> str:
        near = f" Did you mean {self.near[0]!r}?" if self.near else ""
        known = ", ".join(self.known)
        return f"no policy or file is called {cut(self.name)!r}.{near} Name {known}, or the path of a policy file (.yaml)."


class BadSetting(OperatorError):
    """An environment variable with an invalid value."""

    name: str
    given: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} is '{self.given}'; it must be {' or '.join(self.known)}"


class UnknownOptionValue(OperatorError):
    """A command-line option with an unknown value."""

    option: str
    given: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"--{self.option} does not accept {cut(self.given)!r}. Give one of: {', '.join(self.known)}."


class NoProfile(OperatorError):
    """No rank of the job has written a step profile."""

    job: str
    why: str

    def __str__(self) -> str:
        return (
            f"there is no profile of job '{self.job}' yet: {self.why}. The ranks write it after their first steps, if the script uses "
            "`holdfast.session` and `checkpoint.memory.interval` is not 0. Wait a few seconds, or fix one of these; "
            "this machine must see the checkpoint folder."
        )


class NoSlurm(OperatorError):
    """A Slurm cluster, and Slurm's commands are not on this machine."""

    command: str

    def __str__(self) -> str:
        return (
            f"there is no `{self.command}` on this machine. Run this where Slurm's commands are (a login node, or a node of an "
            "allocation), or put them on PATH."
        )


class AllocationRequired(OperatorError):
    """Nodes that can be reached only within a job's allocation."""

    what: str
    cluster: str

    def __str__(self) -> str:
        return (
            f"{self.what} is not available for cluster '{self.cluster}' of kind slurm: its nodes are reachable only within a job. "
            "`holdfast node ls --cluster CLUSTER_FILE` shows what Slurm reports; describe the same machines with `kind: ssh` for the rest."
        )


class SlurmRefused(OperatorError):
    """Slurm refused a command, and would refuse it again."""

    command: str
    why: str

    def __str__(self) -> str:
        return f"Slurm refused `{self.command}`: {self.why}. Fix the cluster file, or ask the administrator of Slurm."


class HistoryError(OperatorError):
    """The history cannot be used."""

    url: str
    reason: str

    def __str__(self) -> str:
        return f"history {self.url}: {self.reason}."


class HistoryCorrupt(HistoryError):
    """Its file is not a database, or is damaged."""

    def __str__(self) -> str:
        cure = "Move the file away to start a new history, or restore a backup."
        return f"history {self.url} is damaged: {self.reason}. Nothing was changed. {cure}"


class RowCorrupt(HistoryCorrupt):
    """One of its rows cannot be read: a bit flipped, somebody edited it, or another version wrote it."""

    reason: str = field(init=False)
    table: str
    row: str
    flaw: str

    def __post_init__(self) -> None:
        self.reason = f"row {self.row} of table '{self.table}' cannot be read: {self.flaw}"

    def __str__(self) -> str:
        cure = "Fix or delete that row, or restore a backup; `holdfast admin support-bundle` packs what can be read"
        return f"history {self.url}: {self.reason}. Nothing was changed. {cure}."


class HistoryLocked(HistoryError):
    """Another program keeps it locked."""

    def __str__(self) -> str:
        cure = "End that program, or name another history in HOLDFAST_HISTORY."
        return f"history {self.url} is locked by another program: {self.reason}. {cure}"


class HistoryTooNew(HistoryError):
    """A newer Holdfast wrote it."""

    def __str__(self) -> str:
        cure = "Upgrade this one, or name another history in HOLDFAST_HISTORY."
        return f"history {self.url} was written by a newer Holdfast: {self.reason}. {cure}"


class HistoryTooOld(HistoryError):
    """An older Holdfast wrote it, and this one cannot migrate it."""

    def __str__(self) -> str:
        cure = "Move it away, or name another history in HOLDFAST_HISTORY; the Holdfast that wrote it can still read it."
        return f"history {self.url} was written by an older Holdfast: {self.reason}. Nothing was changed. {cure}"


class HistoryAccessDenied(HistoryError):
    """The database server refuses this user or database."""

    cure: str

    def __str__(self) -> str:
        return f"history {self.url}: the database server refuses access: {self.reason}. {self.cure}."


class HistoryUnreachable(HistoryError):
    """The database server does not answer."""

    @property
    def cure(self) -> str:
        """Return what the operator can do about it."""
        is_server = self.url.startswith("postgres")
        return "Start the database, or fix HOLDFAST_HISTORY" if is_server else "Fix HOLDFAST_HISTORY or HOLDFAST_HOME"

    def __str__(self) -> str:
        return f"history {self.url} cannot be reached: {self.reason}. {self.cure}."


class HistoryTooManyConnections(HistoryUnreachable):
    """The database server has no free connection."""

    @property
    def cure(self) -> str:
        """Return what the operator can do about it."""
        usage = "each `holdfast run` holds about six connections, a standby controller three"
        return f"Raise max_connections in postgresql.conf, or the limit of that role: {usage}"


class WorldError(HoldfastError):
    """Something outside failed: policies decide what follows."""


class NodeError(WorldError):
    """An error of one node."""

    node: str
    why: str

    @property
    def reason(self) -> str:
        """Return the error, for a message that names the node already."""
        return self.why


class NodeLost(NodeError):
    """A node does not respond."""

    def __str__(self) -> str:
        return f"node {self.node} is lost: {self.reason}"


class NodeStateUnknown(NodeError):
    """The check of a node could not be made, so its state is unknown; the message says what to fix."""

    def __str__(self) -> str:
        return f"node {self.node} cannot be used: {self.reason}"


class ProtocolMismatch(NodeStateUnknown):
    """The proxy to a node speaks another version of the protocol; *why* names both."""

    @property
    def reason(self) -> str:
        """Return both versions and what to do."""
        return f"{self.why}: `holdfast node bootstrap --cluster CLUSTER_FILE` installs this version there"


class RanksNotCounted(NodeError):
    """A node has no GPU, or another number of GPUs or CPUs than the job's other nodes, and the job counts its ranks by them."""

    detail: str
    """The nodes that differ, each with its number."""

    def __str__(self) -> str:
        return f"node {self.node} cannot be used: {self.reason}, and `nproc_per_node` counts the ranks by them"


class AgentDisconnected(NodeError):
    """The connection to the agent ended."""

    def __str__(self) -> str:
        return f"the agent of node {self.node} is disconnected: {self.why}"

    @property
    def reason(self) -> str:
        """Return the error, for a message that names the node already."""
        return f"its agent is disconnected: {self.why}"


class Superseded(NodeError):
    """A node has accepted commands of a newer controller of the job, and rejects those of this one."""

    epoch: int

    def __str__(self) -> str:
        return f"node {self.node} rejected an outdated command: {self.reason}"


class LeaseUnconfirmed(NodeError):
    """It cannot be confirmed that this controller still holds the job's lease, so it changes nothing on the node."""

    def __str__(self) -> str:
        return f"nothing is stopped or started on node {self.node}: {self.reason}"


class CommandRejected(NodeError):
    """An agent rejected a command."""

    command: str

    def __str__(self) -> str:
        return f"node {self.node} {self.reason}"

    @property
    def reason(self) -> str:
        """Return the command and why it was rejected."""
        return f"rejected '{self.command}': {self.why}"


class SlurmUnavailable(WorldError):
    """Slurm does not answer."""

    command: str
    why: str

    def __str__(self) -> str:
        return f"Slurm does not answer `{self.command}`: {self.why}"


class LeaseLost(WorldError):
    """Another controller took over this job."""

    job: str
    holder: str

    def __str__(self) -> str:
        return f"the lease of job '{self.job}' went to {self.holder}; this controller stops and leaves the workers untouched"
