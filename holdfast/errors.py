"""Everything Holdfast raises on purpose, named for what the caller can do about it.

HoldfastError
├── JobDetached              this flow was told to let go of its job, which trains on
├── OperatorError            a person can mend it: says what is wrong, where, and the cure
│   ├── BadFile              a job, cluster or policy file that cannot be used as it is
│   ├── BadParameters        what was filled in for a flow run makes no job
│   ├── UnknownCluster       no cluster is known by that name
│   ├── JobAlreadyRunning    another flow holds the lease of this job
│   ├── VersionMismatch      the job's agents speak another version of the protocol
│   ├── NotEnoughNodes       more nodes wanted than the cluster can give
│   ├── TooFewFileDescriptors  more nodes than this process may have connections
│   ├── NotWritable          a directory that must be written cannot be
│   ├── NotReadable          a directory or a file that must be read cannot be
│   ├── UnusableFolder       a folder of Holdfast's own that is none, or that somebody else could change
│   ├── UnusableFile         a key, or a file of keys, with which nobody can log in
│   │   └── SecretUnavailable  who keeps a secret does not answer now
│   ├── NoKeysThere          nodes that nobody logs in to
│   ├── NoLoginThere         nodes on which nothing has to be set up, as nobody logs in to them
│   ├── UnknownNode          no node of that name in the cluster
│   ├── NodeNotChanged       a word about a node that cannot be carried out as the node is
│   ├── NodesBusy            nodes on which a job trains, so that nothing else can be done there now
│   ├── TooFewHealthyNodes   a look at a cluster found fewer healthy nodes than were asked for
│   ├── CapacityTimeout      a cluster did not have enough free nodes in time
│   ├── BurnInFailed         nodes that did not pass the burn-in that was asked of them
│   ├── NoCheckpoint         a job without a whole checkpoint
│   ├── EvaluationFailed     an evaluation of a checkpoint that gave no metrics
│   ├── UnknownJob           no job of that name in the history
│   ├── NoJob                no job was named, and there is none
│   ├── UnknownIncident      no incident of that number or id in the history
│   ├── UnknownFault         no kind of that name in the fault catalogue
│   ├── UnknownPolicy        no policy of that name, and no such file
│   ├── BadSetting           an environment variable that says what it cannot
│   ├── UnknownOptionValue   an option was given a word that it does not know
│   ├── NoProfile            no rank of the job has told how its steps pass
│   ├── NoSlurm              a cluster of Slurm, and no commands of Slurm's here
│   ├── AllocationRequired   nodes that are reached only while a job has been given them
│   ├── SlurmRefused         Slurm said no to what was asked of it, and would again
│   └── HistoryError         the history cannot be used
│       ├── HistoryCorrupt   its file is not a database, or is damaged
│       │   └── RowCorrupt   one row of it cannot be read
│       ├── HistoryLocked    another program holds it and does not let go
│       ├── HistoryTooNew    a newer Holdfast wrote it
│       ├── HistoryTooOld    a Holdfast wrote it whose tables this one cannot take over
│       ├── HistoryAccessDenied  the database server answers, and does not let this user into this database
│       └── HistoryUnreachable  the database server does not answer
│           └── HistoryTooManyConnections  it answers, and has no connection left
└── WorldError               something outside failed: policies decide what follows
    ├── NodeError            something is the matter with one node
    │   ├── NodeLost         a node gives no sign of life
    │   ├── NodeStateUnknown  nobody could look whether a node lives
    │   │   └── ProtocolMismatch  what leads to a node speaks another version of the protocol
    │   ├── AgentDisconnected  the agent's connection ended
    │   ├── Superseded       a node has had orders of a newer flow of the job
    │   ├── LeaseUnconfirmed  nobody could say whether this flow still holds the job's lease
    │   └── CommandRejected  an agent understood an order and said no
    ├── SlurmUnavailable     Slurm does not answer now
    └── LeaseLost            another flow took over this job

Every class passes its fields to ``Exception.__init__``, so each survives pickling (Prefect and torch need it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_REPEATED: Final = 120
"""Letters of what a person has typed that a message repeats."""


def cut(given: str) -> str:
    """Return what a person has typed, or as much of it as a message repeats."""
    return given if len(given) <= MOST_REPEATED else f"{given[:MOST_REPEATED]}..."


class HoldfastError(Exception):
    """Anything Holdfast raises on purpose."""


class JobDetached(HoldfastError):
    """This flow was told to let go of its job, which trains on: what it was doing for the job ends here."""

    def __init__(self, job: str, why: str) -> None:
        super().__init__(job, why)
        self.job, self.why = job, why

    def __str__(self) -> str:
        return f"this flow lets go of job '{self.job}': {self.why}"


class OperatorError(HoldfastError):
    """A person can mend it."""


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

    def __init__(self, path: str, problems: tuple[Problem, ...]) -> None:
        super().__init__(path, problems)
        self.path, self.problems = path, problems

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {len(self.problems)} problem(s)", *(f"  {p}" for p in self.problems)])


class BadParameters(OperatorError):
    """What was filled in for a flow run makes no job."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return f"the job was not started, {len(self.problems)} problem(s): " + "; ".join(str(problem) for problem in self.problems)


