"""What all declarations share: groups with headings and suggestions, types of options, options that several commands have."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from holdfast import __version__
from holdfast.cli.parser.synonyms import OPTIONS, SYNONYMS
from holdfast.errors import cut
from holdfast.log import FORMAT, FORMATS

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
CLUSTER: Final = "HOLDFAST_CLUSTER"
"""Environment variable that names the cluster file where `--cluster` does not."""
HEADINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "Run": ("run", "init", "validate", "stop", "detach"),
    "Watch": ("ps", "status", "logs", "incidents"),
    "Nodes": ("node",),
    "Checkpoints": ("checkpoint",),
    "Analyse": ("report", "cost", "faults", "explain", "policy", "simulate", "plan"),
    "Set up": ("demo", "admin"),
}
"""The top-level commands under the headings of `holdfast --help`."""
_COMMA: Final = re.compile(r",(?![^\[]*\])")
"""A comma between names; those within brackets belong to a range."""
SHELLS: Final = ("bash", "zsh", "fish")
"""Shells for which there is a completion script."""

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


class Duration(click.ParamType[float]):
    """A duration such as ``30s``, ``5m`` or ``7d``, in seconds."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self.zero = zero
        """Whether it may be zero."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the seconds; refuse what is no duration."""
        if isinstance(value, float):
            return value
        from pydantic_core import PydanticCustomError  # noqa: PLC0415 (`--help` needs click alone)

        from holdfast.spec.files.units import DURATION_CURE, parse_duration  # noqa: PLC0415

        try:
            seconds = parse_duration(value).total_seconds()
        except PydanticCustomError:
            seconds = -1.0
        if seconds < 0 or (seconds == 0 and not self.zero):
            self.fail(f"'{cut(str(value))}' is not a duration{'' if self.zero else ' above zero'}. {DURATION_CURE}.", param, ctx)
        return seconds


class Unit(click.ParamType[float]):
    """A size such as ``1.8TB`` in bytes, or a bandwidth such as ``400Gbit/s`` in bytes a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        """`size` or `bandwidth`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the number; refuse what is none, and nothing."""
        if not isinstance(value, str):
            return value
        from pydantic_core import PydanticCustomError  # noqa: PLC0415 (`--help` needs click alone)

        from holdfast.spec.files.units import BANDWIDTH_CURE, SIZE_CURE, parse_bandwidth, parse_size  # noqa: PLC0415

        try:
            found: float = parse_size(value) if self.name == "size" else parse_bandwidth(value)
        except PydanticCustomError:
            found = 0
        if not found:
            self.fail(f"'{cut(value)}' is not a {self.name}. {SIZE_CURE if self.name == 'size' else BANDWIDTH_CURE}.", param, ctx)
        return found


class Seconds(Duration):
    """A duration, or a bare number, which torchrun's options mean as seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the seconds; refuse what is no duration."""
        return super().convert(f"{value}s" if str(value).strip().isdecimal() else value, param, ctx)


class Since(click.ParamType[float]):
    """A past time: a date, or how long ago it is; in seconds since 1970."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the time; refuse what is none."""
        if isinstance(value, float):
            return value
        from holdfast.cli.arguments import past_time  # noqa: PLC0415 (pydantic, which `--help` does not need)

        found = past_time(value)
        if found is None:
            cure = 'Write a duration such as "7d" or "12h", or a date such as "2026-11-20" or "2026-11-20T14:00".'
            self.fail(f"'{cut(str(value))}' is neither a duration nor a date. {cure}", param, ctx)
        return found


class Ranks(click.ParamType[tuple[int, ...]]):
    """Ranks such as ``0``, ``0,2`` or ``0-3``."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 (click's signature)
        """Return the ranks, ascending; refuse what names none."""
        if isinstance(value, tuple):
            return value
        from holdfast.cli.arguments import ranks_of  # noqa: PLC0415 (pydantic, which `--help` does not need)

        found = ranks_of(value)
        if not found:
            self.fail(f"'{cut(str(value))}' names no ranks. Write them as `3`, `0,2` or `0-3`.", param, ctx)
        return tuple(sorted(found))


def all_ranks(_context: click.Context, _option: click.Parameter, given: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the ranks of all occurrences of an option."""
    return tuple(sorted({rank for ranks in given for rank in ranks}))


