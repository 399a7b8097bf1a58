"""Declare the commands, their arguments and help. What a command does is imported when it runs: `--help` imports click alone."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from holdfast import __version__
from holdfast.errors import cut
from holdfast.log import FORMAT, FORMATS

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
file_path = click.Path(path_type=Path)


class _Number(click.IntRange):
    """An integer that a database can hold; the help does not show its limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the number; refuse one that is too large."""
        number = super().convert(value, param, ctx)
        if number >= 2**63:
            self.fail(f"{str(number)[:40]} is too large.", param, ctx)
        return number


from_zero, from_one = _Number(min=0), _Number(min=1)


class OutputClosed(Exception):
    """The reader of our output exited. Not an ``OSError``: click would treat it as an ordinary failure."""


class _OrderedGroup(click.Group):
    """A group that lists its commands as they are declared; for an unknown one it suggests the most similar."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the commands as they were declared."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 (click's signature)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise OutputClosed from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that *args* begin with; refuse an unknown one with the most similar name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            ctx.fail(f"No such command '{cut(args[0])}'." + (f" Did you mean '{near[0]}'?" if near else " `holdfast --help` lists them."))
        return super().resolve_command(ctx, args)


def _version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 (click's signature)
    if wanted and not context.resilient_parsing:
        click.echo(f"holdfast {__version__}")
        context.exit()


def _log_format(_context: click.Context, _option: click.Parameter, wanted: str | None) -> None:
    """Set the log format of this process and all that it starts."""
    if wanted is not None:
        os.environ[FORMAT] = wanted
    elif os.environ.get(FORMAT, "text") not in FORMATS:
        raise click.UsageError(f"{FORMAT} is '{os.environ[FORMAT]}'; it must be {' or '.join(FORMATS)}")


def _picture_file(_context: click.Context, _option: click.Parameter, output: Path | None) -> Path | None:
    """Refuse a file that is not of a kind that can be drawn."""
    if output is not None and output.suffix.lower() not in {".html", ".png", ".svg"}:
        raise click.BadParameter(f"'{output}' does not end in .html, .png or .svg. Choose one of them.", param_hint="'--output'")
    return output


def _since(_context: click.Context, _option: click.Parameter, since: str | None) -> float | None:
    """Return *since* in seconds since 1970."""
    if since is None:
        return None
    from holdfast.cli.arguments import past_time  # noqa: PLC0415 (pydantic, which `--help` does not need)

    found = past_time(since)
    if found is None:
        cure = 'Write a duration such as "7d" or "12h", or a date such as "2026-11-20" or "2026-11-20T14:00".'
        raise click.BadParameter(f"'{since}' is neither a duration nor a date. {cure}", param_hint="'--since'")
    return found


def command(
    target: str, *examples: str, group: click.Group | None = None, name: str | None = None, json: bool = True
) -> Callable[[Callable[[], None]], click.Command]:
    """Declare a command with the name and help of the decorated function, *examples*, and the option `--json`.

    It runs *target* (``module.function`` in `holdfast.cli.commands`), which takes its arguments and options by their names and returns
    the exit status.
    """

    def decorate(declared: Callable[[], None]) -> click.Command:
        run = runs(target)(declared)
        if json:
            run.__click_params__ = []  # type: ignore[attr-defined]  # of click's own decorators
            as_json(run)
            run.__click_params__ += getattr(declared, "__click_params__", [])  # type: ignore[attr-defined]
        return (group or app).command(name, epilog=example(*examples))(run)

    return decorate


def runs(target: str) -> Callable[[Callable[[], None]], Callable[..., int]]:
    """Make the function *target* (``module.function`` in `holdfast.cli.commands`) run under the name and help of the decorated one.

    It is imported when it runs, and takes the command's arguments and options by their names.
    """

    def decorate(declared: Callable[[], None]) -> Callable[..., int]:
        @functools.wraps(declared)
        def run(**given: Any) -> int:  # noqa: ANN401 (arguments and options of the command)
            if click.get_current_context().invoked_subcommand is not None:  # a group that is a command by itself too
                return 0
            module, _, function = target.partition(".")
            status: int = getattr(importlib.import_module(f"holdfast.cli.commands.{module}"), function)(**given)
            return status

        return run

    return decorate


def example(*lines: str) -> str:
    """Return the end of a command's help: how it is called."""
    return "\b\n" + "\n".join(f"{'Example: ' if number == 0 else '         '}{line}" for number, line in enumerate(lines))


optional_job = click.argument("job", required=False)
incident_job = click.option("--job", metavar="JOB", help="Job of the incident; default: the newest job.")
picture = click.option(
    "--output", "-o", type=file_path, metavar="FILE", callback=_picture_file, help="Draw a picture too; FILE ends in .html, .png or .svg."
)
of_cluster = click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster of the node; default: the cluster `local` on this machine."
)
since_option = click.option(
    "--since", metavar="WHEN", callback=_since, help="Only what is newer: a date and time, or a duration such as 7d."
)


@click.group(
    cls=_OrderedGroup,
    context_settings=CONTEXT,
    no_args_is_help=True,
    epilog=example("holdfast demo", "holdfast run job.yaml", "holdfast status"),
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    expose_value=False,
    is_eager=True,
    callback=_log_format,
    help="How this command, flows and agents log; default: HOLDFAST_LOG, or text.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit.")
def app() -> None:
    """Keep distributed PyTorch training running through faults.

    Exit status: 0 success, 1 the job failed, 2 an error that you can fix (the message says how), 3 the job was stopped,
    4 the controller died and training continues, 5 the job is saved as its time is over: the same command continues it,
    6 the controller has detached from the job, which continues, 7 the job is suspended and can be resumed, 130 interrupted.
    """


@command("validate.validate", "holdfast validate job.yaml")
@click.argument("job_file", type=file_path)
@click.option("--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to check against; default: the job file's own.")
def validate() -> None:
    """Check a job file and show all problems.

    Each problem has its field, the reason and the cure. JOB_FILE is YAML, or Python that sets `job`. Nothing is started.
    """


@command("run.run", "holdfast run job.yaml", "holdfast run job.yaml --cluster cluster.yaml --detach")
@click.argument("job_file", type=file_path)
@click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to run on; default: the job file's own, or this machine."
)
@click.option("--detach", is_flag=True, help="Return as soon as the job trains.")
@click.option("--standby", is_flag=True, help="Wait while another controller runs the job, and take over when it dies.")
@click.option(
    "--log-ranks",
    metavar="RANKS",
    help="Ranks whose output is shown here, such as `0,2-3`, `all` or `none`; default: 0, with --json or --detach none.",
)
def run() -> None:
    """Run a job to its end, through faults, and watch it.

    The job does not need this terminal: closing it changes nothing. Ctrl-C requests a stop, a second one stops at once.
    If a job lost its controller, the same command reattaches to it; its workers are not interrupted. With --standby, on another
    host with the same history (HOLDFAST_HISTORY, PostgreSQL), that happens by itself within seconds; it does not restart a job
    that has ended, unless its file has changed.

    The output of rank 0 is shown, each line with its rank; --log-ranks selects others. Output too fast to be read is left out:
    `holdfast logs` has all of it.
    """


