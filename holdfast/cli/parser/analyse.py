"""Declare what is under the heading Analyse."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import (
    Duration,
    Group,
    Unit,
    app,
    command,
    completes,
    example,
    file_path,
    from_one,
    incident_argument,
    incident_job,
    jobs,
    optional_job,
    page_file,
    picture,
    picture_file,
    since_option,
)


@command("analyse.report.report", "holdfast report gpt-small -o report.html", "holdfast report gpt-small --profile")
@optional_job
@click.option("--profile", is_flag=True, is_eager=True, help="Show where the ranks wait in a step, instead of writing the report.")
@click.option(
    "--output",
    "-o",
    type=file_path,
    metavar="FILE",
    callback=picture_file,
    help="File to write; default: JOB.html, with --profile none (.html, .png or .svg).",
)
def report() -> None:
    """Write a page about a JOB: losses, incidents, times.

    One self-contained HTML file about the newest run of JOB (default: the newest job). With --profile: the recognised layout
    (pipeline, data, shards), each rank's idle windows, and the cost of in-memory snapshots, from the last reports of the ranks.
    """


@command("analyse.cost.cost", "holdfast cost", "holdfast cost gpt-small --since 7d", "holdfast cost --since 2026-11-01 -o cost.html")
@optional_job
@since_option
@picture
def cost() -> None:
    """Show what compute time was used for (goodput).

    Productive hours, and lost ones: by kind of fault, by phase, by node; with ETTR, MTTF and MTTR. Of one JOB (its newest
    run), or of all jobs together. The parts add up to the total.
    """


@command(
    "analyse.simulate.simulate",
    "holdfast simulate examples/simulation/pretraining-16k.yaml",
    "holdfast simulate pretraining.yaml --workers 8 --results pretraining.jsonl",
    "holdfast simulate --validate --json validation.jsonl",
)
@click.argument("scenario", type=file_path, required=False)
@click.option("--validate", is_flag=True, help="Compute published figures from their stated parameters, instead of a scenario.")
@click.option("--runs", type=from_one, metavar="N", help="Repetitions with other faults; default: as in the scenario, or 3.")
@click.option("--from-history", is_flag=True, help="Holdfast's phase times as this history has them, where it has enough.")
@click.option("--workers", type=from_one, default=1, show_default=True, metavar="N", help="Processes that simulate at the same time.")
@click.option("--results", type=file_path, metavar="FILE", help="Keep finished runs in FILE, and go on from those that it has.")
def simulate() -> None:
    """Simulate what faults cost, at any scale.

    SCENARIO is a file with a cluster, jobs, sources of faults, and the systems to compare. All systems get the same faults. Holdfast's
    decisions are those of its policies; the figures of other systems are public ones, and `--json` names their sources.
    With `--validate`, each line is a published figure and what the simulator makes of it; SCENARIO is then a file for these lines as JSON.
    """


@command(
    "analyse.plan.plan",
    "holdfast plan --gpus 16384",
    "holdfast plan --gpus 2048 --step 4s --rate 6.5 --price 2.5 --workers 4 -o plan.html",
    "holdfast plan --gpus 2048 --state 1.8TB --network 400Gbit/s --storage 200GB/s",
)
@click.option("--gpus", type=from_one, required=True, metavar="N", help="GPUs of the job.")
@click.option("--gpus-per-node", type=from_one, default=8, show_default=True, metavar="N", help="GPUs of each node.")
@click.option("--step", type=Duration(), default="10s", show_default=True, metavar="TIME", help="Time of one step.")
@click.option("--stall", type=Duration(zero=True), metavar="TIME", help="Pause of training for a checkpoint; default: by --state, or 5s.")
@click.option("--state", type=Unit("size"), metavar="SIZE", help="Parameters and optimizer of one copy of the model, such as 1.8TB.")
@click.option("--network", type=Unit("bandwidth"), metavar="RATE", help="Bandwidth of each node, such as 400Gbit/s; with --state.")
@click.option("--storage", type=Unit("bandwidth"), metavar="RATE", help="Of the storage for all nodes, such as 200GB/s; with --state.")
@click.option("--copies", type=from_one, metavar="N", help="Copies of the model; default: as many as fit on four nodes or more each.")
@click.option(
    "--rate", type=click.FloatRange(0.01, 10_000), metavar="R", help="Independent faults in 1,000 node-days, in place of a trace."
)
@click.option("--policy", default="balanced", show_default=True, metavar="NAME|FILE", shell_complete=completes("policies"), help="Policy.")
@click.option("--price", type=click.FloatRange(0, 1e6), metavar="P", help="Price of a GPU-hour, to show costs.")
@click.option("--runs", type=from_one, default=3, show_default=True, metavar="N", help="Repetitions with other faults.")
@click.option("--workers", type=from_one, default=1, show_default=True, metavar="N", help="Processes that simulate at the same time.")
@click.option("--output", "-o", type=file_path, metavar="FILE", callback=page_file, help="Write a page with plots too; FILE ends in .html.")
def plan() -> None:
    """Recommend spares, checkpoint interval and policy.

    Simulates each choice with the same faults under managed groups, and shows what it wastes, what other systems would, and how much
    the answer depends on each assumption. Faults come as in a trace of a real cluster, or independently with `--rate`.
    """


@app.group(
    cls=Group,
    no_args_is_help=True,
    epilog=example("holdfast faults ls --area hardware --recommended-action evict", "holdfast faults show gpu-off-bus"),
)
def faults() -> None:
    """Look up the kinds of faults."""


@command("analyse.faults.list_kinds", "holdfast faults ls", 'holdfast faults ls --words "xid 79" --area hardware', group=faults, name="ls")
@click.option("--words", metavar="WORDS", help="Only kinds with all these words in their name, title, source or cure.")
@click.option("--area", metavar="AREA", help="Only kinds of hardware, network, storage, host, software or progress.")
@click.option("--component", metavar="NAME", help="Only kinds of this component, such as `nvlink`.")
@click.option("--recommended-action", metavar="ACTION", help="Only kinds that recommend this, such as `evict`.")
@click.option("--attributed-to", metavar="WHAT", help="Only kinds attributed to this, such as `gpu`.")
@click.option("--acts", metavar="ON", help="Only kinds that take a node out on this: measured, line, second-signal or never.")
def list_faults() -> None:
    """List the kinds that match all options."""


@command("analyse.faults.show_kind", "holdfast faults show gpu-off-bus", group=faults, name="show")
@click.argument("kind", shell_complete=completes("faults"))
def show_fault() -> None:
    """Explain one KIND of fault."""


@command("analyse.faults.list_unknown", "holdfast faults unknown", "holdfast faults unknown --draft", group=faults, name="unknown")
@click.option("--limit", type=from_one, default=20, show_default=True, metavar="N", help="Most frequent failures to list.")
@click.option("--draft", is_flag=True, help="Write tables for the catalogue, to be completed.")
def unknown_faults() -> None:
    """List failures that the catalogue does not know.

    From the history: what ended workers and matches no kind but `worker-exception`, `worker-exit-code` and the like.
    """


@command(
    "analyse.classify.classify_log",
    "holdfast faults find train.log",
    "dmesg | holdfast faults find - --log kernel --json",
    group=faults,
    name="find",
)
@click.argument("file", type=file_path, required=False, metavar="[LOG]")
@click.option("--log", type=click.Choice(("kernel", "output", "other")), help="What LOG is. Default: told by the beginning of each line.")
@click.option("--all", "every", is_flag=True, help="Show each line that only its words make a fault, not their number and two of them.")
def find_faults() -> None:
    """Find the faults in a LOG.

    LOG is a file, or `-` (the default) for standard input: kernel, NCCL, torch, scheduler or application, also mixed. Prints
    the faults, and with `--json` one object for each line or traceback: line, classification, kind, attributed_to, recommended_action,
    action, acts. A line alone acts in the kernel log only, or in the output of a worker: `--log` says what LOG is. Exit status 0: the log
    was read, with faults or without.
    """


@command("analyse.hang.explain_hang", "holdfast faults hang /tmp/nccl_trace_rank_*", group=faults, name="hang")
@click.argument("dumps", nargs=-1, required=True, type=file_path, metavar="DUMP...")
def find_hang() -> None:
    """Name the rank that blocks a hanging job.

    Each DUMP is one rank's file of torch's flight recorder, a pickle or JSON, of a job of any launcher; its name ends with the
    rank. Shows which rank did not arrive at which collective, or which ranks entered different ones. Nothing in a dump is run.
    """


@command(
    "analyse.explain.explain_line",
    'holdfast explain "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."',
    "dmesg | tail -3 | holdfast explain -",
)
@click.argument("line")
@click.option("--log", type=click.Choice(("kernel", "output", "other")), help="The log it is from. Default: told by its beginning.")
def explain() -> None:
    """Explain what is made of a log LINE.

    Which signature matched, whether a node is left because of it and why, what to do, and what would change that. LINE is one
    argument, in quotes; `-` reads it, or several lines that belong together, from standard input.
    """


@app.group(cls=Group, no_args_is_help=True, epilog=example("holdfast policy show balanced", "holdfast policy explain 2 --job gpt-small"))
def policy() -> None:
    """Check, show, explain and replay policies."""


@command("analyse.policy.check", "holdfast policy check careful.yaml", group=policy, name="check")
@click.argument("files", nargs=-1, required=True, type=file_path, metavar="FILE...")
def check_policy() -> None:
    """Check policy files and show all problems.

    Each problem has its field, its line, the reason and the cure. Exit status 2: a file cannot be used.
    """


@command("analyse.policy.show", "holdfast policy show", "holdfast policy show careful.yaml", group=policy, name="show")
@click.argument("policy", required=False, metavar="[NAME|FILE]", shell_complete=completes("policies"))
def show_policy() -> None:
    """Show the rules of a policy in their order.

    With every threshold, timeout and recommended action, and what differs from the policy that it is based on. NAME is `patient`,
    `balanced` (the default) or `aggressive`; FILE is a policy file.
    """


@command(
    "analyse.policy.explain", "holdfast policy explain 2 --job gpt-small", "holdfast policy explain slow", group=policy, name="explain"
)
@incident_argument
@incident_job
def explain_incident() -> None:
    """Explain the decisions about an INCIDENT.

    For each attempt: which rule of which policy decided and why, what other rules noted, which were skipped and why, and
    how the attempt ended. INCIDENT is its number within the job, or its id; `slow` shows the decisions about ranks that
    slowed the others down, with the costs of staying and migrating.
    """


@command(
    "analyse.replay.replay",
    "holdfast policy replay aggressive",
    "holdfast policy replay patient --job gpt-small --since 30d",
    group=policy,
    name="replay",
)
@click.argument("policy", metavar="NAME|FILE", shell_complete=completes("policies"))
@click.option("--job", metavar="JOB", shell_complete=jobs, help="Only incidents of this job; default: of all jobs.")
@since_option
def replay() -> None:
    """Show what another policy would have decided.

    Every recorded decision is repeated with what was known then. Shows those that differ, and the compute-hours that the
    others would have saved or lost, by what recoveries of that kind took in this history. Nothing is changed.
    """