class UnknownCluster(OperatorError):
    """No cluster is known by that name."""

    def __init__(self, name: str, why: str, cure: str) -> None:
        super().__init__(name, why, cure)
        self.name, self.why, self.cure = name, why, cure

    def __str__(self) -> str:
        return f"no cluster is called '{self.name[:80]}'{f': {self.why}' if self.why else ''}. {self.cure}"


class JobAlreadyRunning(OperatorError):
    """Another flow holds the lease of this job."""

    def __init__(self, job: str, holder: str) -> None:
        super().__init__(job, holder)
        self.job, self.holder = job, holder

    def __str__(self) -> str:
        return (
            f"job '{self.job}' is already running, held by {self.holder}. "
            f"Watch it with `holdfast status {self.job}`, stop it with `holdfast stop {self.job}`, have its flow let go of it with "
            f"`holdfast detach {self.job}`, or give this one another name."
        )


class VersionMismatch(OperatorError):
    """The job's agents speak another version of the protocol: they are left alone, with all that they run."""

    def __init__(self, job: str, node: str, why: str) -> None:
        super().__init__(job, node, why)
        self.job, self.node, self.why = job, node, why

    def __str__(self) -> str:
        return (
            f"job '{self.job}' runs under another version of Holdfast on {self.node}: {self.why}. It trains on. "
            f"Run this with the version that started it, or end it with that one (`holdfast stop {self.job}`) and run it again"
        )


class NotEnoughNodes(OperatorError):
    """More nodes wanted than the cluster can give."""

    def __init__(self, wanted: int, free: int, cluster: str, detail: str = "") -> None:
        super().__init__(wanted, free, cluster, detail)
        self.wanted, self.free, self.cluster, self.detail = wanted, free, cluster, detail

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"the job wants {self.wanted} node(s) but cluster '{self.cluster}' has {self.free} free{detail}. "
            "Lower `nodes.wanted` or `nodes.spare`, or give the cluster more nodes; `holdfast nodes` lists them."
        )


class TooFewFileDescriptors(OperatorError):
    """More nodes than this process may have connections."""

    def __init__(self, what: str, nodes: int, needed: int, hard: int) -> None:
        super().__init__(what, nodes, needed, hard)
        self.what, self.nodes, self.needed, self.hard = what, nodes, needed, hard

    def __str__(self) -> str:
        return (
            f"{self.what} on {self.nodes} nodes needs {self.needed} open files, and this process may have {self.hard}. "
            f"Raise the hard limit: `LimitNOFILE={self.needed}` in its systemd unit, a line `* hard nofile {self.needed}` in "
            f"/etc/security/limits.conf, or `ulimit -Hn {self.needed}` as root before it is started."
        )