@command("status.status", "holdfast status", "holdfast status gpt-small --follow")
@optional_job
@click.option("--follow", "-f", is_flag=True, help="Watch the job until it ends; Ctrl-C ends only the watching.")
def status() -> None:
    """Show the jobs that run, or one JOB in detail.

    JOB is a name (its newest run) or an id from `holdfast history`.
    """


@command("history.history", "holdfast history", "holdfast history gpt-small --json")
@optional_job
@click.option("--limit", type=from_one, default=50, show_default=True, metavar="N", help="Newest jobs to list.")
def history() -> None:
    """List all jobs, or show what happened to one JOB."""


@command("history.show", "holdfast show 2 --job gpt-small")
@click.argument("incident")
@incident_job
def show() -> None:
    """Show the faults and decisions of an INCIDENT.

    With the reasons, the evidence, and how long each phase took. INCIDENT is its number within the job, or its id.
    """


@command("report.report", "holdfast report gpt-small -o report.html")
@optional_job
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: JOB.html.")
def report() -> None:
    """Write a page about a JOB: losses, incidents, times.

    One self-contained HTML file about the newest run of JOB (default: the newest job).
    """


@command("advise.advise", "holdfast advise gpt-small", "holdfast advise gpt-small --every 500 --every 2000")
@optional_job
@click.option(
    "--every",
    type=from_one,
    multiple=True,
    metavar="N",
    help="Show also what a checkpoint every N steps would cost.",
)
def advise() -> None:
    """Advise how often a JOB should save.

    From the cost of its saves and steps and the rate of faults on all nodes (Young/Daly), with what other intervals and
    one fault would cost. What was never measured is assumed, and marked so. Default: the newest job.
    """


