"""The words of the command line and what they take. Their doing is loaded when they are called: `--help` needs click alone."""
# ruff: noqa: FBT001, PLC0415, PLR0913, PLR0917 (click hands flags over as they are, one argument each; imports stand where they are needed, so that no command pays for another)

from __future__ import annotations

import difflib
import os
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
    """A whole number that a database can hold; the help does not tell which that is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the number; refuse one that is too large."""
        number = super().convert(value, param, ctx)
        if number >= 2**63:
            self.fail(f"{str(number)[:40]} is too large.", param, ctx)
        return number


from_zero, from_one = _Number(min=0), _Number(min=1)


since_option = click.option("--since", metavar="WHEN", help="Only what came after: a date and time, or a duration such as 7d, so long ago.")


class NobodyReads(Exception):
    """Who read our output went away. Not an ``OSError``: click would make an ordinary failure of it."""


class _Words(click.Group):
    """Commands in the order of their use; a mistyped one names the nearest."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the commands as they were declared."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 (click's signature)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise NobodyReads from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that *args* begin with; refuse an unknown one with the nearest."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            ctx.fail(f"No such command '{cut(args[0])}'." + (f" Did you mean '{near[0]}'?" if near else " `holdfast --help` lists them."))
        return super().resolve_command(ctx, args)


def _version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"holdfast {__version__}")
        context.exit()


def _log_format(_context: click.Context, _option: click.Parameter, wanted: str | None) -> None:
    """Have this process, and all that it starts, log so."""
    if wanted is not None:
        os.environ[FORMAT] = wanted
    elif os.environ.get(FORMAT, "text") not in FORMATS:
        raise click.UsageError(f"{FORMAT} is '{os.environ[FORMAT]}'; it must be {' or '.join(FORMATS)}")


def _refuse_unless_picture(output: Path | None) -> None:
    if output is not None and output.suffix.lower() not in {".html", ".png", ".svg"}:
        raise click.BadParameter(f"'{output}' ends in none of .html, .png and .svg. Name one of these.", param_hint="'--output'")


def _moment(since: str | None) -> float | None:
    """Return when *since* was, in seconds since 1970."""
    if since is None:
        return None
    from holdfast.cli.time_arguments import ago_or_at

    found = ago_or_at(since)
    if found is None:
        cure = 'Write a duration such as "7d" or "12h", or a date such as "2026-11-20" or "2026-11-20T14:00".'
        raise click.BadParameter(f"'{since}' is neither a duration nor a date. {cure}", param_hint="'--since'")
    return found


def example(*lines: str) -> str:
    """Return the last words of a command's help: how it is called."""
    return "\b\n" + "\n".join(f"{'Example: ' if number == 0 else '         '}{line}" for number, line in enumerate(lines))


