"""Declare what is under the heading Run."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import Duration, cluster_option, command, file_path, job_argument
from holdfast.cli.parser.launch import LaunchCommand, job_options

job_cluster = cluster_option("the job file's own, or this machine", first=False)


@command(
    "run.run.run",
    "holdfast run --nproc-per-node 8 train.py --lr 1e-3",
    "holdfast run --nnodes 2:4 --spare-nodes 1 --cluster cluster.yaml train.py",
    "holdfast run job.yaml --detach",
    cls=LaunchCommand,
)
@job_options
@job_cluster
@click.option("--detach", is_flag=True, help="Return as soon as the job trains.")
@click.option("--standby", is_flag=True, help="Wait while another controller runs the job, and take over when it dies.")
@click.option(
    "--log-ranks",
    metavar="RANKS",
    help="Ranks whose output is shown here, such as `0,2-3`, `all` or `none`; default: 0, with --json or --detach none.",
)
@click.option(
    "-t", "--tee", metavar="WHERE", help="As torchrun's: `3` shows the output of all ranks, `0:3,1:3` that of local ranks 0 and 1."
)
@click.option("--local-ranks-filter", metavar="RANKS", help="Local ranks whose output is shown here, on every node, such as `0,1`.")
@click.option("--print-job", is_flag=True, help="Print the job file that the options stand for, and run nothing.")
def run() -> None:
    """Run a training job to its end, through faults, and watch it.

    Takes a script, with the options of torchrun that apply, or a job file, whose fields the options replace. Options stand before
    the script; what follows it are the arguments of the script.

    The job does not need this terminal: closing it changes nothing. Ctrl-C requests a stop, a second one stops at once.
    If a job lost its controller, the same command reattaches to it; its workers are not interrupted. With --standby, on another
    host with the same history (HOLDFAST_HISTORY, PostgreSQL), that happens by itself within seconds; it does not restart a job
    that has ended, unless its file has changed.

    The output of rank 0 is shown, each line with its rank; --log-ranks selects others. Output too fast to be read is left out:
    `holdfast logs` has all of it.
    """


@command(
    "run.init.init", "holdfast init --nproc-per-node 8 train.py --lr 1e-3", "holdfast init -o gpt.yaml -m gpt.train", cls=LaunchCommand
)
@job_options
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: that of the script, with the suffix .yaml.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def init() -> None:
    """Write a commented job file for a script.

    The options are those of `holdfast run`; the file says what each field means, and offers the ones that are set most often.
    Nothing is started.
    """


@command(
    "run.validate.validate",
    "holdfast validate job.yaml",
    "holdfast validate job.yaml --cluster cluster.yaml",
    "holdfast validate cluster.yaml",
)
@click.argument("file", type=file_path)
@job_cluster
def validate() -> None:
    """Check a job, cluster or policy file.

    Shows all problems of FILE, each with its field, the reason and the cure. FILE is YAML, or Python that sets `job` or `cluster`.
    Nothing is started. Exit status 2: the file cannot be used.
    """


@command("run.stop.stop", "holdfast stop gpt-small", "holdfast stop gpt-small --timeout 5m")
@job_argument
@click.option("--timeout", type=Duration(zero=True), metavar="DURATION", help="Maximum wait for the end; default: as long as it takes.")
def stop() -> None:
    """Stop a JOB and wait for its end.

    Its workers get SIGTERM, then time to save, then SIGKILL. This also stops a job that lost its controller.
    """


@command("run.detach.detach", "holdfast detach gpt-small")
@job_argument
@click.option(
    "--timeout",
    type=Duration(zero=True),
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="Maximum wait until the controller has detached.",
)
def detach() -> None:
    """Detach the controller of a JOB, which continues.

    No rank is interrupted: a standby controller takes over at once; without one, the same `holdfast run` reattaches. Use it for
    upgrades, or before the controller's host goes down. SIGUSR1 to the controller, or to its `holdfast run`, does the same.
    """