@command("checkpoints.checkpoints", "holdfast checkpoints gpt-small", "holdfast checkpoints gpt-small --verify")
@click.argument("job")
@click.option("--verify", is_flag=True, help="Read every byte, and prove that each checkpoint is of a single step.")
def checkpoints() -> None:
    """List everything that a JOB could resume from.

    Checkpoints on disk, and snapshots in the memory of its nodes; and what a recovery would resume from now. Works while the
    job trains and after its end, and changes nothing. Exit status 1: the newest of a tier is incomplete, or --verify found damage.
    """


@command("logs.logs", "holdfast logs gpt-small", "holdfast logs gpt-small --rank 3 --follow")
@optional_job
@click.option("--rank", "ranks", type=from_zero, multiple=True, metavar="N", help="Only this rank; may be given several times.")
@click.option("--node", metavar="NODE", help="All logs on this node, also of ranks that have left it.")
@click.option("--lines", "-n", type=from_zero, default=20, show_default=True, help="Last lines of each log.")
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the job ends.")
def logs() -> None:
    """Show what the ranks of a JOB have written, on any node.

    Read from the nodes; default: the newest job. Exit status 1: a node could not be read.
    """


@command("profile.profile", "holdfast profile gpt-small", "holdfast profile gpt-small -o profile.html")
@optional_job
@picture
def profile() -> None:
    """Show where the ranks of a JOB wait in a step.

    The recognised layout (pipeline, data, shards), each rank's idle windows, and the cost of in-memory snapshots:
    how much of the copying is overlapped. From the last reports of the ranks; default: the newest job.
    """


@command("cost.cost", "holdfast cost", "holdfast cost gpt-small --since 7d", "holdfast cost --since 2026-11-01 -o cost.html")
@optional_job
@since_option
@picture
def cost() -> None:
    """Show what the compute of jobs was used for.

    Productive hours, and lost ones: by kind of fault, by phase, by node; with ETTR, MTTF and MTTR. Of one JOB (its newest
    run), or of all jobs together. The parts add up to the total.
    """


@command("replay.replay", "holdfast replay --policy aggressive", "holdfast replay --policy patient --job gpt-small --since 30d")
@click.option("--policy", required=True, metavar="POLICY", help="Policy to apply: patient, balanced, aggressive, or a policy file.")
@click.option("--job", metavar="JOB", help="Only incidents of this job; default: of all jobs.")
@since_option
def replay() -> None:
    """Show what another policy would have decided.

    Every recorded decision is repeated with what was known then. Shows those that differ, and the compute-hours that the
    others would have saved or lost, by what recoveries of that kind took in this history. Nothing is changed.
    """


@command("metrics.metrics", "holdfast metrics", "holdfast metrics --serve 9464", "holdfast metrics --textfile holdfast.prom")
@click.option("--serve", metavar="[HOST:]PORT", help="Serve /metrics for Prometheus there until Ctrl-C; default HOST: the loopback.")
@click.option("--textfile", type=file_path, metavar="FILE", help="Write FILE atomically, for node_exporter's textfile collector.")
def metrics() -> None:
    """Print, serve or write the metrics for Prometheus.

    Jobs and their steps, incidents and downtime, checkpoints, nodes, ETTR: printed once in Prometheus' text format, served,
    or written to a file. Only the history is read.
    """


@command("stop.stop", "holdfast stop gpt-small")
@click.argument("job")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Maximum wait for the end; default: as long as it takes.")
def stop() -> None:
    """Stop a JOB and wait for its end.

    Its workers get SIGTERM, then time to save, then SIGKILL. A job that lost its controller is ended from here.
    """