class NotWritable(OperatorError):
    """A directory that must be written cannot be."""

    def __init__(self, what: str, path: str, reason: str) -> None:
        super().__init__(what, path, reason)
        self.what, self.path, self.reason = what, path, reason

    def __str__(self) -> str:
        cure = "Create it, free space, or mend its permissions, or name another one."
        return f"{self.what} {self.path} cannot be written: {self.reason}. {cure}"


class NotReadable(OperatorError):
    """A directory or a file that must be read cannot be."""

    def __init__(
        self, what: str, path: str, reason: str, cure: str = "Mend its permissions, mount it, or ask on a machine that sees it"
    ) -> None:
        super().__init__(what, path, reason, cure)
        self.what, self.path, self.reason, self.cure = what, path, reason, cure

    def __str__(self) -> str:
        return f"{self.what} {self.path} cannot be read: {self.reason}. {self.cure}."


class UnusableFolder(OperatorError):
    """A folder of Holdfast's own, named by a variable, that is none, or that somebody else could change."""

    def __init__(self, variable: str, path: str, why: str, cure: str) -> None:
        super().__init__(variable, path, why, cure)
        self.variable, self.path, self.why, self.cure = variable, path, why, cure

    def __str__(self) -> str:
        return f"{self.variable} ({self.path}) cannot be used: {self.why}. {self.cure}."


class UnusableFile(OperatorError):
    """A key, or a file of keys, with which nobody can log in."""

    def __init__(self, what: str, path: str, reason: str, cure: str) -> None:
        super().__init__(what, path, reason, cure)
        self.what, self.path, self.reason, self.cure = what, path, reason, cure

    def __str__(self) -> str:
        return f"{self.what} {self.path} cannot be used: {self.reason}. {self.cure}."


class SecretUnavailable(UnusableFile):
    """Who keeps a secret does not answer now: later it may be had."""


class NoKeysThere(OperatorError):
    """Nodes that nobody logs in to."""

    def __init__(self, cluster: str, kind: str) -> None:
        super().__init__(cluster, kind)
        self.cluster, self.kind = cluster, kind

    def __str__(self) -> str:
        return f"the nodes of cluster '{self.cluster}' of kind {self.kind} show no keys: only those of `kind: ssh` do."


class NoLoginThere(OperatorError):
    """Nodes on which nothing has to be set up, as nobody logs in to them."""

    def __init__(self, cluster: str, kind: str) -> None:
        super().__init__(cluster, kind)
        self.cluster, self.kind = cluster, kind

    def __str__(self) -> str:
        return (
            f"nothing has to be set up on the nodes of cluster '{self.cluster}' of kind {self.kind}: they run what runs here. "
            "Name the file of a cluster of `kind: ssh`."
        )


class UnknownNode(OperatorError):
    """No node of that name in the cluster."""

    def __init__(self, node: str, cluster: str, near: tuple[str, ...] = ()) -> None:
        super().__init__(node, cluster, near)
        self.node, self.cluster, self.near = node, cluster, near

    def __str__(self) -> str:
        near = f" It has {', '.join(self.near)}." if self.near else ""
        return f"cluster '{self.cluster}' has no node '{cut(self.node)}'.{near} Name one of its nodes, or another cluster's file."


class NodeNotChanged(OperatorError):
    """A word about a node that cannot be carried out as the node is."""

    def __init__(self, node: str, cluster: str, why: str) -> None:
        super().__init__(node, cluster, why)
        self.node, self.cluster, self.why = node, cluster, why

    def __str__(self) -> str:
        return f"node {self.node} of cluster '{self.cluster}' stays as it is: {self.why}."


class NodesBusy(OperatorError):
    """Nodes on which a job trains, so that nothing else can be done there now."""

    def __init__(self, what: str, jobs: tuple[str, ...], cure: str) -> None:
        super().__init__(what, jobs, cure)
        self.what, self.jobs, self.cure = what, jobs, cure

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(self.jobs)}. {self.cure}."


