"""The options of `holdfast run` and `holdfast init` that describe a job: torchrun's own, and those of a job file that are set most often.

What stands before the script is for Holdfast, what follows it is the script's, as with torchrun. A job file has no arguments, so options
may follow it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli.parser.base import Command, Seconds, completes, from_zero

JOB_FILES: Final = frozenset({".yaml", ".yml", ".json"})
STARTED_ONCE: Final = "Holdfast starts the ranks on all nodes and connects them: run it once, not on every node, and leave this option out"
KEPT_LOGS: Final = "the output of every rank is kept: `holdfast logs JOB` shows it, and --log-ranks selects what is shown here"
NOT_NEEDED: Final = "Holdfast does without it: leave it out"
REJECTED: Final[Mapping[str, str]] = {
    "--rdzv-backend": STARTED_ONCE,
    "--rdzv-endpoint": STARTED_ONCE,
    "--rdzv-id": f"{STARTED_ONCE}; --name names the job",
    "--rdzv-conf": STARTED_ONCE,
    "--node-rank": STARTED_ONCE,
    "--master-addr": STARTED_ONCE,
    "--master-port": STARTED_ONCE,
    "--local-addr": f"{STARTED_ONCE}; the cluster file has the nodes' addresses",
    "--log-dir": KEPT_LOGS,
    "--redirects": KEPT_LOGS,
    "-r": KEPT_LOGS,
    "--logs-specs": KEPT_LOGS,
    "--duplicate-stdout-filters": f"{KEPT_LOGS}; pipe that through `grep`",
    "--duplicate-stderr-filters": f"{KEPT_LOGS}; pipe that through `grep`",
    "--monitor-interval": f"the end of a worker is noticed at once, nothing is polled. {NOT_NEEDED}",
    "--start-method": f"workers are processes of their own, forked from one that has imported torch. {NOT_NEEDED}",
    "--event-log-handler": "events are in the history: `holdfast status JOB --events` shows them. Leave it out",
    "--role": "a job has one role, `default`. Leave it out",
    "--numa-binding": "Holdfast does not bind ranks to CPUs. Leave it out, or start the script with --no-python and `numactl`",
    "--signals-to-handle": "SIGINT and SIGTERM to `holdfast run` request a stop, which the workers get as SIGTERM. Leave it out",
    "--virtual-local-rank": "each rank sees the GPUs of its node and takes the one of LOCAL_RANK. Leave it out",
}
"""Options of torchrun (2.13) that do not apply, each with the reason."""


def is_job_file(target: str) -> bool:
    """Return whether *target* is the file of a job, not a training script; a Python file is one if it makes a `TrainingJob`."""
    file = Path(target)
    if file.suffix.lower() != ".py":
        return file.suffix.lower() in JOB_FILES
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return "job" in stored and "TrainingJob" in names


class LaunchCommand(Command):
    """A command whose arguments end with a script and those of the script; options may be written with underscores, as torchrun's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the script, or all if it is a job file; refuse options of torchrun that do not apply."""
        options = {name: one for one in self.params if isinstance(one, click.Option) for name in (*one.opts, *one.secondary_opts)}
        before, rest, flags = self._split(ctx, args, options)
        is_script = bool({"-m", "--module", "--no-python"} & flags) or not (rest and is_job_file(rest[0]))
        if not is_script:
            after, more, _ = self._split(ctx, rest[1:], options)
            before, rest = [*before, *after], [rest[0], *more]
        ctx.allow_interspersed_args = False
        return super().parse_args(ctx, [*before, *(["--"] if rest and rest[0] != "--" else []), *rest])

    def _split(
        self, ctx: click.Context, args: list[str], options: Mapping[str, click.Option]
    ) -> tuple[list[str], list[str], frozenset[str]]:
        """Return the options with which *args* begin, with dashes, what follows them, and the names of the options."""
        at, found, flags = 0, [], set[str]()
        while at < len(args) and args[at].startswith("-") and args[at] not in {"-", "--"}:
            written, equals, value = args[at].partition("=")
            name = f"--{written[2:].replace('_', '-')}" if written.startswith("--") else written[:2]
            option = options.get(name)
            if name in REJECTED and option is None:
                ctx.fail(f"torchrun's {written} does not apply: {REJECTED[name]}.")
            found.append(f"{name}{equals}{value}" if written.startswith("--") else args[at])
            flags.add(name)
            at += 1
            takes_value = option is not None and not option.is_flag and not option.count
            attached = bool(equals) if written.startswith("--") else len(args[at - 1]) > 2  # noqa: PLR2004 (a dash and a letter)
            if takes_value and not attached and at < len(args):
                found.append(args[at])
                at += 1
        return found, args[at:], frozenset(flags)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the line of usage."""
        return ["[OPTIONS]", "SCRIPT|JOB_FILE", "[ARGUMENT]..."]


def assignments(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that *given* sets; refuse what sets none."""
    for text in given:
        if text.find("=") < 1:
            raise click.BadParameter(f"'{text[:80]}' sets no variable. Write NAME=VALUE.", context, option)
    return dict(text.split("=", 1) for text in given)


def job_options(declared: Callable[..., None]) -> Callable[..., None]:
    """Declare the target, its arguments, and the options that describe a job."""
    for decorate in reversed(_OPTIONS):
        declared = decorate(declared)
    return declared


SECONDS: Final = Seconds(zero=True)
_OPTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    click.argument("target", type=click.Path(), metavar="SCRIPT|JOB_FILE"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]..."),
    click.option("--nnodes", metavar="N|MIN:MAX", help="Nodes that train; with MIN:MAX the job continues with as few as MIN. Default: 1."),
    click.option("--nproc-per-node", metavar="N", help="Ranks on each node: a number, `auto`, `gpu` or `cpu`. Default: 1."),
    click.option("--max-restarts", type=from_zero, metavar="N", help="Recoveries within an hour before the job fails; default: 20."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, run as `python -m` does."),
    click.option("--no-python", is_flag=True, help="SCRIPT is a program, started directly."),
    click.option("--run-path", is_flag=True, help="No effect: a script always runs in the interpreter that forked it.", hidden=True),
    click.option("--standalone", is_flag=True, help="Use this machine alone, within a Slurm job too."),
    click.option("--shutdown-timeout", type=SECONDS, metavar="SECONDS", help="From SIGTERM to SIGKILL after a stop; default: 10s."),
    click.option("--name", metavar="NAME", help="Name of the job; default: that of the script."),
    click.option("--spare-nodes", type=from_zero, metavar="N", help="Additional nodes that replace lost ones; default: 0."),
    click.option("--hot-spares", metavar="N", help="Warm processes that replace lost ranks; default: `auto`."),
    click.option("--groups", metavar="KIND", help="Process groups: `managed`, `stock` (PyTorch's own) or `auto`; default: `auto`."),
    click.option("--env", multiple=True, callback=assignments, metavar="NAME=VALUE", help="Environment variable of every worker."),
    click.option("--workdir", metavar="FOLDER", help="Working directory of the workers; default: this one."),
    click.option("--python", metavar="FILE", help="Interpreter for the script; default: the one of Holdfast."),
    click.option("--checkpoint-dir", metavar="FOLDER", help="Folder of Holdfast's checkpoints, shared by all nodes."),
    click.option("--policy", metavar="NAME|FILE", shell_complete=completes("policies"), help="Recovery policy; default: `balanced`."),
)  # fmt: skip