@command("detach.detach", "holdfast detach gpt-small")
@click.argument("job")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait until the controller has detached.",
)
def detach() -> None:
    """Detach the controller of a JOB, which continues.

    No rank is interrupted: a standby controller takes over at once; without one, the same `holdfast run` reattaches. For upgrades,
    or before the host of the controller goes down. SIGUSR1 to the controller, or to its `holdfast run`, does the same.
    """


@command("migrate.migrate", "holdfast migrate gpt-small --from node-1", "holdfast migrate gpt-small --rank 3 --to node-4")
@click.argument("job")
@click.option("--from", "source", metavar="NODE", help="Migrate all ranks of this node, and release the node.")
@click.option("--rank", type=from_zero, metavar="N", help="Migrate this rank only.")
@click.option("--to", "target", metavar="NODE", help="Node to migrate to; default: a spare one, or any that is free.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Maximum wait for the outcome; the migration itself continues."
)
def migrate() -> None:
    """Move ranks of a JOB to another node while it trains.

    The new processes are prepared while training runs and take over between two steps: nothing restarts, no step is lost.
    The script must call `holdfast.join`. Waits for the outcome; exit status 1: nothing was moved.
    """


@command("nodes_cordon.drain_node", 'holdfast drain node-1 --by 18:00 --reason "new fan"', "holdfast drain node-1 --cancel")
@click.argument("node")
@click.option("--by", metavar="TIME", help="When the node must be empty: `18:00`, or a date and a time.")
@click.option("--in", "within", metavar="DURATION", help="The same as a duration from now, such as `20m`.")
@click.option("--reason", default="a planned removal", show_default=True, metavar="TEXT", help="Why: shown wherever the node is listed.")
@click.option("--cancel", is_flag=True, help="Cancel the drain: jobs may stay, or get the node again.")
@of_cluster
@click.option("--job", metavar="JOB", help="Use the cluster of this job instead.")
def drain() -> None:
    """Have all jobs leave NODE, in time.

    From now on no job gets it. Ranks on it migrate to another node while training runs. If there is none, that is reported at
    once, and shortly before the time a final checkpoint is saved, and the job continues without the node or waits.
    Afterwards the node is cordoned, until `holdfast nodes release`.
    """


class _Nodes(_OrderedGroup):
    """The group `nodes`: what is not one of its commands is the file of a cluster whose nodes are to be listed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `list` where *args* do not begin with a command of the group, unless that is a mistyped one."""
        first = next((one for one in args if not one.startswith("-")), None)
        if first is None:
            known = bool({"-h", "--help"} & set(args))
        else:
            known = first in self.commands or (not Path(first).exists() and bool(difflib.get_close_matches(first, self.commands, n=1)))
        return super().parse_args(ctx, args if known else ["list", *args])


@app.group(
    cls=_Nodes,
    epilog=example(
        "holdfast nodes cluster.yaml",
        "holdfast nodes trust cluster.yaml",
        'holdfast nodes hold node-1 --reason "new fan" --for 2h',
        "holdfast nodes release node-1 --reason done",
    ),
)
@as_json
@click.pass_context
def nodes(context: click.Context, as_json: bool) -> None:  # noqa: FBT001 (click passes options so)
    """List nodes, cordon one, or return it to service.

    `holdfast nodes [CLUSTER_FILE]` lists them.
    """
    context.default_map = {name: {"as_json": as_json} for name in nodes.commands}  # before the command it means the same


@command("nodes.nodes", "holdfast nodes cluster.yaml", "holdfast nodes cluster.yaml --now", group=nodes, name="list")
@click.argument("cluster_file", type=file_path, required=False)
@click.option("--now", is_flag=True, help="Also contact machines that are reached by SSH.")
def list_nodes() -> None:
    """List the nodes of a cluster.

    Whether jobs may use them, since when not, by whom, why and until when; their agents, the jobs they run, and their last
    known health. CLUSTER_FILE is YAML, or Python that sets `cluster`; default: the cluster `local` on this machine.
    """


@command("nodes_trust.trust", "holdfast nodes trust cluster.yaml", group=nodes, name="trust")
@click.argument("cluster_file", type=file_path)
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option("--yes", is_flag=True, help="Trust unknown keys without asking: for networks on which nobody can impersonate a machine.")
def trust_nodes() -> None:
    """Show the host keys of machines reached by SSH, and trust them.

    Of all nodes of the cluster (or each NODE) and their jump hosts: which keys are known, unknown, changed or
    revoked, with fingerprints. Unknown ones are added to the known hosts file after confirmation; changed ones never are.
    """