class TooFewHealthyNodes(OperatorError):
    """A look at a cluster found fewer healthy nodes than were asked for."""

    def __init__(self, cluster: str, wanted: int, healthy: int, detail: str) -> None:
        super().__init__(cluster, wanted, healthy, detail)
        self.cluster, self.wanted, self.healthy, self.detail = cluster, wanted, healthy, detail

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"cluster '{self.cluster}' has {self.healthy} healthy node(s), and {self.wanted} are required{detail}"


class CapacityTimeout(OperatorError):
    """A cluster did not have enough free nodes in time."""

    def __init__(self, cluster: str, wanted: int, free: int, waited: str, detail: str) -> None:
        super().__init__(cluster, wanted, free, waited, detail)
        self.cluster, self.wanted, self.free, self.waited, self.detail = cluster, wanted, free, waited, detail

    def __str__(self) -> str:
        return f"after {self.waited} cluster '{self.cluster}' has {self.free} free node(s) of the {self.wanted} required ({self.detail})"


class BurnInFailed(OperatorError):
    """Nodes that did not pass the burn-in that was asked of them."""

    def __init__(self, cluster: str, failures: tuple[str, ...]) -> None:
        super().__init__(cluster, failures)
        self.cluster, self.failures = cluster, failures

    def __str__(self) -> str:
        return f"{len(self.failures)} node(s) of cluster '{self.cluster}' did not pass the burn-in: {'; '.join(self.failures)}"


class NoCheckpoint(OperatorError):
    """A job without a whole checkpoint."""

    def __init__(self, job: str, directory: str, detail: str = "") -> None:
        super().__init__(job, directory, detail)
        self.job, self.directory, self.detail = job, directory, detail

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"job '{self.job}' has no whole checkpoint in {self.directory}{detail}"


class EvaluationFailed(OperatorError):
    """An evaluation of a checkpoint that gave no metrics."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class UnknownJob(OperatorError):
    """No job of that name in the history."""

    def __init__(self, job: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(job, known)
        self.job, self.known = job, known

    def __str__(self) -> str:
        known = f" Known jobs: {', '.join(self.known)}." if self.known else ""
        return f"no job '{cut(self.job)}' in the history.{known} `holdfast history` lists all."


class NoJob(OperatorError):
    """No job was named, and there is none."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}. `holdfast run JOB_FILE` starts a job, `holdfast demo` shows one."


class UnknownIncident(OperatorError):
    """No incident of that number or id in the history."""

    def __init__(self, incident: str) -> None:
        super().__init__(incident)
        self.incident = incident

    def __str__(self) -> str:
        return f"no incident '{cut(self.incident)}' in the history. `holdfast history JOB` lists the incidents of a job."


class UnknownFault(OperatorError):
    """No kind of that name in the fault catalogue."""

    def __init__(self, name: str, near: tuple[str, ...] = ()) -> None:
        super().__init__(name, near)
        self.name, self.near = name, near

    def __str__(self) -> str:
        guess = f" Did you mean {' or '.join(self.near)}?" if self.near else ""
        return f"The catalogue has no fault kind {cut(self.name)}.{guess} `holdfast faults` lists them."


class UnknownPolicy(OperatorError):
    """No policy of that name, and no such file."""

    def __init__(self, name: str, near: tuple[str, ...], known: tuple[str, ...]) -> None:
        super().__init__(name, near, known)
        self.name, self.near, self.known = name, near, known

    def __str__(self) -> str:
        near = f" Did you mean {self.near[0]!r}?" if self.near else ""
        known = ", ".join(self.known)
        return f"no policy is called {cut(self.name)!r}, and no file.{near} Name {known}, or the path of a policy file (.yaml)."


class BadSetting(OperatorError):
    """An environment variable says what it cannot."""

    def __init__(self, name: str, given: str, known: tuple[str, ...]) -> None:
        super().__init__(name, given, known)
        self.name, self.given, self.known = name, given, known

    def __str__(self) -> str:
        return f"{self.name} is '{self.given}'; it must be {' or '.join(self.known)}"


