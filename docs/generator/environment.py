"""The page of environment variables, and what each means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from docs.generator.markdown import page, table

VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_HOME": "Folder of jobs, local clusters and the history. Only its owner may have access. Default: `~/.holdfast`.",
    "HOLDFAST_CLUSTER": "Cluster file of the commands that have the option `--cluster`, where neither that nor a job names a cluster.",
    "HOLDFAST_HISTORY": "URL of the history: `sqlite:///...` or `postgresql://...`. Default: `history.db` in `HOLDFAST_HOME`.",
    "HOLDFAST_LOG": "Log format of the command line, flows and agents: `text` (the default), or `json` for one JSON object per line.",
    "HOLDFAST_SIGTERM": "What SIGTERM to a flow does: `stop` stops the job; `detach` ends only the flow. Default: `stop`.",
    "HOLDFAST_CONTROLLER_HEARTBEAT": "Seconds between two heartbeats of a controller; an alert is sent when they stop. Default: `20`.",
    "HOLDFAST_MEMSTORE_ROOT": "Folder on a memory file system below which nodes keep in-memory snapshots. Default: `/dev/shm`.",
    "HOLDFAST_KERNEL_LOG": "The kernel log that an agent follows: a device, or the file of a syslog daemon. Default: `/dev/kmsg`.",
    "HOLDFAST_NODE_ROOT": "Folder in which an agent finds `/proc` and `/sys`, if the host's are mounted elsewhere. Default: `/`.",
    "HOLDFAST_ADDED": "Set by `holdfast run` for the flow: names of the variables that it added. Scripts do not get these.",
    "HOLDFAST_LAUNCHER": "Set by `holdfast run` for a flow: pid of the launcher, which starts the ranks while Prefect starts.",
    "HOLDFAST_PREFECT_STANDS_IN": (
        "Set by `holdfast run` for a flow with a temporary Prefect server: URL of the configured server, which does not answer."
    ),
    "HOLDFAST_PREFECT_STANDS_IN_AUTH": "Set with it: user and password for the configured server.",
}
"""What a person may set, and what it means."""

WORKER_VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_SOCKET": "Unix socket of the agent. Without it, `import holdfast` runs without an agent.",
    "HOLDFAST_JOB": "Name of the job.",
    "HOLDFAST_NODE": "Name of the node.",
    "HOLDFAST_AGENT": "Id of the agent that started the process; identifies processes of an agent that was killed.",
    "HOLDFAST_NODE_MARK": "Folder of the node; identifies every process that must end when the node is fenced.",
    "HOLDFAST_GENERATION": "Generation in which the worker was started. Each recovery starts a new generation.",
    "HOLDFAST_STARTED": "Start time of the worker, in seconds since 1970.",
    "HOLDFAST_CHECKPOINT_DIR": "Folder of the checkpoints.",
    "HOLDFAST_SAVE_EVERY": "Checkpoint interval in steps; 0 writes none.",
    "HOLDFAST_WIDTH": "Number of ranks at the job's full size. With fewer ranks, each computes a larger share of a step's batch.",
    "HOLDFAST_SKIP_STEPS": "Steps whose batches are skipped.",
    "HOLDFAST_INVALIDATED": (
        "`STEP:GENERATION`, separated by commas: states with this many steps or more from earlier generations are invalid."
    ),
    "HOLDFAST_KEEP": "Number of checkpoints to keep.",
    "HOLDFAST_GROUPS": "`managed`, `stock` or `auto`: which process groups `init_process_group` and `holdfast.join` create.",
    "HOLDFAST_MEMSTORE": "Folder of in-memory snapshots; missing if none are taken.",
    "HOLDFAST_CHECKPOINT_WRITER": "1 if the agent writes checkpoints from the in-memory snapshots while training continues.",
    "HOLDFAST_SAVE_BANDWIDTH": "Bytes per second that this node may use to write checkpoints while training continues; missing: no limit.",
    "HOLDFAST_MEMSTORE_LIMIT": "Bytes that all snapshots and replicas on this node may take.",
    "HOLDFAST_MEMORY_SERVERS": "Node to host and port of the server of its snapshots, as JSON: this node, and nodes without ranks.",
    "HOLDFAST_CHECK_EVERY": "Steps between two comparisons of the parameters of data-parallel replicas; `auto`, or 0 for none.",
    "HOLDFAST_MEMORY_EVERY": "Steps between two in-memory snapshots; 0 takes none.",
    "HOLDFAST_MEMORY_OVERHEAD": "Share of the training time that in-memory snapshots may take, 0 to 1.",
    "HOLDFAST_MEMORY_POLICY": "`skip` or `pause`: what to do when a copy does not fit into the wait time of a step.",
    "HOLDFAST_MEMORY_PAUSE": "Seconds that a copy may pause one step, with `pause`.",
    "HOLDFAST_TOKEN": "Secret of the job, with which its workers authenticate to each other.",
    "HOLDFAST_HOT_SPARE": "Number of a hot spare: a process that warms up and waits for a rank. Missing in all other processes.",
    "HOLDFAST_ROLES": "Ranks that do the same work on different data, as JSON: one list per role.",
    "HOLDFAST_WAITING_ROLE": "Role in which a hot spare waits, as its index among the roles.",
    "HOLDFAST_RECORDINGS": "Folder of the recorded collectives, from which a hot spare warms up without peers.",
    "HOLDFAST_WARMED": "Roles in which a hot spare has warmed up, as JSON; set by Holdfast in the process.",
    "HOLDFAST_FRESH": "1 in a new process that takes a lost rank without having been a hot spare.",
}
"""What the agent sets for each worker, beside the variables of `torchrun`."""

EVALUATION_VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_CHECKPOINT": "Folder of the checkpoint to evaluate, in the format of `torch.distributed.checkpoint`.",
    "HOLDFAST_CHECKPOINT_STEP": "Step of the checkpoint.",
    "HOLDFAST_METRICS": "File for the metrics of the evaluation, one JSON object. The evaluation may print the object instead.",
}
"""What `evaluate_checkpoint` sets for an evaluation."""

TITLED: Final = (
    ("Set by you", "Holdfast reads these from the environment of a command, a flow or an agent.", VARIABLES),
    (
        "Set for each worker",
        "The agent sets these in addition to the variables of `torchrun` (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...).",
        WORKER_VARIABLES,
    ),
    ("Set for an evaluation", "`holdfast.workflows.evaluate_checkpoint` sets these for the evaluation script.", EVALUATION_VARIABLES),
)


def environment_page() -> str:
    """List the environment variables: those of a person, of a worker and of an evaluation."""
    parts = ["# Environment variables\n"]
    for title, intro, names in TITLED:
        parts += [f"## {title}\n", f"{intro}\n", table(("Variable", "Meaning"), *((f"`{name}`", text) for name, text in names.items()))]
    return page(*parts)