some_nodes = click.option(
    "--nodes", "only", metavar="A,B", multiple=True, help="Only these: names and ranges, `gpu[001-016],gpu040`. Default: all."
)


@command(
    "nodes_bootstrap.bootstrap",
    "holdfast nodes bootstrap cluster.yaml",
    "holdfast nodes bootstrap cluster.yaml --nodes gpu-3,gpu-4",
    group=nodes,
    name="bootstrap",
)
@click.argument("cluster_file", type=file_path)
@some_nodes
@click.option("--wheel", type=file_path, metavar="FILE", help="Install this wheel; default: one built from this Holdfast.")
@click.option("--write-wheel", type=file_path, metavar="FILE", help="Write the wheel there too, e.g. for an image of nodes.")
def bootstrap_nodes() -> None:
    """Install agent and runtime on hosts that are reached by SSH.

    One small wheel without dependencies is installed into an environment of the cluster's `python` on each host, in its
    `directory`; torch is the one installed for that `python`. What is up to date stays as it is, and running agents keep
    the version that they were started with.
    """


@command(
    "nodes_check.inspect",
    "holdfast nodes check cluster.yaml",
    "holdfast nodes check cluster.yaml job.yaml --nodes gpu-3",
    group=nodes,
    name="check",
)
@click.argument("cluster_file", type=file_path)
@click.argument("job_file", type=file_path, required=False)
@some_nodes
def check_nodes() -> None:
    """Show what hosts need before a job can run on them.

    Login, python, Holdfast, torch, GPUs and their driver, clock, disk, memory for snapshots, limits, the interface for
    training, and connections between nodes; with JOB_FILE its files and whether all nodes see its checkpoints. Each with
    its cure. Exit status: 0 ready, 1 something is missing, 3 jobs can run but something should be fixed.
    """


reason = click.option("--reason", required=True, metavar="TEXT", help="Why: it is recorded, and shown wherever the node is listed.")
one_hold = click.option("--number", type=from_one, metavar="N", help="Only if this hold is open; `holdfast nodes` shows numbers.")


@command("nodes_cordon.hold_node", 'holdfast nodes hold node-1 --reason "new fan" --for 2h', group=nodes, name="hold")
@click.argument("node")
@reason
@click.option("--for", "lasts", metavar="DURATION", help="Such as `2h`; then the node waits for a burn-in. Default: until it is released.")
@of_cluster
def hold_node() -> None:
    """Cordon NODE: no job gets it until a person releases it.

    No program lifts it. A job that trains on the node continues there; `holdfast drain` migrates it as well.
    """


@command("nodes_cordon.release_node", "holdfast nodes release node-1 --reason done", group=nodes, name="release")
@click.argument("node")
@reason
@one_hold
@of_cluster
def release_node() -> None:
    """Uncordon NODE: lift a person's hold.

    Quarantines by programs stay: the node then needs a passed burn-in, or `readmit`.
    """


@command("nodes_cordon.readmit_node", 'holdfast nodes readmit node-1 --reason "GPU replaced"', group=nodes, name="readmit")
@click.argument("node")
@reason
@one_hold
@of_cluster
def readmit_node() -> None:
    """Return NODE to service without a burn-in.

    Lifts a quarantine, a suspicion or a decommissioning on your authority. A person's hold stays until it is released.
    """


@command("nodes_cordon.retire_node", 'holdfast nodes retire node-1 --reason "fell off the bus again"', group=nodes, name="retire")
@click.argument("node")
@reason
@of_cluster
def retire_node() -> None:
    """Decommission NODE: only `readmit` returns it to service."""