def node_names(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of nodes with ranges expanded, each once; refuse a bad range, and the file of a cluster."""
    if not given or context.resilient_parsing:
        return ()
    from pydantic_core import PydanticCustomError  # noqa: PLC0415 (`--help` needs click alone)

    from holdfast.spec.files.names import expand_names  # noqa: PLC0415

    found: list[str] = []
    for part in (part.strip() for text in given for part in _COMMA.split(text)):
        if part.lower().endswith((".yaml", ".yml", ".py")):
            raise click.BadParameter(
                f"'{cut(part)}' is a file, not a node. Name the cluster with `--cluster {cut(part)}`.", context, option
            )
        try:
            found += expand_names(part) if part else []
        except PydanticCustomError as error:
            cure = (error.context or {}).get("cure", "")
            raise click.BadParameter(f"{error.message()}. {cure}.", context, option) from error
    return tuple(dict.fromkeys(found))


class OutputClosed(Exception):
    """The reader of our output exited. Not an ``OSError``: click would treat it as an ordinary failure."""


class Group(click.Group):
    """A group that lists its commands as they are declared; for an unknown one it suggests one that exists."""

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
        """Return the command that *args* begin with; refuse an unknown one with the one that is probably meant."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            path = ctx.command_path
            meant = suggestion(path.partition(" ")[2], args[0], self.commands)
            cure = f" Did you mean `holdfast {meant}`?" if meant else f" `{path} --help` lists them."
            ctx.fail(f"No such command '{cut(args[0])}'.{cure}")
        return super().resolve_command(ctx, args)


def suggestion(path: str, given: str, known: Mapping[str, click.Command]) -> str | None:
    """Return the command that *given* below the group *path* probably means: by its meaning elsewhere, or by its spelling."""
    word = given.lower()
    if word in (synonyms := SYNONYMS.get(path, {})):
        return synonyms[word]
    near = difflib.get_close_matches(word, [*known, *synonyms], n=1, cutoff=0.7) or difflib.get_close_matches(word, known, n=1)
    if near:
        return synonyms.get(near[0]) or f"{path} {near[0]}".strip()
    return SYNONYMS[""].get(word)


class Command(click.Command):
    """A command that answers an unknown option with the one of the same meaning, if it has that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse *args*."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = OPTIONS.get(error.option_name)
            if meant is not None and any(meant in one.opts for one in self.params):
                raise click.NoSuchOption(error.option_name, f"{error.message} Did you mean '{meant}'?", ctx=ctx) from None
            raise


class _Root(Group):
    """The program: its commands stand under headings."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the commands in the order of their headings."""
        return [name for names in HEADINGS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """Write the commands under their headings, in one column."""
        width = max(map(len, self.commands))
        for title, names in HEADINGS.items():
            with formatter.section(title):
                texts = [(name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6)) for name in names]
                formatter.write_dl(texts)


class GroupWithDefault(Group):
    """A group whose command `ls` runs where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `ls` where *args* neither begin with a command of the group nor mean one: a job of such a name is given to `ls`."""
        words = [one for one in args if not one.startswith("-")]
        meant = {*self.commands, *SYNONYMS.get(self.name or "", {})}
        completed = ctx.resilient_parsing and not words  # by a shell: it may become a command
        of_group = completed or (not words and bool({"-h", "--help"} & set(args)))
        named = bool(meant & set(words[:1])) or len(words) > 1
        return super().parse_args(ctx, args if named or of_group else ["ls", *args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Return the commands of the group that begin with *incomplete*, and what may follow `ls`."""
        default = self.commands["ls"]
        inner = default.make_context("ls", [], parent=ctx, resilient_parsing=True)
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            more = default.shell_complete(inner, incomplete)
        else:
            arguments = [one for one in default.params if isinstance(one, click.Argument)]
            more = [item for one in arguments for item in one.shell_complete(inner, incomplete)]
        known = {item.value for item in found}
        return [*found, *(item for item in more if item.value not in known)]


def _version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 (click's signature)
    if wanted and not context.resilient_parsing:
        click.echo(f"holdfast {__version__}")
        context.exit()


def _log_format(context: click.Context, _option: click.Parameter, wanted: str | None) -> None:
    """Set the log format of this process and all that it starts."""
    if context.resilient_parsing:
        return
    if wanted is not None:
        os.environ[FORMAT] = wanted
    elif os.environ.get(FORMAT, "text") not in FORMATS:
        raise click.UsageError(f"{FORMAT} is '{os.environ[FORMAT]}'; it must be {' or '.join(FORMATS)}")


def picture_file(context: click.Context, option: click.Parameter, output: Path | None) -> Path | None:
    """Refuse a file that is not of a kind that can be drawn."""
    drawn = context.params.get("profile", True)
    if output is None or output.suffix.lower() in ({".html", ".png", ".svg"} if drawn else {".html", ".htm"}):
        return output
    if not drawn:
        raise click.BadParameter(f"'{output}' does not end in .html, and a report is such a page. Change the suffix.", context, option)
    raise click.BadParameter(f"'{output}' does not end in .html, .png or .svg. Choose one of them.", context, option)


def page_file(context: click.Context, option: click.Parameter, output: Path | None) -> Path | None:
    """Refuse a file that is no page."""
    if output is None or output.suffix.lower() in {".html", ".htm"}:
        return output
    raise click.BadParameter(f"'{output}' does not end in .html. Change the suffix.", context, option)


def command(
    target: str,
    *examples: str,
    group: click.Group | None = None,
    name: str | None = None,
    json: bool = True,
    cls: type[click.Command] = Command,
) -> Callable[[Callable[[], None]], click.Command]:
    """Declare a command with the name and help of the decorated function, *examples*, and the option `--json`.

    It runs *target* (``folder.module.function`` in `holdfast.cli.commands`), which takes its arguments and options by their names and
    returns the exit status.
    """

    def decorate(declared: Callable[[], None]) -> click.Command:
        run = runs(target)(declared)
        if json:
            run.__click_params__ = []  # type: ignore[attr-defined]  # of click's own decorators
            as_json(run)
            run.__click_params__ += getattr(declared, "__click_params__", [])  # type: ignore[attr-defined]
        return (group or app).command(name, cls=cls, epilog=example(*examples))(run)

    return decorate


def runs(target: str) -> Callable[[Callable[[], None]], Callable[..., int]]:
    """Make the function *target* (``folder.module.function`` in `holdfast.cli.commands`) run under the name and help of the decorated one.

    It is imported when it runs, and takes the command's arguments and options by their names.
    """

    def decorate(declared: Callable[[], None]) -> Callable[..., int]:
        @functools.wraps(declared)
        def run(**given: Any) -> int:  # noqa: ANN401 (arguments and options of the command)
            module, _, function = target.rpartition(".")
            status: int = getattr(importlib.import_module(f"holdfast.cli.commands.{module}"), function)(**given)
            return status

        return run

    return decorate


def example(*lines: str) -> str:
    """Return the end of a command's help: how it is called."""
    return "\b\n" + "\n".join(f"{'Example: ' if number == 0 else '         '}{line}" for number, line in enumerate(lines))


def completes(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]:
    """Return the function by which a shell completes names of a *kind* that `holdfast.cli.completion` has."""

    def complete(context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from holdfast.cli import completion  # noqa: PLC0415 (commands that run do not need it)

        return completion.complete(kind, context, incomplete)

    return complete


jobs, some_names = completes("jobs"), completes("nodes")
job_argument = click.argument("job", shell_complete=jobs)
optional_job = click.argument("job", required=False, shell_complete=jobs)
nodes_argument = click.argument("nodes", nargs=-1, required=True, metavar="NODE...", callback=node_names, shell_complete=some_names)
some_nodes = click.argument("nodes", nargs=-1, metavar="[NODE]...", callback=node_names, shell_complete=some_names)


def node_option(meaning: str) -> Callable[[Any], Any]:
    """Declare the option `--node`, which may be given several times and names nodes or ranges of them."""
    return click.option(
        "--node", "nodes", multiple=True, callback=node_names, shell_complete=some_names, metavar="NODE",
        help=f"{meaning}; ranges such as `gpu[1-4]` too.",
    )  # fmt: skip


incident_argument = click.argument("incident", shell_complete=completes("incidents"))
incident_job = click.option("--job", metavar="JOB", shell_complete=jobs, help="Job of the incident; default: the newest job.")
picture = click.option(
    "--output", "-o", type=file_path, metavar="FILE", callback=picture_file, help="Draw a picture too; FILE ends in .html, .png or .svg."
)
since_option = click.option("--since", type=Since(), metavar="WHEN", help="Only what is newer: a duration such as 7d, or a date.")


def cluster_option(default: str, *, first: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--cluster`; *default* says which cluster is meant without it.

    Where it is not *first*, something else may name the cluster, too: the environment variable then stands in only where nothing does, and
    the command gets its file as `default_cluster`.
    """
    text = f"Cluster file; default: {default}."
    return click.option(
        "--cluster",
        "cluster_file",
        type=file_path,
        metavar="FILE",
        envvar=CLUSTER,
        show_envvar=True,
        help=text,
        callback=None if first else apart_from_default,
    )


def apart_from_default(context: click.Context, option: click.Parameter, given: Path | None) -> Path | None:
    """Return the file that the user named now; what the environment names becomes `default_cluster`."""
    assert option.name is not None
    by_environment = context.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
    context.params["default_cluster"] = given if by_environment else None
    return None if by_environment else given


of_cluster = cluster_option("the cluster `local` on this machine")


@click.group(
    cls=_Root,
    context_settings=CONTEXT,
    no_args_is_help=True,
    epilog=example("holdfast demo", "holdfast run job.yaml", "holdfast status")
    + "\n\nExit status: 0 success, 1 failure, 2 an error that you can fix; all are in docs/reference/exit-codes.md.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    expose_value=False,
    is_eager=True,
    callback=_log_format,
    help="How this command, controllers and agents log; default: HOLDFAST_LOG, or text.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit.")
def app() -> None:
    """Keep distributed PyTorch training running through faults."""