class UnknownOptionValue(OperatorError):
    """An option was given a word that it does not know."""

    def __init__(self, option: str, given: str, known: tuple[str, ...]) -> None:
        super().__init__(option, given, known)
        self.option, self.given, self.known = option, given, known

    def __str__(self) -> str:
        return f"--{self.option} knows no {cut(self.given)!r}. Give one of: {', '.join(self.known)}."


class NoProfile(OperatorError):
    """No rank of the job has told how its steps pass."""

    def __init__(self, job: str, why: str) -> None:
        super().__init__(job, why)
        self.job, self.why = job, why

    def __str__(self) -> str:
        return (
            f"there is no profile of job '{self.job}' yet: {self.why}. The ranks write it after their first steps, if the script uses "
            "`holdfast.session` and `checkpoint.memory.every` is not 0. Wait a few seconds, let the job run longer, or mend one of these; "
            "the checkpoint folder must be one that this machine sees too."
        )


class NoSlurm(OperatorError):
    """A cluster of Slurm, and no commands of Slurm's here."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command

    def __str__(self) -> str:
        return (
            f"there is no `{self.command}` on this machine. Run this where Slurm's commands are (a login node, or a node of an "
            "allocation), or put them on PATH."
        )


class AllocationRequired(OperatorError):
    """Nodes that are reached only while a job has been given them."""

    def __init__(self, what: str, cluster: str) -> None:
        super().__init__(what, cluster)
        self.what, self.cluster = what, cluster

    def __str__(self) -> str:
        return (
            f"{self.what} is not to be had for cluster '{self.cluster}' of kind slurm: its nodes are reached only by jobs that were given "
            "them. `holdfast nodes CLUSTER_FILE` shows what Slurm says of them; describe the same machines by `kind: ssh` for the rest."
        )


class SlurmRefused(OperatorError):
    """Slurm said no to what was asked of it, and would again."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(command, why)
        self.command, self.why = command, why

    def __str__(self) -> str:
        return f"Slurm refused `{self.command}`: {self.why}. Mend the cluster file, or ask who runs Slurm."


class HistoryError(OperatorError):
    """The history cannot be used."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"history {self.url}: {self.reason}."


class HistoryCorrupt(HistoryError):
    """Its file is not a database, or is damaged."""

    def __str__(self) -> str:
        cure = "Move the file away to start a new history, or restore a backup."
        return f"history {self.url} is damaged: {self.reason}. Nothing was changed. {cure}"


class RowCorrupt(HistoryCorrupt):
    """One row of it cannot be read: a byte has flipped, somebody edited it, or another version wrote it."""

    def __init__(self, url: str, table: str, row: str, flaw: str) -> None:
        super().__init__(url, f"row {row} of table '{table}' cannot be read: {flaw}")
        self.args = url, table, row, flaw
        self.table, self.row, self.flaw = table, row, flaw

    def __str__(self) -> str:
        cure = "Mend or delete that row, or restore a backup; `holdfast support-bundle` packs what can be read"
        return f"history {self.url}: {self.reason}. Nothing was changed. {cure}."


class HistoryLocked(HistoryError):
    """Another program holds it and does not let go."""

    def __str__(self) -> str:
        cure = "End that program, or name another history by HOLDFAST_HISTORY."
        return f"history {self.url} is locked by another program: {self.reason}. {cure}"


class HistoryTooNew(HistoryError):
    """A newer Holdfast wrote it."""

    def __str__(self) -> str:
        cure = "Upgrade this one, or name another history by HOLDFAST_HISTORY."
        return f"history {self.url} was written by a newer Holdfast: {self.reason}. {cure}"


class HistoryTooOld(HistoryError):
    """A Holdfast wrote it whose tables this one cannot take over."""

    def __str__(self) -> str:
        cure = "Move it away, or name another history by HOLDFAST_HISTORY; the Holdfast that wrote it can still read it."
        return f"history {self.url} was written by an older Holdfast: {self.reason}. Nothing was changed. {cure}"


class HistoryAccessDenied(HistoryError):
    """The database server answers, and does not let this user into this database."""

    def __init__(self, url: str, reason: str, cure: str) -> None:
        super().__init__(url, reason)
        self.args = url, reason, cure
        self.cure = cure

    def __str__(self) -> str:
        return f"history {self.url}: the database server answers, and refuses: {self.reason}. {self.cure}."


class HistoryUnreachable(HistoryError):
    """The database server does not answer."""

    @property
    def cure(self) -> str:
        """Return what the operator can do about it."""
        is_server = self.url.startswith("postgres")
        return "Start the database, or mend HOLDFAST_HISTORY" if is_server else "Mend HOLDFAST_HISTORY or HOLDFAST_HOME"

    def __str__(self) -> str:
        return f"history {self.url} cannot be reached: {self.reason}. {self.cure}."


class HistoryTooManyConnections(HistoryUnreachable):
    """The database server has no connection left."""

    @property
    def cure(self) -> str:
        """Return what the operator can do about it."""
        room = "each `holdfast run` holds about six connections, one that stands by three"
        return f"Raise max_connections in postgresql.conf, or the limit of that role: {room}"


class WorldError(HoldfastError):
    """Something outside failed: policies decide what follows."""


class NodeError(WorldError):
    """Something is the matter with one node."""

    node: str
    why: str

    @property
    def reason(self) -> str:
        """Return what is the matter, for where the node's name stands already."""
        return self.why