@command("burn_in.burn_in", "holdfast burn-in node-1", "holdfast burn-in gpu-3 gpu-4 --cluster cluster.yaml --seconds 600", name="burn-in")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@of_cluster
@click.option("--short", is_flag=True, help="One second of work, also while a job trains. Finds broken parts, and lifts no quarantine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=604_800),
    metavar="SECONDS",
    help="Duration on each node, without the network test; default: `burn_in.duration` of the cluster.",
)
def burn_in() -> None:
    """Test nodes with real work.

    Arithmetic with known results on every core and GPU, patterns in memory, a file on disk, the clock, and transfers
    between pairs of nodes, paired again after a failure until the faulty node is known. At low priority. A quarantined node
    that passes returns to service; one that fails does not. Nodes need python3 only. Exit status 1: a node did not pass.
    """


@command("approve.approve", "holdfast approve", "holdfast approve 3", 'holdfast approve 3 --refuse --reason "only its fan"')
@click.argument("number", type=from_one, required=False)
@click.option("--refuse", is_flag=True, help="Deny it: the nodes stay in service.")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Isolate only this one; may be given several times.")
@click.option("--reason", default="", metavar="TEXT", help="Why: it is recorded with the answer.")
def approve() -> None:
    """Approve or deny the isolation of nodes.

    Programs request approval before they isolate more of a cluster than its `quarantine.max_unavailable`, or so many of a job's nodes
    that it cannot continue. Without NUMBER: list the pending approvals.
    """


@app.group(
    cls=_OrderedGroup,
    epilog=example(
        "holdfast notify add ops https://ops.example.com/hook",
        "holdfast notify add oncall - < address",
        "holdfast notify test ops",
    ),
)
def notify() -> None:
    """Send notifications to people, one for each incident.

    The Prefect server that PREFECT_API_URL names sends them, whether a controller lives or not.
    """


@command(
    "notify.add",
    "holdfast notify add ops https://ops.example.com/hook",
    "holdfast notify add team https://hooks.slack.com/services/...",
    group=notify,
    name="add",
)
@click.argument("name")
@click.argument("address")
@click.option("--all", "everything", is_flag=True, help="Also what needs no person: recovered incidents, completed jobs.")
@click.option(
    "--no-controller-after",
    "lost_after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Alert after this time without a heartbeat of a controller, at least 10; 0: never. Default: 80.",
)
def add_address() -> None:
    """Send notifications to ADDRESS, under a NAME.

    ADDRESS is a URL that receives JSON, one of Slack, Teams, Discord, PagerDuty, Opsgenie, Mattermost, Twilio or SendGrid, or
    any that Apprise knows, such as mailto://. `-` reads it from standard input, as it may be a secret. Prefect keeps it in the block
    type that matches. By default it receives what needs a person: a lasting incident, a pending approval, a failed job, a quarantined or
    unhealthy node, a job without a controller.
    """


@command("notify.addresses", "holdfast notify list", group=notify, name="list")
def list_addresses() -> None:
    """List where notifications go."""


@command("notify.test", "holdfast notify test ops", group=notify, name="test")
@click.argument("name")
def test_address() -> None:
    """Have the server send one notification to NAME."""


@command("notify.remove", "holdfast notify remove ops", group=notify, name="remove")
@click.argument("name")
def remove_address() -> None:
    """Send nothing more to NAME, and delete its address."""


@command(
    "health.health", "holdfast health cluster.yaml", "holdfast health cluster.yaml --json", "holdfast health --local --since before.json"
)
@click.argument("cluster_file", type=file_path, required=False)
@click.option("--local", is_flag=True, help="Check this machine only, and record nothing.")
@click.option("--since", type=file_path, metavar="FILE", help="With --local: an earlier output of --json; show what has changed since.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for any node, and with --local for any part of it.",
)
def health() -> None:
    """Check the health of the nodes of a cluster.

    GPUs and their driver, the kernel log, network, disks, processors, memory, clock, services; and what could not be read,
    with the reason. Nodes need python3 only, and nothing on them is changed. Each is compared with its last check in the
    history. CLUSTER_FILE is YAML, or Python that sets `cluster`. Exit status 1: a node is not `ok`.
    """


@command("classify.classify_log", "holdfast classify train.log", "dmesg | holdfast classify - --json")
@click.argument("log", type=file_path, required=False)
def classify() -> None:
    """Find the faults in a LOG.

    LOG is a file, or `-` (the default) for standard input: kernel, NCCL, torch, scheduler or application, also mixed. Prints
    the faults, and with `--json` one object for each line or traceback: line, classification, kind, attributed_to, recommended_action,
    action. Exit status 0: the log was read, with faults or without.
    """


