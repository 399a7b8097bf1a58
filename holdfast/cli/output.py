"""Write what commands show: aligned plain lines into a pipe, colour on a terminal, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import click

from holdfast.log import line as as_logged
from holdfast.report.text.wording import visible

COLOURS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RUNNING", "COMPLETED", "healthy", "complete", "up", "installed", "repaired", "kept"), "green"),
    **dict.fromkeys(("partial", "suspect", "in-burn-in", "degraded"), "yellow"),
    **dict.fromkeys(("CANCELLED", "cordoned", "unknown"), "magenta"),
    **dict.fromkeys(
        (
            "FAILED",
            "torn",
            "corrupt",
            "damaged",
            "quarantined",
            "decommissioned",
            "lost",
            "excluded",
            "off",
            "unhealthy",
            "missing",
            "failed",
        ),
        "red",
    ),
    "unreachable": "red",
}
"""Colour of a state or status; any other state in capitals is one of a recovery."""
GLUE: Final = "\N{NO-BREAK SPACE}"
UNIT: Final = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|d|[kMGT]?B|steps?|ranks?|nodes?)\b)")
"""Between a number and its unit."""
MIN_COLUMN: Final = 24
"""Columns that a wrapped cell has at least, however narrow the terminal."""
WIDTH: Final = 80
"""Columns of wrapped text."""
_TIME: Final = re.compile(r"(?:[!= ] )?(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d {2}")


def colour_of(status: str) -> str:
    """Return the colour of a state or status."""
    return COLOURS.get(status, "yellow" if status.isupper() else "white")


def on_terminal() -> bool:
    """Return whether our output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def echo(text: str = "") -> None:
    """Write one line for a person; control characters in it cannot steer the terminal."""
    click.echo(visible(text))


def echo_styled(text: str, style: str) -> None:
    """Write one line for a person: dim, or in the colour *style*; on a terminal it is wrapped, with a hanging indent below the time."""
    shown = visible(text)
    lines = wrapped(shown, _columns(), indent=hanging(shown)) if on_terminal() else [shown]
    look: dict[str, Any] = {"dim": True} if style == "dim" else {"fg": style or None}
    for line in lines:
        click.echo(click.style(line, **look) if style else line)


def echo_wrapped(text: str, indent: str = "", *, hanging: str = "", width: int = WIDTH) -> None:
    """Write a paragraph in lines of at most *width* columns; names of nodes and files stay in one piece."""
    for line in textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + hanging, break_long_words=False, break_on_hyphens=False
    ):
        echo(line)


def heading(text: str) -> None:
    """Write a line that stands out."""
    click.echo(click.style(visible(text), bold=True))


def section(title: str) -> None:
    """Write an empty line and a heading."""
    echo()
    heading(title)


def hint(text: str) -> None:
    """Write a line that is not part of the result: to stderr."""
    click.echo(as_logged("hint", visible(text)), err=True)


def echo_json(value: object, *, indent: int | None = 2) -> None:
    """Write *value* as JSON that any program reads: what JSON cannot hold (NaN) becomes null."""
    click.echo(json.dumps(finite(value), indent=indent, ensure_ascii=True, default=str))


def confirmed(question: str, *, as_json: bool, before: str = "") -> bool | None:
    """Return the answer to a *question*, with *before* above it; the default is no. Return None where there is no terminal to ask on."""
    if as_json or not sys.stdin.isatty():
        return None
    if before:
        echo()
        echo(before)
    return click.confirm(question, default=False)


def finite(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return *value* with null for each number that is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def clock(at: float) -> str:
    """Return the local time of day of *at* (seconds since 1970); with the date when it was not today."""
    then = time.localtime(at)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def echo_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Write a name and a value on each line, names in one column; further lines of a value are below its first."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        first, *more = visible(value).splitlines() or [""]
        click.echo(f"  {click.style(name.ljust(width), bold=True)}  {first}")
        for line in more:
            click.echo(f"  {' ' * width}  {line}")


def echo_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, coloured: int | None = None, last: Literal["cut", "wrapped"] = "cut"
) -> None:
    """Write *rows* in columns: nothing is cut in a pipe; on a terminal the last column is cut at its edge.

    The cells of column number *coloured* are states, and coloured as such. With *last* ``wrapped`` the last column is never cut: it is
    wrapped at the edge of the terminal, and each of its lines is a line of the table.
    """
    room = _columns() if on_terminal() else None
    cells = [list(head), *([" ".join(visible(cell).split()) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for number, row in enumerate(cells):
        more: list[str] = []
        if number and last == "wrapped":
            row[-1], *more = _wrapped_cell(rows[number - 1][-1], sum(widths[:-1]) + 2 * (len(widths) - 1), room)
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        _echo_row(padded, room, is_head=number == 0, coloured=coloured)
        for line in more:
            click.echo(line)


def _wrapped_cell(cell: str, before: int, room: int | None) -> list[str]:
    """Return the lines of *cell*, all but the first indented by the *before* columns on its left."""
    lines = [" ".join(line.split()) for line in visible(cell).splitlines()] or [""]
    if room is not None:
        width = max(MIN_COLUMN, room - before)
        lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) or [""]]
    return [lines[0], *(" " * before + line for line in lines[1:])]


def _echo_row(padded: list[str], room: int | None, *, is_head: bool, coloured: int | None) -> None:
    line = "  ".join(padded).rstrip()
    if room is not None and len(line) > room:
        line = line[: room - 1] + "…"
    if is_head:
        line = click.style(line, bold=True)
    elif coloured is not None:
        status = padded[coloured].strip()
        before = len("  ".join([*padded[:coloured], ""])) if coloured else 0
        if before + len(status) <= len(line):
            line = line[:before] + click.style(status, fg=colour_of(status)) + line[before + len(status) :]
    click.echo(line)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def hanging(text: str) -> int:
    """Return the indent of the further lines of *text*: the width of the time of day that it begins with, or 0."""
    found = _TIME.match(text)
    return found.end() if found else 0


def wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return *text* in lines of at most *width* columns, broken between words; a longer path is broken after one of its `/`."""
    from rich.cells import cell_len  # noqa: PLC0415 (most commands wrap nothing)

    indent = min(indent, width // 3)
    lines, line = list[str](), ""
    for number, word in enumerate(text.split(" ")):
        joined = f"{line} {word}" if number else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line.strip():
            lines.append(line.rstrip())
            line = " " * indent
        *full, rest = _parts(word, max(1, width - indent))
        for part in full:
            lines.append(line + part)
            line = " " * indent
        line += rest
    return [*lines, line.rstrip()]


def first_lines(text: str, width: int, most: int, *, indent: int = 0) -> list[str]:
    """Return the first lines of *text*, cut between two words where there are more than *most*; a number stays with its unit."""
    from rich.cells import cell_len  # noqa: PLC0415 (as above)

    lines = [line.replace(GLUE, " ") for line in wrapped(UNIT.sub(GLUE, text), width, indent=indent)]
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while " " in last and cell_len(last) > width - 2:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last.rstrip()} …" if cell_len(last) <= width - 2 else f"{last[: max(0, width - 1)]}…"]


def _parts(word: str, room: int) -> list[str]:
    """Cut a word that is longer than *room*: after the last `/` that fits, or at the end of the line."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415

    parts, rest = list[str](), word
    while cell_len(rest) > room:
        head = set_cell_size(rest, room).rstrip() or rest[0]
        cut = head.rfind("/") + 1 or len(head)
        parts.append(rest[:cut])
        rest = rest[cut:]
    return [*parts, rest]
