"""Declare what is under the heading Checkpoints."""

from __future__ import annotations

import click

from holdfast.cli.parser.base import Group, app, command, example, from_one, job_argument, optional_job


@app.group(
    cls=Group,
    no_args_is_help=True,
    epilog=example(
        "holdfast checkpoint ls gpt-small", "holdfast checkpoint verify gpt-small", "holdfast checkpoint prune gpt-small --keep 3"
    ),
)
def checkpoint() -> None:
    """List, verify and delete checkpoints."""


@command("checkpoints.inventory.list_checkpoints", "holdfast checkpoint ls gpt-small", group=checkpoint, name="ls")
@optional_job
def list_checkpoints() -> None:
    """List everything that a JOB could resume from.

    Checkpoints on disk, and snapshots in the memory of its nodes; and what a recovery would resume from now. Works while the
    job trains and after its end, and changes nothing. Exit status 1: the newest of a tier is incomplete.
    """


@command("checkpoints.inventory.verify_checkpoints", "holdfast checkpoint verify gpt-small", group=checkpoint, name="verify")
@optional_job
def verify_checkpoints() -> None:
    """Read every byte of a JOB's checkpoints.

    Proves that each checkpoint and snapshot is intact and of a single step; shows what could not be proven. Changes nothing.
    Exit status 1: the newest of a tier is incomplete, or something is damaged.
    """


@command(
    "checkpoints.prune.prune",
    "holdfast checkpoint prune gpt-small --keep 3",
    "holdfast checkpoint prune gpt-small --keep 1 --yes --json",
    group=checkpoint,
    name="prune",
)
@job_argument
@click.option("--keep", type=from_one, required=True, metavar="N", help="Complete checkpoints to keep, the newest ones.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def prune() -> None:
    """Delete old checkpoints of a JOB.

    Keeps the newest N complete ones that training can resume from; the newest of them is read in full before any is deleted. Damaged
    and invalidated ones neither count nor are deleted. Refused while a job that uses the folder starts or recovers, also between two
    deletions. Lists everything, and asks before it deletes.
    """


@command(
    "checkpoints.advise.advise",
    "holdfast checkpoint advise gpt-small",
    "holdfast checkpoint advise gpt-small --interval 500 --interval 2000",
    group=checkpoint,
    name="advise",
)
@optional_job
@click.option(
    "--interval", "every", type=from_one, multiple=True, metavar="N", help="Show also what a checkpoint every N steps would cost."
)
def advise() -> None:
    """Advise how often a JOB should save.

    From the cost of its saves and steps and the rate of faults on all nodes (Young/Daly), with what other intervals and
    one fault would cost. What was never measured is assumed, and marked so. Default: the newest job.
    """