@app.group(
    cls=_OrderedGroup,
    invoke_without_command=True,
    epilog=example("holdfast faults --area hardware --recommended-action evict", "holdfast faults show gpu-off-bus"),
)
@click.option("--words", metavar="WORDS", help="Only kinds with all these words in their name, title, source or cure.")
@click.option("--area", metavar="AREA", help="Only kinds of hardware, network, storage, host, software or progress.")
@click.option("--component", metavar="NAME", help="Only kinds of this component, such as `nvlink`.")
@click.option("--recommended-action", metavar="ACTION", help="Only kinds that recommend this, such as `evict`.")
@click.option("--attributed-to", metavar="WHAT", help="Only kinds attributed to this, such as `gpu`.")
@as_json
@runs("faults.list_kinds")
def faults() -> None:
    """List the kinds of faults, or explain one.

    Without a further command, lists all kinds that match the options.
    """


@command("faults.show_kind", "holdfast faults show gpu-off-bus", group=faults, name="show")
@click.argument("kind")
def show_fault() -> None:
    """Explain one KIND of fault."""


@command("faults.list_unknown", "holdfast faults unknown", "holdfast faults unknown --draft", group=faults, name="unknown")
@click.option("--limit", type=from_one, default=20, show_default=True, metavar="N", help="Most frequent failures to list.")
@click.option("--draft", is_flag=True, help="Write tables for the catalogue, to be completed.")
def unknown_faults() -> None:
    """List failures that the catalogue does not know.

    From the history: what ended workers and matches no kind but `worker-exception`, `worker-exit-code` and the like.
    """


@app.group(
    cls=_OrderedGroup, no_args_is_help=True, epilog=example("holdfast policy show balanced", "holdfast policy explain 2 --job gpt-small")
)
def policy() -> None:
    """Show, check and explain policies."""


@command("policy.show", "holdfast policy show", "holdfast policy show careful.yaml", group=policy, name="show")
@click.argument("policy", required=False, metavar="[NAME|FILE]")
def show_policy() -> None:
    """Show the rules of a policy in their order.

    With every threshold, timeout and recommended action, and what differs from the policy that it is based on. NAME is `patient`,
    `balanced` (the default) or `aggressive`; FILE is a policy file.
    """


@command("policy.check", "holdfast policy check careful.yaml", group=policy, name="check")
@click.argument("files", nargs=-1, required=True, type=file_path, metavar="FILE...")
def check_policy() -> None:
    """Check policy files and show all problems.

    Each problem has its field, its line, the reason and the cure. Exit status 2: a file cannot be used.
    """


@command("policy.explain", "holdfast policy explain 2 --job gpt-small", "holdfast policy explain slow", group=policy, name="explain")
@click.argument("incident")
@incident_job
def explain_incident() -> None:
    """Explain the decisions about an INCIDENT.

    For each attempt: which rule of which policy decided and why, what other rules noted, which were skipped and why, and
    how the attempt ended. INCIDENT is its number within the job, or its id; `slow` shows the decisions about ranks that
    slowed the others down, with the costs of staying and migrating.
    """


@command(
    "support_bundle.support_bundle", "holdfast support-bundle", "holdfast support-bundle gpt-small -o bundle.tar.gz", name="support-bundle"
)
@optional_job
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: a name with the time, in this folder.")
def support_bundle() -> None:
    """Pack diagnostic data for whoever helps.

    Versions, this machine, the history of JOB (default: the newest), ends of logs and journals: a .tar.gz file without tokens,
    keys and passwords. It works where the job or the history is damaged, and shows what is missing.
    """


@command("demo.demo", "holdfast demo", json=False)
@click.option("--json", "json_file", type=file_path, metavar="FILE", help="Write the result there, for programs.")
@click.option("--no-browser", is_flag=True, help="Open no browser at the end.")
def demo() -> None:
    """Train through faults, and show that nothing is lost.

    A small GPT trains twice: once undisturbed, once with a killed rank, a stopped rank and a killed node. Both end with the
    same parameters, bit for bit. It takes at most three minutes on two cores, downloads nothing and leaves no process.
    """
