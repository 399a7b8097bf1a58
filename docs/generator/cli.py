"""The pages of the command line and of its exit codes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

import click

from docs.generator.markdown import anchor, page, table


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield *command* and all below it, each with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if not command.commands[name].hidden:
                yield from commands(command.commands[name], f"{path} {name}")


def cli_page() -> str:
    """Show the help of every command, under the headings of `holdfast --help`."""
    from holdfast.cli.parser import HEADINGS, app  # noqa: PLC0415 (the other pages do not need it)

    parts = [
        "# Command line\n",
        "Every command has `-h` and `--help`, which are left out below. [Exit codes](exit-codes.md) lists what commands end with.\n",
        *_sections(app, _context(app, "holdfast"), tuple(HEADINGS)),
    ]
    for title, names in HEADINGS.items():
        parts.append(f"## {title}\n")
        for path, command in (found for name in names for found in commands(app.commands[name], f"holdfast {name}")):
            parts += [f"###{'#' * (path.count(' ') > 1)} `{path}`\n", *_sections(command, _context(command, path))]
    return page(*parts)


def _context(command: click.Command, path: str) -> click.Context:
    return click.Context(command, info_name=path, terminal_width=100, max_content_width=100)


def _sections(command: click.Command, context: click.Context, headings: Sequence[str] = ()) -> Iterator[str]:
    """Yield usage, text, options, subcommands (of the program: *headings* of the page) and examples of *command*."""
    yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```\n"
    yield from _text(command.help or "")
    options = [record for one in command.params if (record := one.get_help_record(context)) and record[1] and "--help" not in one.opts]
    if options:
        yield table(("Option", "Meaning"), *((f"`{name}`", _marked(" ".join(text.split()))) for name, text in options))
    if headings:
        yield f"Commands: {', '.join(f'[{title}](#{anchor(title)})' for title in headings)}.\n"
    elif isinstance(command, click.Group):
        children = [(name, command.commands[name]) for name in command.list_commands(context) if not command.commands[name].hidden]
        path = context.command_path
        yield table(
            ("Command", "Meaning"),
            *((f"[`{path} {name}`](#{f'{path} {name}'.replace(' ', '-')})", child.get_short_help_str(200)) for name, child in children),
        )
    yield from _text(command.epilog or "")


def _text(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; what click does not wrap is code, without the word in front of examples."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.strip("\n")
        if lines.startswith("\b"):
            code = inspect.cleandoc(re.sub(r"^Example: ", " " * len("Example: "), lines[1:].strip("\n")))
            yield f"```bash\n{code}\n```\n"
        elif lines:
            yield f"{_marked(lines)}\n"


def _marked(text: str) -> str:
    """Return *text* with options as code, and the page of exit codes as a link."""
    text = text.replace("docs/reference/exit-codes.md", "[exit codes](exit-codes.md)")
    return "`".join(
        part if number % 2 else re.sub(r"(?<![\w-])--[a-z][a-z-]*\b", r"`\g<0>`", part) for number, part in enumerate(text.split("`"))
    )


def exit_codes_page() -> str:
    """List the exit codes, by code and command."""
    from holdfast.exit_codes import CODES  # noqa: PLC0415 (the other pages do not need it)

    rows = [(f"`{one.code}`", _named(one.commands), one.meaning, one.next) for one in CODES]
    return page(
        "# Exit codes\n",
        "The exit code of `holdfast` says how a command ended. Scripts, batch systems and service managers decide by it",
        "whether to start the command again.\n",
        table(("Code", "Commands", "Meaning", "What to do"), *rows),
    )


def _named(names: str) -> str:
    return "all" if names == "all" else ", ".join(f"`{name}`" for name in names.split(", "))
