"""Declare what is under the heading Watch."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import (
    GroupWithDefault,
    Ranks,
    Since,
    all_ranks,
    app,
    command,
    example,
    from_one,
    from_zero,
    incident_argument,
    incident_job,
    node_option,
    optional_job,
    since_option,
)


@command("watch.ps.ps", "holdfast ps", "holdfast ps -a --since 7d")
@click.option("--all", "-a", "everything", is_flag=True, help="Also jobs that have ended, newest first.")
@click.option("--limit", type=from_one, default=50, show_default=True, metavar="N", help="With --all: newest jobs to list.")
@since_option
def ps() -> None:
    """List the jobs that run, or all jobs."""


@command("watch.status.status", "holdfast status", "holdfast status gpt-small --follow", "holdfast status gpt-small --events")
@optional_job
@click.option("--follow", "-f", is_flag=True, help="Watch the job until it ends; Ctrl-C ends only the watching.")
@click.option("--events", is_flag=True, help="Show everything that happened to the job, in order.")
def status() -> None:
    """Show the state of a JOB, or its events.

    JOB is a name (its newest run) or an id from `holdfast ps -a`; default: the newest job.
    """


@command(
    "watch.logs.logs", "holdfast logs gpt-small", "holdfast logs gpt-small --rank 0-3 --follow", "holdfast logs gpt-small --since 1h -n 500"
)
@optional_job
@click.option(
    "--rank",
    "ranks",
    type=Ranks(),
    multiple=True,
    callback=all_ranks,
    metavar="RANKS",
    help="Only these ranks, such as `3`, `0,2` or `0-3`.",
)
@node_option("All logs on this node, also of ranks that have left it")
@click.option("--lines", "-n", type=from_zero, default=20, show_default=True, metavar="N", help="Last lines of each log.")
@click.option(
    "--since",
    type=Since(),
    metavar="WHEN",
    help="Only output of processes that ran then or began later: a duration such as 2h, or a date. Lines have no times of their own.",
)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the job ends.")
@click.option("--prefix", is_flag=True, help="Begin each line with its rank and node.")
def logs() -> None:
    """Show what the ranks of a JOB have written.

    Logs are read from the nodes; default: the newest job. Exit status 1: a node could not be read; 2: the job has no
    such rank.
    """


@app.group(
    cls=GroupWithDefault,
    epilog=example("holdfast incidents gpt-small", "holdfast incidents show 2 --job gpt-small"),
    options_metavar="",
    subcommand_metavar="[JOB] | COMMAND [ARGS]...",
)
def incidents() -> None:
    """List the incidents of a job, or show one.

    `holdfast incidents [JOB]` lists them. An incident is a fault, the decisions about it, and the recovery.
    """


@command("watch.incidents.list_incidents", "holdfast incidents gpt-small", "holdfast incidents --json", group=incidents, name="ls")
@optional_job
def list_incidents() -> None:
    """List the incidents of a JOB; this is the default."""


@command("watch.incidents.show", "holdfast incidents show 2 --job gpt-small", group=incidents, name="show")
@incident_argument
@incident_job
def show_incident() -> None:
    """Show the faults and decisions of an INCIDENT.

    With the reasons, the evidence, and the time of each phase. INCIDENT is its number within the job, or its id.
    """