@click.group(
    cls=_Words,
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

    Exit status: 0 fine, 1 the job failed, 2 something to mend (the message says what), 3 the job was stopped,
    4 the flow died and training goes on, 5 the job is saved as its time is over: the same command goes on from there,
    6 the flow has let go of the job, which trains on, 7 the job is suspended and can be resumed, 130 interrupted.
    """


@app.command(epilog=example("holdfast validate job.yaml"))
@click.argument("job_file", type=file_path)
@click.option("--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to check against; default: the job file's own.")
@as_json
def validate(job_file: Path, cluster_file: Path | None, as_json: bool) -> int:
    """Check a job file and tell all that is wrong.

    Each problem is told with its field, the reason and the cure. JOB_FILE is YAML, or Python that sets `job`. Nothing is started.
    """
    from holdfast.cli.commands.validate import validate

    return validate(job_file, cluster_file, as_json=as_json)


@app.command(epilog=example("holdfast run job.yaml", "holdfast run job.yaml --cluster cluster.yaml --detach"))
@click.argument("job_file", type=file_path)
@click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to run on; default: the job file's own, or this machine."
)
@click.option("--detach", is_flag=True, help="Return as soon as the job trains.")
@click.option("--standby", is_flag=True, help="Wait while another flow steers the job, and take over when that dies.")
@click.option(
    "--log-ranks",
    metavar="RANKS",
    help="Ranks whose output is shown here, such as `0,2-3`, `all` or `none`; default: 0, with --json or --detach none.",
)
@as_json
def run(job_file: Path, cluster_file: Path | None, detach: bool, standby: bool, log_ranks: str | None, as_json: bool) -> int:
    """Run a job to its end, whatever its nodes do, and watch it.

    The job does not need this terminal: closing it changes nothing. Ctrl-C asks the job to stop, a second one insists.
    A job that lost its flow is adopted by the same command; its workers go on first_sigterm_ignored. With --standby, given on another
    host with the same history (HOLDFAST_HISTORY, PostgreSQL), that happens by itself within seconds; a job that has ended
    is not begun again by it, unless its file says something else now.

    What rank 0 writes is shown, each line after its rank; --log-ranks asks for others. What comes too fast to be read is left out:
    `holdfast logs` has all of it.
    """
    from holdfast.cli.commands.run import run

    return run(job_file, cluster_file, detach=detach, standby=standby, log_ranks=log_ranks, as_json=as_json)


@app.command(epilog=example("holdfast status", "holdfast status gpt-small --follow"))
@click.argument("job", required=False)
@click.option("--follow", "-f", is_flag=True, help="Watch the job until it ends; Ctrl-C ends the watching only.")
@as_json
def status(job: str | None, follow: bool, as_json: bool) -> int:
    """Show what runs now, or one JOB in detail.

    JOB is a name (its newest run) or an id from `holdfast history`.
    """
    if follow:
        from holdfast.cli.watch import follow as watch

        return watch(job, as_json=as_json)
    from holdfast.cli.commands.status import status

    return status(job, as_json=as_json)


@app.command(epilog=example("holdfast history", "holdfast history gpt-small --json"))
@click.argument("job", required=False)
@click.option("--limit", type=from_one, default=50, show_default=True, metavar="N", help="Newest jobs to list.")
@as_json
def history(job: str | None, limit: int, as_json: bool) -> int:
    """List all jobs, or what befell one JOB."""
    from holdfast.cli.commands import history as past

    return past.history(job, limit=limit, as_json=as_json)


@app.command(epilog=example("holdfast show 2 --job gpt-small"))
@click.argument("incident")
@click.option("--job", metavar="JOB", help="Job of the incident; default: the newest job.")
@as_json
def show(incident: str, job: str | None, as_json: bool) -> int:
    """Show what was seen and decided about an INCIDENT.

    With the reasons, the evidence, and how long each phase took. INCIDENT is its number within the job, or its id.
    """
    from holdfast.cli.commands import history as past

    return past.show(incident, job, as_json=as_json)


@app.command(epilog=example("holdfast report gpt-small -o report.html"))
@click.argument("job", required=False)
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: JOB.html.")
@as_json
def report(job: str | None, output: Path | None, as_json: bool) -> int:
    """Write a page about a JOB: losses, incidents, times.

    One self-contained HTML file about the newest run of JOB (default: the newest job).
    """
    from holdfast.cli.commands.report import report

    return report(job, output, as_json=as_json)


@app.command(epilog=example("holdfast advise gpt-small", "holdfast advise gpt-small --every 500 --every 2000"))
@click.argument("job", required=False)
@click.option(
    "--every",
    type=from_one,
    multiple=True,
    metavar="N",
    help="Show also what a checkpoint every N steps would cost.",
)
@as_json
def advise(job: str | None, every: tuple[int, ...], as_json: bool) -> int:
    """Advise how often a JOB should save.

    From what its saves and steps cost and how often the fleet had faults (Young/Daly), with what other cadences would cost
    and what one fault does. What was never measured is assumed, and said to be. Default: the newest job.
    """
    from holdfast.cli.commands.advise import advise

    return advise(job, every, as_json=as_json)


@app.command(epilog=example("holdfast checkpoints gpt-small", "holdfast checkpoints gpt-small --verify"))
@click.argument("job")
@click.option("--verify", is_flag=True, help="Read every byte, and prove that all of a checkpoint is of one step.")
@as_json
def checkpoints(job: str, verify: bool, as_json: bool) -> int:
    """List all that a JOB could go back to.

    Checkpoints on the disk, and snapshots in the memory of its nodes; and what a recovery would take now. Works while the
    job trains and after its end, and changes nothing. Exit status 1: the newest of a tier is not whole, or --verify found damage.
    """
    from holdfast.cli.commands.checkpoints import checkpoints

    return checkpoints(job, verify=verify, as_json=as_json)


@app.command(epilog=example("holdfast logs gpt-small", "holdfast logs gpt-small --rank 3 --follow"))
@click.argument("job", required=False)
@click.option("--rank", "ranks", type=from_zero, multiple=True, metavar="N", help="Only this rank; may be given several times.")
@click.option("--node", metavar="NODE", help="What lies on this node, of ranks that went elsewhere too.")
@click.option("--lines", "-n", type=from_zero, default=20, show_default=True, help="Last lines of each log.")
@click.option("--follow", "-f", is_flag=True, help="Go on as they grow, until the job ends.")
@as_json
def logs(job: str | None, ranks: tuple[int, ...], node: str | None, lines: int, follow: bool, as_json: bool) -> int:
    """Show what the ranks of a JOB have written, on any node.

    From the nodes themselves, as they are now; default: the newest job. Exit status 1: a node could not be asked.
    """
    from holdfast.cli.commands.logs import LogFilter, logs

    return logs(job, LogFilter(ranks=ranks, node=node), lines=lines, follow=follow, as_json=as_json)


@app.command(epilog=example("holdfast profile gpt-small", "holdfast profile gpt-small -o profile.html"))
@click.argument("job", required=False)
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Draw a picture too; FILE ends in .html, .png or .svg.")
@as_json
def profile(job: str | None, output: Path | None, as_json: bool) -> int:
    """Show where the ranks of a JOB wait in a step.

    The layout that was recognised (pipeline, data, shards), each rank's idle windows, and what snapshots in memory cost:
    how much of the copying is hidden in the windows. From what the ranks told last; default: the newest job.
    """
    _refuse_unless_picture(output)
    from holdfast.cli.commands.profile import profile

    return profile(job, output, as_json=as_json)


@app.command(epilog=example("holdfast cost", "holdfast cost gpt-small --since 7d", "holdfast cost --since 2026-11-01 -o cost.html"))
@click.argument("job", required=False)
@since_option
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Draw it too; FILE ends in .html, .png or .svg.")
@as_json
def cost(job: str | None, since: str | None, output: Path | None, as_json: bool) -> int:
    """Tell what became of the compute that jobs held.

    Hours in steps that count, and lost: by kind of fault, by phase, by node; with ETTR, MTTF and MTTR. Of one JOB (its newest
    run), or of all jobs together. The parts add up to the whole.
    """
    _refuse_unless_picture(output)
    begin = _moment(since)
    from holdfast.cli.commands.cost import cost

    return cost(job, begin, output, as_json=as_json)


@app.command(epilog=example("holdfast replay --policy aggressive", "holdfast replay --policy patient --job gpt-small --since 30d"))
@click.option("--policy", required=True, metavar="POLICY", help="Policy to ask: patient, balanced, aggressive, or a policy file.")
@click.option("--job", metavar="JOB", help="Only incidents of this job; default: of all jobs.")
@since_option
@as_json
def replay(policy: str, job: str | None, since: str | None, as_json: bool) -> int:
    """Ask another policy what it would have done.

    Every recorded decision is made again from what was known then. Shows those that differ, and the compute-hours that the
    others would have won or lost, by what recoveries of that kind took in this history. Nothing is changed.
    """
    begin = _moment(since)
    from holdfast.cli.commands.replay import replay

    return replay(policy, job, begin, as_json=as_json)


@app.command(epilog=example("holdfast metrics", "holdfast metrics --serve 9464", "holdfast metrics --textfile holdfast.prom"))
@click.option("--serve", metavar="[HOST:]PORT", help="Answer Prometheus at /metrics there until Ctrl-C; default HOST: the loopback.")
@click.option("--textfile", type=file_path, metavar="FILE", help="Write FILE as a whole, for node_exporter's textfile collector.")
@as_json
def metrics(serve: str | None, textfile: Path | None, as_json: bool) -> int:
    """Print, serve or write the metrics for Prometheus.

    Jobs and their steps, incidents and downtime, checkpoints, nodes, ETTR: printed once in Prometheus' text format, or served,
    or written to a file. Nothing but the history is read.
    """
    if (serve is not None) + (textfile is not None) + as_json > 1:
        raise click.UsageError("`--serve`, `--textfile` and `--json` exclude each other")
    from holdfast.cli.commands.metrics import metrics

    return metrics(serve, textfile, as_json=as_json)


@app.command(epilog=example("holdfast stop gpt-small"))
@click.argument("job")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait no longer than this for the end; default: as long as it takes."
)
@as_json
def stop(job: str, timeout: float | None, as_json: bool) -> int:
    """Stop a JOB and wait for its end.

    Its workers get SIGTERM, then time to save, then SIGKILL. A job that lost its flow is ended from here.
    """
    from holdfast.cli.commands.stop import stop

    return stop(job, timeout=timeout, as_json=as_json)


@app.command("detach", epilog=example("holdfast detach gpt-small"))
@click.argument("job")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait no longer than this for the flow to let go.",
)
@as_json
def detach(job: str, timeout: float, as_json: bool) -> int:
    """End the flow of a JOB, and not the job.

    The flow lets go of the job, and no rank notices: a standby takes over at once; without one, the same `holdfast run` adopts
    the job. For upgrades, or before the host of the flow goes down. SIGUSR1 to the flow, or to its `holdfast run`, does the same.
    """
    from holdfast.cli.commands.detach import detach

    return detach(job, timeout=timeout, as_json=as_json)


@app.command(epilog=example("holdfast migrate gpt-small --from node-1", "holdfast migrate gpt-small --rank 3 --to node-4"))
@click.argument("job")
@click.option("--from", "source", metavar="NODE", help="Move all ranks of this node, and let the node go.")
@click.option("--rank", type=from_zero, metavar="N", help="Move this rank only.")
@click.option("--to", "target", metavar="NODE", help="Node to move to; default: a spare one, or any that is free.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait no longer than this for the outcome; the move itself goes on."
)
@as_json
def migrate(job: str, source: str | None, rank: int | None, target: str | None, timeout: float | None, as_json: bool) -> int:
    """Move ranks of a JOB to another node while it trains.

    The processes that come are prepared beside training and take over between two steps: nothing restarts, no step is lost.
    The script has to call `holdfast.join`. Waits for the outcome; exit status 1: nothing was moved.
    """
    if (source is None) == (rank is None):
        raise click.UsageError("name what to move: either --from NODE or --rank N")
    from holdfast.cli.commands.migrate import migrate

    return migrate(job, {"from": source, "to": target, "rank": rank}, timeout=timeout, as_json=as_json)


@app.command(epilog=example('holdfast drain node-1 --by 18:00 --reason "new fan"', "holdfast drain node-1 --cancel"))
@click.argument("node")
@click.option("--by", metavar="TIME", help="When the node has to be empty: `18:00`, or a date and a time.")
@click.option("--in", "within", metavar="DURATION", help="The same from now on, such as `20m`.")
@click.option(
    "--reason", default="a planned removal", show_default=True, metavar="TEXT", help="Why: shown to everybody who meets the node."
)
@click.option("--cancel", is_flag=True, help="Take it back: jobs may stay, or be given the node again.")
@click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster of the node; default: the cluster `local` on this machine."
)
@click.option("--job", metavar="JOB", help="The cluster of this job instead.")
@as_json
def drain(
    node: str, by: str | None, within: str | None, reason: str, cancel: bool, cluster_file: Path | None, job: str | None, as_json: bool
) -> int:
    """Have all jobs leave NODE, in time.

    From now on no job is given it. Ranks that are there move to another node while training goes on. Where there is no room
    this is told at once, and shortly before the time what they have is saved, and the job goes on without the node or
    waits. Afterwards the node is held, until `holdfast nodes release`.
    """
    from holdfast.cli.commands.drain import DrainRequest, drain_node

    wish = DrainRequest(node=node, reason=reason, by=by, within=within, cancel=cancel)
    return drain_node(wish, cluster_file, job, as_json=as_json)


class _Nodes(_Words):
    """The group `nodes`: what is none of its words is the file of a cluster whose nodes are to be listed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` in front where no word of the group begins, unless what stands there is such a word mistyped."""
        first = next((word for word in args if not word.startswith("-")), None)
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
def nodes(context: click.Context, as_json: bool) -> None:
    """List nodes, take one out of service, or bring it back.

    `holdfast nodes [CLUSTER_FILE]` lists them.
    """
    context.default_map = {name: {"as_json": as_json} for name in nodes.commands}  # said before the word it means the same


@nodes.command("list", epilog=example("holdfast nodes cluster.yaml", "holdfast nodes cluster.yaml --now"))
@click.argument("cluster_file", type=file_path, required=False)
@click.option("--now", is_flag=True, help="Log in to machines that are reached by SSH, too, and look.")
@as_json
def list_nodes(cluster_file: Path | None, now: bool, as_json: bool) -> int:
    """List the nodes of a cluster.

    Whether jobs may be given them, since when not, by whom, why and until when; their agents, the jobs they run, and what
    was last thought of them. CLUSTER_FILE is YAML, or Python that sets `cluster`; default: the cluster `local` on this
    machine.
    """
    from holdfast.cli.commands.nodes import nodes

    return nodes(cluster_file, now=now, as_json=as_json)


@nodes.command("trust", epilog=example("holdfast nodes trust cluster.yaml"))
@click.argument("cluster_file", type=file_path)
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option("--yes", is_flag=True, help="Trust unknown keys without asking: for machines that nobody else can stand in for.")
@as_json
def trust_nodes(cluster_file: Path, nodes: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Show the keys of machines that are reached by SSH, and trust them.

    Of all nodes of the cluster (or each NODE) and the jump hosts on the way: which keys are known, unknown, changed or
    revoked, with fingerprints. Unknown ones are added to the file of known hosts once you agree; changed ones never are.
    """
    from holdfast.cli.commands.nodes_trust import trust

    return trust(cluster_file, nodes, yes=yes, as_json=as_json)


some_nodes = click.option(
    "--nodes", "only", metavar="A,B", multiple=True, help="Only these: names and ranges, `gpu[001-016],gpu040`. Default: all."
)


@nodes.command(
    "bootstrap", epilog=example("holdfast nodes bootstrap cluster.yaml", "holdfast nodes bootstrap cluster.yaml --nodes gpu-3,gpu-4")
)
@click.argument("cluster_file", type=file_path)
@some_nodes
@click.option("--wheel", type=file_path, metavar="FILE", help="Bring this wheel; default: one that is made of this Holdfast.")
@click.option("--write-wheel", type=file_path, metavar="FILE", help="Write the wheel there too, e.g. for an image of nodes.")
@as_json
def bootstrap_nodes(cluster_file: Path, only: tuple[str, ...], wheel: Path | None, write_wheel: Path | None, as_json: bool) -> int:
    """Put agent and runtime on hosts that are reached by SSH.

    One small wheel without dependencies goes into an environment of the cluster's `python` on each host, in its
    `directory`; torch is the one that is installed for that `python`. What is there already stays as it is, and agents that
    run go on in the version that they were started with.
    """
    from holdfast.cli.commands.nodes_bootstrap import BootstrapRequest, bootstrap

    return bootstrap(cluster_file, BootstrapRequest(only=only, wheel=wheel, write=write_wheel), as_json=as_json)


@nodes.command("check", epilog=example("holdfast nodes check cluster.yaml", "holdfast nodes check cluster.yaml job.yaml --nodes gpu-3"))
@click.argument("cluster_file", type=file_path)
@click.argument("job_file", type=file_path, required=False)
@some_nodes
@as_json
def check_nodes(cluster_file: Path, job_file: Path | None, only: tuple[str, ...], as_json: bool) -> int:
    """Tell what hosts lack before a job can run on them.

    Login, python, Holdfast, torch, GPUs and their driver, clock, disk, memory for snapshots, limits, the interface for
    training, and connections between nodes; with JOB_FILE its files and whether all nodes see its checkpoints. Each with
    its cure. Exit status: 0 all well, 1 something is missing, 3 jobs run and something should be mended.
    """
    from holdfast.cli.commands.nodes_check import inspect

    return inspect(cluster_file, job_file, only, as_json=as_json)


of_cluster = click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster of the node; default: the cluster `local` on this machine."
)
reason = click.option("--reason", required=True, metavar="TEXT", help="Why: it is kept, and shown to everybody who meets the node.")
one_hold = click.option("--number", type=from_one, metavar="N", help="Only if this hold is open; `holdfast nodes` shows numbers.")


@nodes.command("hold", epilog=example('holdfast nodes hold node-1 --reason "new fan" --for 2h'))
@click.argument("node")
@reason
@click.option("--for", "lasts", metavar="DURATION", help="Such as `2h`; then the node waits for a burn-in. Default: until it is released.")
@of_cluster
@as_json
def hold_node(node: str, reason: str, lasts: str | None, cluster_file: Path | None, as_json: bool) -> int:
    """Give NODE to no job until a person releases it.

    No program lifts it. A job that trains on the node goes on there; `holdfast drain` has it leave as well.
    """
    from holdfast.cli.commands.nodes_cordon import CordonRequest, change

    return change("hold", CordonRequest(node=node, reason=reason, lasts=lasts), cluster_file, as_json=as_json)


@nodes.command("release", epilog=example("holdfast nodes release node-1 --reason done"))
@click.argument("node")
@reason
@one_hold
@of_cluster
@as_json
def release_node(node: str, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Lift a person's hold of NODE.

    What programs hold against the node stays: it is quarantined then, until it has passed a burn-in or is readmitted.
    """
    from holdfast.cli.commands.nodes_cordon import CordonRequest, change

    return change("release", CordonRequest(node=node, reason=reason, number=number), cluster_file, as_json=as_json)


@nodes.command("readmit", epilog=example('holdfast nodes readmit node-1 --reason "GPU replaced"'))
@click.argument("node")
@reason
@one_hold
@of_cluster
@as_json
def readmit_node(node: str, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Take NODE back without a burn-in.

    Lifts a quarantine, a doubt or a retirement by your word. A person's hold stays until it is released.
    """
    from holdfast.cli.commands.nodes_cordon import CordonRequest, change

    return change("readmit", CordonRequest(node=node, reason=reason, number=number), cluster_file, as_json=as_json)


@nodes.command("retire", epilog=example('holdfast nodes retire node-1 --reason "fell off the bus again"'))
@click.argument("node")
@reason
@of_cluster
@as_json
def retire_node(node: str, reason: str, cluster_file: Path | None, as_json: bool) -> int:
    """Give NODE up: only `readmit` brings it back."""
    from holdfast.cli.commands.nodes_cordon import CordonRequest, change

    return change("retire", CordonRequest(node=node, reason=reason), cluster_file, as_json=as_json)


@app.command("burn-in", epilog=example("holdfast burn-in node-1", "holdfast burn-in gpu-3 gpu-4 --cluster cluster.yaml --seconds 600"))
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster of the nodes; default: the cluster `local` on this machine."
)
@click.option("--short", is_flag=True, help="A second's work: also where a job trains. Tells what is dead, and lifts no quarantine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=604_800),
    metavar="SECONDS",
    help="How long each node works, the network aside; default: `burn_in.seconds` of the cluster.",
)
@as_json
def burn_in(nodes: tuple[str, ...], cluster_file: Path | None, short: bool, seconds: float | None, as_json: bool) -> int:
    """Try nodes out with real work.

    Arithmetic with known answers on every core and GPU, patterns through memory, a file through the disk, the clock, and bytes
    between pairs of nodes, paired anew where one fails until the bad end is known. At low priority. A quarantined node
    that passes comes back; one that fails stays out. Nodes need python3 and nothing else. Exit status 1: a node did not pass.
    """
    from holdfast.cli.commands.burn_in import burn_in

    return burn_in(nodes, cluster_file, short=short, seconds=seconds, as_json=as_json)


@app.command(epilog=example("holdfast approve", "holdfast approve 3", 'holdfast approve 3 --refuse --reason "only its fan"'))
@click.argument("number", type=from_one, required=False)
@click.option("--refuse", is_flag=True, help="The nodes stay in service.")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Isolate only this one; may be given several times.")
@click.option("--reason", default="", metavar="TEXT", help="Why: it is kept with the answer.")
@as_json
def approve(number: int | None, refuse: bool, nodes: tuple[str, ...], reason: str, as_json: bool) -> int:
    """Answer what programs ask before they isolate nodes.

    They ask before they isolate more of a cluster than its `quarantine.share`, or so many of a job's nodes that it cannot go
    on. Without NUMBER: list what is asked.
    """
    from holdfast.cli.commands.approve import answer, open_questions

    if number is None:
        if refuse or nodes:
            raise click.UsageError("Name the question that is answered; `holdfast approve` lists them.")
        return open_questions(as_json=as_json)
    if refuse and nodes:
        raise click.UsageError("--refuse keeps all nodes: leave out --node, or --refuse.")
    return answer(number, refuse=refuse, nodes=nodes, reason=reason, as_json=as_json)


@app.group(
    cls=_Words,
    epilog=example(
        "holdfast notify add ops https://ops.example.com/hook",
        "holdfast notify add oncall - < address",
        "holdfast notify test ops",
    ),
)
def notify() -> None:
    """Send notifications to persons, one an incident.

    They are sent by the Prefect server that PREFECT_API_URL names, whatever becomes of a controller.
    """


@notify.command(
    "add",
    epilog=example("holdfast notify add ops https://ops.example.com/hook", "holdfast notify add team https://hooks.slack.com/services/..."),
)
@click.argument("name")
@click.argument("address")
@click.option("--all", "everything", is_flag=True, help="Also what needs nobody: recovered incidents, jobs that ended well.")
@click.option(
    "--no-controller-after",
    "lost_after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Alert when no heartbeat of a controller came for so long, 10 at least; 0: never. Default: 80, a minute without one.",
)
@as_json
def add_address(name: str, address: str, everything: bool, lost_after: float | None, as_json: bool) -> int:
    """Send notifications to ADDRESS, under a NAME.

    ADDRESS is a web address that is sent JSON, that of Slack, Teams, Discord, PagerDuty, Opsgenie, Mattermost, Twilio or SendGrid, or
    any that Apprise knows, such as mailto://. `-` reads it from standard input, as it may be a secret. Prefect keeps it in the block
    type that matches. By default it gets what needs a person: an incident that lasts, a question, a failed job, a quarantined or unhealthy
    node, a job without a controller.
    """
    from holdfast.cli.commands.notify import add

    return add(name, address, everything=everything, lost_after=lost_after, as_json=as_json)


@notify.command("list", epilog=example("holdfast notify list"))
@as_json
def list_addresses(as_json: bool) -> int:
    """List where notifications go."""
    from holdfast.cli.commands.notify import addresses

    return addresses(as_json=as_json)


@notify.command("test", epilog=example("holdfast notify test ops"))
@click.argument("name")
@as_json
def test_address(name: str, as_json: bool) -> int:
    """Have the server send one notification to NAME."""
    from holdfast.cli.commands.notify import test

    return test(name, as_json=as_json)


@notify.command("remove", epilog=example("holdfast notify remove ops"))
@click.argument("name")
@as_json
def remove_address(name: str, as_json: bool) -> int:
    """Send nothing to NAME any more, and forget its address."""
    from holdfast.cli.commands.notify import remove

    return remove(name, as_json=as_json)


@app.command(
    epilog=example("holdfast health cluster.yaml", "holdfast health cluster.yaml --json", "holdfast health --local --since before.json")
)
@click.argument("cluster_file", type=file_path, required=False)
@click.option("--local", is_flag=True, help="Look at this machine only, and keep nothing of it.")
@click.option("--since", type=file_path, metavar="FILE", help="With --local: an earlier output of --json; tell what went wrong since.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait no longer than this for any node, and with --local for any part of it.",
)
@as_json
def health(cluster_file: Path | None, local: bool, since: Path | None, deadline: float, as_json: bool) -> int:
    """Tell what is wrong with the nodes of a cluster.

    GPUs and their driver, the kernel's log, network, disks, processors, memory, clock, services; and what could not be seen,
    with the reason. Nodes need python3 and nothing else, and nothing on them is changed. Each is compared with the look
    before, which the history keeps. CLUSTER_FILE is YAML, or Python that sets `cluster`. Exit status 1: a node is not `ok`.
    """
    if local == (cluster_file is not None):
        raise click.UsageError("name what to look at: the file of a cluster, or `--local` for this machine")
    if cluster_file is not None:
        if since is not None:
            raise click.UsageError("`--since` belongs to `--local`: a cluster is compared with what the history keeps of it")
        from holdfast.cli.commands.health_sweep import check_up

        return check_up(cluster_file, deadline=deadline, as_json=as_json)
    from holdfast.cli.commands.health import health

    return health(since, deadline=deadline, as_json=as_json)


@app.command(epilog=example("holdfast classify train.log", "dmesg | holdfast classify - --json"))
@click.argument("log", type=file_path, required=False)
@as_json
def classify(log: Path | None, as_json: bool) -> int:
    """Tell the faults in a LOG from what is harmless.

    LOG is a file, or `-` (the default) for what comes in: kernel, NCCL, torch, scheduler or application, also mixed. Prints
    the faults, and with `--json` one object for each line or traceback: line, verdict, kind, blame, recommended_action, action. Exit
    status 0: the log was read, whatever it holds.
    """
    from holdfast.cli.commands.classify import classify_log

    return classify_log(log, as_json=as_json)


@app.group(
    cls=_Words,
    invoke_without_command=True,
    epilog=example("holdfast faults --area hardware --recommended-action evict", "holdfast faults show gpu-off-bus"),
)
@click.option("--words", metavar="WORDS", help="Only kinds with all these words in their name, title, source or answer.")
@click.option("--area", metavar="AREA", help="Only kinds of hardware, network, storage, host, software or progress.")
@click.option("--component", metavar="NAME", help="Only kinds of this component, such as `nvlink`.")
@click.option("--recommended-action", metavar="ACTION", help="Only kinds with this recommended action, such as `evict`.")
@click.option("--blame", metavar="WHAT", help="Only kinds that speak against this, such as `gpu`.")
@as_json
@click.pass_context
def faults(
    context: click.Context,
    words: str | None,
    area: str | None,
    component: str | None,
    recommended_action: str | None,
    blame: str | None,
    as_json: bool,
) -> int:
    """List the kinds of faults, or explain one.

    Without a further command all kinds are listed that the options leave.
    """
    if context.invoked_subcommand is not None:
        return 0
    from holdfast.cli.commands.faults import FaultFilter, list_kinds

    return list_kinds(
        FaultFilter(words=words, area=area, component=component, recommended_action=recommended_action, blame=blame), as_json=as_json
    )


@faults.command("show", epilog=example("holdfast faults show gpu-off-bus"))
@click.argument("kind")
@as_json
def show_fault(kind: str, as_json: bool) -> int:
    """Explain one KIND of fault."""
    from holdfast.cli.commands.faults import show_kind

    return show_kind(kind, as_json=as_json)


@faults.command("unknown", epilog=example("holdfast faults unknown", "holdfast faults unknown --draft"))
@click.option("--limit", type=from_one, default=20, show_default=True, metavar="N", help="Most frequent failures to list.")
@click.option("--draft", is_flag=True, help="Write tables for the catalogue, to be completed.")
@as_json
def unknown_faults(limit: int, draft: bool, as_json: bool) -> int:
    """List failures that the catalogue does not know.

    Out of the history: what ended workers and matches no kind but `worker-exception`, `worker-exit-code` and the like.
    """
    from holdfast.cli.commands.faults import list_unknown

    return list_unknown(limit=limit, draft=draft, as_json=as_json)


@app.group(cls=_Words, no_args_is_help=True, epilog=example("holdfast policy show balanced", "holdfast policy explain 2 --job gpt-small"))
def policy() -> None:
    """Show, check and explain policies."""


@policy.command("show", epilog=example("holdfast policy show", "holdfast policy show careful.yaml"))
@click.argument("policy", required=False, metavar="[NAME|FILE]")
@as_json
def show_policy(policy: str | None, as_json: bool) -> int:
    """Show the rules of a policy in their order.

    In words, with every threshold, deadline and recommended action, and what differs from its base policy. NAME is `patient`,
    `balanced` (the default) or `aggressive`; FILE is a policy file.
    """
    from holdfast.cli.commands.policy import show

    return show(policy, as_json=as_json)


@policy.command("check", epilog=example("holdfast policy check careful.yaml"))
@click.argument("files", nargs=-1, required=True, type=file_path, metavar="FILE...")
@as_json
def check_policy(files: tuple[Path, ...], as_json: bool) -> int:
    """Check policy files and tell all that is wrong.

    Each problem is told with its field, its line, the reason and the cure. Exit status 2: a file cannot be used.
    """
    from holdfast.cli.commands.policy import check

    return check(files, as_json=as_json)


@policy.command("explain", epilog=example("holdfast policy explain 2 --job gpt-small", "holdfast policy explain slow"))
@click.argument("incident")
@click.option("--job", metavar="JOB", help="Job of the incident; default: the newest job.")
@as_json
def explain_incident(incident: str, job: str | None, as_json: bool) -> int:
    """Explain the decisions about an INCIDENT.

    For each attempt: which rule of which policy answered and why, what other rules noted, which were passed over and why, and
    how the attempt ended. INCIDENT is its number within the job, or its id; `slow` stands for what was decided about ranks that
    held the others up, with what staying and moving cost.
    """
    from holdfast.cli.commands.policy import explain

    return explain(incident, job, as_json=as_json)


@app.command("support-bundle", epilog=example("holdfast support-bundle", "holdfast support-bundle gpt-small -o bundle.tar.gz"))
@click.argument("job", required=False)
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Where to write it; default: a name with the time, here.")
@as_json
def support_bundle(job: str | None, output: Path | None, as_json: bool) -> int:
    """Gather what somebody who helps needs to see.

    Versions, this machine, the history of JOB (default: the newest), ends of logs and journals: a .tar.gz file without tokens,
    keys and passwords. It works where the job or the history is damaged, and says what is missing.
    """
    from holdfast.cli.commands.support_bundle import support_bundle

    return support_bundle(job, output, as_json=as_json)


@app.command(epilog=example("holdfast demo"))
@click.option("--json", "json_file", type=file_path, metavar="FILE", help="Write the result there, for programs.")
@click.option("--no-browser", is_flag=True, help="Open no browser at the end.")
def demo(json_file: Path | None, no_browser: bool) -> int:
    """Train, break it, and see that nothing was lost.

    A small GPT trains twice: once in peace, once with a killed rank, a stopped rank and a killed node. Both end with the
    same parameters, bit for bit. It takes at most three minutes on two cores, downloads nothing and leaves nothing running.
    """
    from holdfast import demo as stage

    result: Any = stage.run_demo(json_file, not no_browser)
    return int(result)