class NodeLost(NodeError):
    """A node gives no sign of life."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"node {self.node} is lost: {self.reason}"


class NodeStateUnknown(NodeError):
    """Nobody could look whether a node lives: it speaks against whoever looks, and the words name the cure."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"node {self.node} cannot be used: {self.reason}"


class ProtocolMismatch(NodeStateUnknown):
    """What leads to a node speaks another version of the protocol; *why* has both."""

    @property
    def reason(self) -> str:
        """Return both versions, and the cure."""
        return f"{self.why}: `holdfast nodes bootstrap CLUSTER_FILE` puts this version there"


class AgentDisconnected(NodeError):
    """The agent's connection ended."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"the agent of node {self.node} is gone: {self.why}"

    @property
    def reason(self) -> str:
        """Return it as a word on the node."""
        return f"its agent is gone: {self.why}"


class Superseded(NodeError):
    """A node has had orders of a newer flow of the job, and carries out none of this one past its agent."""

    def __init__(self, node: str, epoch: int, why: str) -> None:
        super().__init__(node, epoch, why)
        self.node, self.epoch, self.why = node, epoch, why

    def __str__(self) -> str:
        return f"node {self.node} refused a late order: {self.reason}"


class LeaseUnconfirmed(NodeError):
    """Nobody could say whether this flow still holds the job's lease, so nothing is done past agents."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"nothing is ended or started on node {self.node}: {self.reason}"


class CommandRejected(NodeError):
    """An agent understood an order and said no."""

    def __init__(self, node: str, order: str, why: str) -> None:
        super().__init__(node, order, why)
        self.node, self.order, self.why = node, order, why

    def __str__(self) -> str:
        return f"node {self.node} {self.reason}"

    @property
    def reason(self) -> str:
        """Return what it said no to, and why."""
        return f"refused '{self.order}': {self.why}"


class SlurmUnavailable(WorldError):
    """Slurm does not answer now."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(command, why)
        self.command, self.why = command, why

    def __str__(self) -> str:
        return f"Slurm does not answer `{self.command}`: {self.why}"


class LeaseLost(WorldError):
    """Another flow took over this job."""

    def __init__(self, job: str, holder: str) -> None:
        super().__init__(job, holder)
        self.job, self.holder = job, holder

    def __str__(self) -> str:
        return f"the lease of job '{self.job}' went to {self.holder}; this flow stops control_job and leaves the workers alone"
