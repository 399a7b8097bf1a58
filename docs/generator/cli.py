"""The pages of the command line and of its exit codes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from docs.generator.markdown import page, table


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield *command* and all below it, each with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if not command.commands[name].hidden:
                yield from commands(command.commands[name], f"{path} {name}")


def cli_page() -> str:
    """Show the help of every command."""
    from holdfast.cli import app  # noqa: PLC0415 (the other pages do not need it)

    parts = [
        "# Command line\n",
        "Every command has `-h` and `--help`, which are left out below. [Exit codes](exit-codes.md) are the same for all commands.\n",
    ]
    for path, command in commands(app, "holdfast"):
        settings = {**app.context_settings, "terminal_width": 100, "max_content_width": 100}  # as the program itself reads them
        context = click.Context(command, info_name=path, **settings)
        parts += [f"{'#' * min(4, 2 + path.count(' ') // 2)} `{path}`\n", *_sections(command, context)]
    return page(*parts)


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield usage, text, options, subcommands and examples of *command*."""
    yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```\n"
    yield from _text(command.help or "")
    options = [record for one in command.params if (record := one.get_help_record(context)) and "--help" not in one.opts]
    if options:
        yield table(("Option", "Meaning"), *((f"`{name}`", text) for name, text in options))
    if isinstance(command, click.Group):
        children = [(name, command.commands[name]) for name in command.list_commands(context) if not command.commands[name].hidden]
        path = context.command_path
        yield table(
            ("Command", "Meaning"),
            *((f"[`{path} {name}`](#{f'{path} {name}'.replace(' ', '-')})", child.get_short_help_str(200)) for name, child in children),
        )
    yield from _text(command.epilog or "")


def _text(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; what click does not wrap is code."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.strip("\n")
        if lines.startswith("\b"):
            code = inspect.cleandoc(lines[1:].strip("\n"))
            yield f"```text\n{code}\n```\n"
        elif lines:
            yield f"{lines}\n"


def exit_codes_page() -> str:
    """List the exit codes, by code and command."""
    from holdfast.exit_codes import CODES  # noqa: PLC0415 (the other pages do not need it)

    rows = [(f"`{one.code}`", ", ".join(f"`{name}`" for name in one.commands.split(", ")), one.meaning, one.next) for one in CODES]
    return page(
        "# Exit codes\n",
        "The exit code of `holdfast` says how a command ended. Scripts, batch systems and service managers decide by it",
        "whether to start the command again.\n",
        table(("Code", "Commands", "Meaning", "What to do"), *rows),
    )
