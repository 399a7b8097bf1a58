"""Declare what is under the heading Set up."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import SHELLS, Duration, Group, app, command, example, file_path, optional_job


@command("setup.demo.demo", "holdfast demo", "holdfast demo --json -o proof.json")
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Write the result there too, as JSON.")
@click.option("--no-browser", is_flag=True, help="Open no browser at the end.")
def demo() -> None:
    """Train through three faults, and lose nothing.

    A small GPT trains twice: once undisturbed, once with a killed rank, a stopped rank and a killed node. Both end with the
    same parameters, bit for bit. It takes at most three minutes on two cores, downloads nothing and leaves no process.
    """


@app.group(
    cls=Group,
    no_args_is_help=True,
    epilog=example(
        "holdfast admin metrics --serve 9464", "holdfast admin support-bundle gpt-small", 'eval "$(holdfast admin completion bash)"'
    ),
)
def admin() -> None:
    """Set up notifications, export metrics, collect diagnostics."""


@admin.group(
    cls=Group,
    no_args_is_help=True,
    epilog=example(
        "holdfast admin notify add ops https://ops.example.com/hook",
        "holdfast admin notify add oncall - < address",
        "holdfast admin notify test ops",
    ),
)
def notify() -> None:
    """Send notifications to people.

    One for each incident. The Prefect server that PREFECT_API_URL names sends them, whether a controller lives or not.
    """


@command(
    "setup.notify.add",
    "holdfast admin notify add ops https://ops.example.com/hook",
    "holdfast admin notify add team https://hooks.slack.com/services/...",
    group=notify,
    name="add",
)
@click.argument("name")
@click.argument("address")
@click.option("--all", "everything", is_flag=True, help="Also what needs no person: recovered incidents, completed jobs.")
@click.option(
    "--no-controller-after",
    "lost_after",
    type=Duration(zero=True),
    metavar="DURATION",
    help="Alert after this time without a heartbeat of a controller, at least 10s; 0: never. Default: 80s.",
)
def add_address() -> None:
    """Send notifications to ADDRESS, under a NAME.

    ADDRESS is a URL that receives JSON, one of Slack, Teams, Discord, PagerDuty, Opsgenie, Mattermost, Twilio or SendGrid, or
    any that Apprise knows, such as mailto://. `-` reads it from standard input, as it may be a secret. Prefect keeps it in the block
    type that matches. By default it receives what needs a person: a lasting incident, a pending approval, a failed job, a quarantined or
    unhealthy node, a job without a controller.
    """


@command("setup.notify.addresses", "holdfast admin notify ls", group=notify, name="ls")
def list_addresses() -> None:
    """List where notifications go."""


@command("setup.notify.test", "holdfast admin notify test ops", group=notify, name="test")
@click.argument("name")
def test_address() -> None:
    """Have the server send one notification to NAME."""


@command("setup.notify.remove", "holdfast admin notify rm ops", group=notify, name="rm")
@click.argument("name")
def remove_address() -> None:
    """Send nothing more to NAME, and delete its address."""


@command(
    "setup.metrics.metrics",
    "holdfast admin metrics",
    "holdfast admin metrics --serve 9464",
    "holdfast admin metrics --output holdfast.prom",
    group=admin,
    name="metrics",
)
@click.option("--serve", metavar="[HOST:]PORT", help="Serve /metrics for Prometheus there until Ctrl-C; default HOST: the loopback.")
@click.option("--output", "-o", type=file_path, metavar="FILE", help="Write FILE atomically, for node_exporter's textfile collector.")
def metrics() -> None:
    """Print, serve or write metrics for Prometheus.

    Jobs and their steps, incidents and downtime, checkpoints, nodes, ETTR: printed once in Prometheus' text format, served,
    or written to a file. Only the history is read.
    """


@command(
    "setup.support_bundle.support_bundle",
    "holdfast admin support-bundle",
    "holdfast admin support-bundle gpt-small -o bundle.tar.gz",
    group=admin,
    name="support-bundle",
)
@optional_job
@click.option("--output", "-o", type=file_path, metavar="FILE", help="File to write; default: a name with the time, in this folder.")
def support_bundle() -> None:
    """Pack diagnostic data for whoever helps.

    Versions, this machine, the history of JOB (default: the newest), ends of logs and journals: a .tar.gz file without tokens,
    keys and passwords. It works where the job or the history is damaged, and shows what is missing.
    """


@command(
    "setup.completion.completion",
    "holdfast admin completion bash > ~/.local/share/bash-completion/completions/holdfast",
    'eval "$(holdfast admin completion zsh)"',
    "holdfast admin completion fish > ~/.config/fish/completions/holdfast.fish",
    group=admin,
    name="completion",
    json=False,
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion() -> None:
    """Print the completion script of a SHELL.

    It completes commands, options, files, and the names of jobs, nodes, fault kinds and policies. Load it where the shell loads its
    completions, or with `eval` in its start-up file.
    """
