"""The words of the command line and what they take. Their doing is loaded when they are called: `--help` needs click alone."""
# ruff: noqa: FBT001, PLC0415, PLR0913, PLR0917 (click hands flags over as they are, one argument each; imports stand where they are needed, so that no command pays for another)

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from holdfast import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
file_path = click.Path(path_type=Path)


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
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near[0]}'?" if near else " `holdfast --help` lists them."))
        return super().resolve_command(ctx, args)


def _version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"holdfast {__version__}")
        context.exit()


def example(*lines: str) -> str:
    """Return the last words of a command's help: how it is called."""
    return "\b\n" + "\n".join(f"{'Example: ' if number == 0 else '         '}{line}" for number, line in enumerate(lines))


@click.group(
    cls=_Words,
    context_settings=CONTEXT,
    no_args_is_help=True,
    epilog=example("holdfast demo", "holdfast run job.yaml", "holdfast status"),
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit.")
def app() -> None:
    """Keep distributed PyTorch training running through faults.

    Exit status: 0 fine, 1 the job failed, 2 something to mend (the message says what), 3 the job was stopped,
    4 the flow died and training goes on, 130 interrupted.
    """


@app.command(epilog=example("holdfast validate job.yaml"))
@click.argument("job_file", type=file_path)
@click.option("--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to check against; default: the job file's own.")
@as_json
def validate(job_file: Path, cluster_file: Path | None, as_json: bool) -> int:
    """Check a job file and tell all that is wrong.

    Each problem is told with its field, the reason and the cure. JOB_FILE is YAML, or Python that sets `job`. Nothing is started.
    """
    from holdfast.cli.validating import validate

    return validate(job_file, cluster_file, as_json=as_json)


@app.command(epilog=example("holdfast run job.yaml", "holdfast run job.yaml --cluster cluster.yaml --detach"))
@click.argument("job_file", type=file_path)
@click.option(
    "--cluster", "cluster_file", type=file_path, metavar="FILE", help="Cluster to run on; default: the job file's own, or this machine."
)
@click.option("--detach", is_flag=True, help="Return as soon as the job trains.")
@as_json
def run(job_file: Path, cluster_file: Path | None, detach: bool, as_json: bool) -> int:
    """Run a job to its end, whatever its nodes do, and watch it.

    The job does not need this terminal: closing it changes nothing. Ctrl-C asks the job to stop, a second one insists.
    A job that lost its flow is adopted by the same command; its workers go on undisturbed.
    """
    from holdfast.cli.running import run

    return run(job_file, cluster_file, detach=detach, as_json=as_json)


@app.command(epilog=example("holdfast status", "holdfast status gpt-small --follow"))
@click.argument("job", required=False)
@click.option("--follow", "-f", is_flag=True, help="Watch the job until it ends; Ctrl-C ends the watching only.")
@as_json
def status(job: str | None, follow: bool, as_json: bool) -> int:
    """Show what runs now, or one JOB in detail.

    JOB is a name (its newest run) or an id from `holdfast history`.
    """
    if follow:
        from holdfast.cli.watching import follow as watch

        return watch(job, as_json=as_json)
    from holdfast.cli.status import status

    return status(job, as_json=as_json)


@app.command(epilog=example("holdfast history", "holdfast history gpt-small --json"))
@click.argument("job", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N", help="Newest jobs to list.")
@as_json
def history(job: str | None, limit: int, as_json: bool) -> int:
    """List all jobs, or what befell one JOB."""
    from holdfast.cli import past

    return past.history(job, limit=limit, as_json=as_json)


@app.command(epilog=example("holdfast show 2 --job gpt-small"))
@click.argument("incident")
@click.option("--job", metavar="JOB", help="Job of the incident; default: the newest job.")
@as_json
def show(incident: str, job: str | None, as_json: bool) -> int:
    """Show what was seen and decided about an INCIDENT.

    With the reasons, the evidence, and how long each phase took. INCIDENT is its number within the job, or its id.
    """
    from holdfast.cli import past

    return past.show(incident, job, as_json=as_json)


@app.command(epilog=example("holdfast report gpt-small -o report.html"))
@click.argument("job", required=False)
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: JOB.html.")
@as_json
def report(job: str | None, output: Path | None, as_json: bool) -> int:
    """Write a page about a JOB: losses, incidents, times.

    One self-contained HTML file about the newest run of JOB (default: the newest job).
    """
    from holdfast.cli.reporting import report

    return report(job, output, as_json=as_json)


@app.command(epilog=example("holdfast advise gpt-small", "holdfast advise gpt-small --every 500 --every 2000"))
@click.argument("job", required=False)
@click.option(
    "--every", type=click.IntRange(min=1), multiple=True, metavar="N", help="Show also what a checkpoint every N steps would cost."
)
@as_json
def advise(job: str | None, every: tuple[int, ...], as_json: bool) -> int:
    """Advise how often a JOB should save.

    From what its saves and steps cost and how often the fleet had faults (Young/Daly), with what other cadences would cost
    and what one fault does. What was never measured is assumed, and said to be. Default: the newest job.
    """
    from holdfast.cli.advising import advise

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
    from holdfast.cli.checkpoints import checkpoints

    return checkpoints(job, verify=verify, as_json=as_json)


@app.command(epilog=example("holdfast profile gpt-small", "holdfast profile gpt-small -o profile.html"))
@click.argument("job", required=False)
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Draw a picture too; FILE ends in .html, .png or .svg.")
@as_json
def profile(job: str | None, output: Path | None, as_json: bool) -> int:
    """Show where the ranks of a JOB wait in a step.

    The layout that was recognised (pipeline, data, shards), each rank's idle windows, and what snapshots in memory cost:
    how much of the copying is hidden in the windows. From what the ranks told last; default: the newest job.
    """
    if output is not None and output.suffix.lower() not in {".html", ".png", ".svg"}:
        raise click.BadParameter(f"'{output}' ends in none of .html, .png and .svg. Name one of these.", param_hint="'--output'")
    from holdfast.cli.profiling import profile

    return profile(job, output, as_json=as_json)


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
    from holdfast.cli.stopping import stop

    return stop(job, timeout=timeout, as_json=as_json)


@app.command(epilog=example("holdfast migrate gpt-small --from node-1", "holdfast migrate gpt-small --rank 3 --to node-4"))
@click.argument("job")
@click.option("--from", "source", metavar="NODE", help="Move all ranks of this node, and let the node go.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Move this rank only.")
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
    from holdfast.cli.migrating import migrate

    return migrate(job, {"from": source, "to": target, "rank": rank}, timeout=timeout, as_json=as_json)


@app.command(epilog=example("holdfast nodes cluster.yaml"))
@click.argument("cluster_file", type=file_path, required=False)
@as_json
def nodes(cluster_file: Path | None, as_json: bool) -> int:
    """List the nodes of a cluster.

    With their agents, the jobs they run, and what the history holds against them. CLUSTER_FILE is YAML, or Python that
    sets `cluster`; default: the cluster `local` on this machine.
    """
    from holdfast.cli.nodes import nodes

    return nodes(cluster_file, as_json=as_json)


@app.command(epilog=example("holdfast health --local", "holdfast health --local --since before.json"))
@click.option("--local", is_flag=True, help="Look at this machine.")
@click.option("--since", type=file_path, metavar="FILE", help="An earlier output of --json: tell what went wrong since.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait no longer than this for any part of the node.",
)
@as_json
def health(local: bool, since: Path | None, deadline: float, as_json: bool) -> int:
    """Tell what is wrong with this machine.

    GPUs and their driver, the kernel's log, network, disks, processors, memory, clock, services; and what could not be seen,
    with the reason. Changes nothing. Exit status 1: there is a fault that asks for more than to be recorded.
    """
    if not local:
        raise click.UsageError("name what to look at: `--local` is this machine")
    from holdfast.cli.health import health

    return health(since, deadline=deadline, as_json=as_json)


@app.command(epilog=example("holdfast classify train.log", "dmesg | holdfast classify - --json"))
@click.argument("log", type=file_path, required=False)
@as_json
def classify(log: Path | None, as_json: bool) -> int:
    """Tell the faults in a LOG from what is harmless.

    LOG is a file, or `-` (the default) for what comes in: kernel, NCCL, torch, scheduler or application, also mixed. Prints
    the faults, and with `--json` one object for each line or traceback: line, verdict, kind, blame, level, action. Exit
    status 0: the log was read, whatever it holds.
    """
    from holdfast.cli.classifying import classify_log

    return classify_log(log, as_json=as_json)


@app.group(
    cls=_Words,
    invoke_without_command=True,
    epilog=example("holdfast faults --area hardware --level evict-now", "holdfast faults show gpu-off-bus"),
)
@click.option("--words", metavar="WORDS", help="Only kinds with all these words in their name, title, source or answer.")
@click.option("--area", metavar="AREA", help="Only kinds of hardware, network, storage, host, software or progress.")
@click.option("--component", metavar="NAME", help="Only kinds of this component, such as `nvlink`.")
@click.option("--level", metavar="LEVEL", help="Only kinds that ask for this, such as `evict-now`.")
@click.option("--blame", metavar="WHAT", help="Only kinds that speak against this, such as `gpu`.")
@as_json
@click.pass_context
def faults(
    context: click.Context, words: str | None, area: str | None, component: str | None, level: str | None, blame: str | None, as_json: bool
) -> int:
    """List the kinds of faults, or explain one.

    Without a further command all kinds are listed that the options leave.
    """
    if context.invoked_subcommand is not None:
        return 0
    from holdfast.cli.faults import Wanted, list_kinds

    return list_kinds(Wanted(words=words, area=area, component=component, level=level, blame=blame), as_json=as_json)


@faults.command("show", epilog=example("holdfast faults show gpu-off-bus"))
@click.argument("kind")
@as_json
def show_fault(kind: str, as_json: bool) -> int:
    """Explain one KIND of fault."""
    from holdfast.cli.faults import show_kind

    return show_kind(kind, as_json=as_json)


@faults.command("unknown", epilog=example("holdfast faults unknown", "holdfast faults unknown --draft"))
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Most frequent failures to list.")
@click.option("--draft", is_flag=True, help="Write tables for the catalogue, to be completed.")
@as_json
def unknown_faults(limit: int, draft: bool, as_json: bool) -> int:
    """List failures that the catalogue does not know.

    Out of the history: what ended workers and matches no kind but `worker-exception`, `worker-exit-code` and the like.
    """
    from holdfast.cli.faults import list_unknown

    return list_unknown(limit=limit, draft=draft, as_json=as_json)


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
