"""Declare what is under the heading Nodes."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import (
    Duration,
    Group,
    Ranks,
    all_ranks,
    app,
    cluster_option,
    command,
    example,
    file_path,
    from_one,
    job_argument,
    jobs,
    node_option,
    nodes_argument,
    of_cluster,
    some_names,
    some_nodes,
)

ssh_cluster = cluster_option("none; it must be of kind `ssh`")
reason = click.option("--reason", required=True, metavar="TEXT", help="Why: it is recorded, and shown wherever the node is listed.")
one_cordon = click.option("--number", type=from_one, metavar="N", help="Only if this cordon is open; `holdfast node ls` shows numbers.")


@app.group(
    cls=Group,
    no_args_is_help=True,
    epilog=example(
        "holdfast node ls --cluster cluster.yaml",
        'holdfast node cordon gpu[1-4] --reason "new fans" --for 2h --cluster cluster.yaml',
        "export HOLDFAST_CLUSTER=cluster.yaml; holdfast node check",
    ),
)
def node() -> None:
    """Check nodes, and take them out of service.

    NODE is a name or a range such as `gpu[1-4]`; several may be given. The cluster is that of --cluster or of a job,
    else that of HOLDFAST_CLUSTER.
    """


@command("nodes.listing.list_nodes", "holdfast node ls", "holdfast node ls --cluster cluster.yaml --now", group=node, name="ls")
@some_nodes
@of_cluster
@click.option("--now", is_flag=True, help="Also contact machines that are reached by SSH.")
def list_nodes() -> None:
    """List nodes: state, jobs, health, cordons.

    Whether jobs may use a node, since when not, who decided that, why and until when; its agent and job; its last health check.
    """


@command(
    "nodes.check.check",
    "holdfast node check --cluster cluster.yaml",
    "holdfast node check gpu[1-4] --timeout 30s --json",
    "holdfast node check --local --baseline before.json",
    group=node,
    name="check",
)
@some_nodes
@cluster_option("none; name it, or give --local", first=False)
@click.option("--local", is_flag=True, help="Check this machine only, and record nothing.")
@click.option("--baseline", type=file_path, metavar="FILE", help="With --local: an earlier output of --json; show what has changed since.")
@click.option(
    "--timeout",
    type=Duration(),
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="Maximum wait for any node, and with --local for any part of it.",
)
def check() -> None:
    """Check the hardware and health of nodes.

    GPUs and their driver, the kernel log, network, disks, processors, memory, clock, services; and what could not be read,
    with the reason. Nodes need python3 only, and nothing on them is changed. Each is compared with its last check in the
    history. Exit status 1: a node is not healthy.
    """


@command(
    "nodes.preflight.preflight",
    "holdfast node preflight --cluster cluster.yaml",
    "holdfast node preflight gpu-3 --job job.yaml --cluster cluster.yaml",
    group=node,
    name="preflight",
)
@some_nodes
@cluster_option("the job file's own; it must be of kind `ssh`", first=False)
@click.option("--job", "job_file", type=file_path, metavar="FILE", help="Check what this job needs too: its files, its checkpoints.")
def preflight() -> None:
    """Check whether nodes are ready to run a job.

    Login, python, Holdfast, torch, GPUs and their driver, clock, disk, memory for snapshots, limits, the interface for
    training, and connections between nodes. With --job: the job's files, and whether all nodes see its checkpoints. Each problem has
    its cure. Exit status: 0 ready, 1 something is missing, 3 jobs can run but something should be fixed.
    """


@command(
    "nodes.burn_in.burn_in",
    "holdfast node burn-in node-1",
    "holdfast node burn-in gpu[3-4] --for 10m --cluster cluster.yaml",
    group=node,
    name="burn-in",
)
@nodes_argument
@of_cluster
@click.option("--short", is_flag=True, help="One second of work, also while a job trains. Finds broken parts, and lifts no quarantine.")
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    metavar="DURATION",
    help="Duration on each node, without the network test; default: `burn_in.duration` of the cluster.",
)
def burn_in() -> None:
    """Test nodes under load.

    Arithmetic with known results on every core and GPU, patterns in memory, a file on disk, the clock, and transfers
    between pairs of nodes, paired again after a failure until the faulty node is known. At low priority. A quarantined node
    that passes returns to service; one that fails does not. Nodes need python3 only. Exit status 1: a node did not pass.
    """


@command("nodes.cordon.cordon", 'holdfast node cordon node-1 --reason "new fan" --for 2h', group=node, name="cordon")
@nodes_argument
@reason
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    metavar="DURATION",
    help="Such as 2h; then the node waits for a burn-in. Default: until uncordoned.",
)
@of_cluster
def cordon() -> None:
    """Take nodes out of service until you return them.

    No job gets a cordoned node, and no program lifts the cordon. A job that trains on it continues there; `holdfast node drain`
    migrates it as well.
    """


@command("nodes.cordon.uncordon", "holdfast node uncordon node-1 --reason done", group=node, name="uncordon")
@nodes_argument
@reason
@one_cordon
@of_cluster
def uncordon() -> None:
    """Lift the cordons that people put on nodes.

    A quarantine by a program stays: the node then needs a passed burn-in, or `holdfast node return`.
    """


@command(
    "nodes.cordon.drain",
    'holdfast node drain node-1 --by 18:00 --reason "new fan"',
    "holdfast node drain gpu[1-4] --in 20m",
    "holdfast node drain node-1 --cancel",
    group=node,
    name="drain",
)
@nodes_argument
@click.option("--by", metavar="TIME", help="When the node must be empty: `18:00`, or a date and a time.")
@click.option("--in", "within", type=Duration(), metavar="DURATION", help="The same as a duration from now, such as 20m.")
@click.option("--reason", default="a planned removal", show_default=True, metavar="TEXT", help="Why: shown wherever the node is listed.")
@click.option("--cancel", is_flag=True, help="Cancel the drain: jobs may stay, or get the node again.")
@cluster_option("that of --job, or the cluster `local` on this machine", first=False)
@click.option("--job", metavar="JOB", shell_complete=jobs, help="Use the cluster of this job.")
def drain() -> None:
    """Have all jobs leave nodes, in time.

    From now on no job gets the node. Ranks on it migrate to another node while training runs. If there is none, that is reported at
    once, and shortly before the time a final checkpoint is saved, and the job continues without the node or waits.
    Afterwards the node is cordoned, until `holdfast node uncordon`.
    """


@command(
    "nodes.migrate.migrate",
    "holdfast node migrate gpt-small --from node-1",
    "holdfast node migrate gpt-small --rank 3 --to node-4",
    group=node,
    name="migrate",
)
@job_argument
@click.option("--from", "source", metavar="NODE", shell_complete=some_names, help="Migrate all ranks of this node, and release the node.")
@click.option(
    "--rank", "ranks", type=Ranks(), multiple=True, callback=all_ranks, metavar="RANKS", help="Migrate these ranks, one after another."
)
@click.option(
    "--to", "target", metavar="NODE", shell_complete=some_names, help="Node to migrate to; default: a spare one, or any that is free."
)
@click.option(
    "--timeout", type=Duration(zero=True), metavar="DURATION", help="Maximum wait for the outcome; the migration itself continues."
)
def migrate() -> None:
    """Move ranks of a JOB while it trains.

    The new processes are prepared while training runs and take over between two steps: nothing restarts, no step is lost.
    The job's process groups must be managed (`groups`). Waits for the outcome; exit status 1: nothing was moved.
    """


@command(
    "nodes.approve.approve",
    "holdfast node approve",
    "holdfast node approve 3",
    'holdfast node approve 3 --deny --reason "only its fan"',
    group=node,
    name="approve",
)
@click.argument("number", type=from_one, required=False)
@click.option("--deny", is_flag=True, help="Deny it: the nodes stay in service.")
@node_option("Isolate only this one")
@click.option("--reason", default="", metavar="TEXT", help="Why: it is recorded with the answer.")
def approve() -> None:
    """Approve or deny the isolation of nodes.

    Holdfast requests approval before it isolates more of a cluster than its `quarantine.max_unavailable`, or so many of a job's nodes
    that the job cannot continue. Without NUMBER: list the pending approvals.
    """


@command("nodes.cordon.return_to_service", 'holdfast node return node-1 --reason "GPU replaced"', group=node, name="return")
@nodes_argument
@reason
@one_cordon
@of_cluster
def return_node() -> None:
    """Return nodes to service without a burn-in.

    Lifts a quarantine, a suspicion or a decommissioning on your authority. A person's cordon stays until `holdfast node uncordon`.
    """


@command(
    "nodes.cordon.decommission", 'holdfast node decommission node-1 --reason "fell off the bus again"', group=node, name="decommission"
)
@nodes_argument
@reason
@of_cluster
def decommission() -> None:
    """Take nodes out of service for good.

    Only `holdfast node return` returns them.
    """


@command("nodes.trust.trust", "holdfast node trust --cluster cluster.yaml", group=node, name="trust")
@some_nodes
@ssh_cluster
@click.option("--yes", is_flag=True, help="Trust unknown keys without asking: for networks on which nobody can impersonate a machine.")
def trust() -> None:
    """Show and trust the host keys of machines.

    Of all nodes of the cluster (or each NODE) and their jump hosts: which keys are known, unknown, changed or
    revoked, with fingerprints. Unknown ones are added to the known hosts file after confirmation; changed ones never are.
    """


@command(
    "nodes.bootstrap.bootstrap",
    "holdfast node bootstrap --cluster cluster.yaml",
    "holdfast node bootstrap gpu[3-4] --cluster cluster.yaml",
    group=node,
    name="bootstrap",
)
@some_nodes
@ssh_cluster
@click.option("--wheel", type=file_path, metavar="FILE", help="Install this wheel; default: one built from this Holdfast.")
@click.option("--write-wheel", type=file_path, metavar="FILE", help="Write the wheel there too, e.g. for an image of nodes.")
def bootstrap() -> None:
    """Install agent and runtime on SSH hosts.

    One small wheel without dependencies is installed into an environment of the cluster's `python` on each host, in its
    `directory`; torch is the one installed for that `python`. What is up to date stays as it is, and running agents keep
    the version that they were started with.
    """
