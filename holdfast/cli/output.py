"""How commands speak: aligned plain lines when piped, colour on a terminal, JSON for programs."""

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
from holdfast.report.wording import visible

COLOURS: Final[Mapping[str, str]] = {
    "RUNNING": "green",
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
    "healthy": "green",
    "whole": "green",
    "partial": "yellow",
    "torn": "red",
    "corrupt": "red",
    "damaged": "red",
    "up": "green",
    "suspect": "yellow",
    "quarantined": "red",
    "in-burn-in": "yellow",
    "held": "magenta",
    "retired": "red",
    "lost": "red",
    "excluded": "red",
    "off": "red",
    "ok": "green",
    "degraded": "yellow",
    "unhealthy": "red",
    "missing": "red",
    "failed": "red",
    "installed": "green",
    "mended": "green",
    "kept": "green",
    "unreachable": "red",
    "unknown": "magenta",
}
"""Colour of a state or standing; any other state means that something is being mended."""


_TIME: Final = re.compile(r"(?:[!= ] )?(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d {2}")
LEAST: Final = 24
"""Columns that a folded cell has at least, however narrow the terminal."""


def colour_of(word: str) -> str:
    """Return the colour of a state or standing."""
    return COLOURS.get(word, "yellow" if word.isupper() else "white")


def on_terminal() -> bool:
    """Tell whether a person looks at our output, on a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def say(text: str = "") -> None:
    """Write one line for a person; what strangers put into it cannot steer the terminal."""
    click.echo(visible(text))


def say_styled(text: str, style: str) -> None:
    """Write one line for a person: dim, or in the colour *style*; on a terminal it goes on below the time, and no word is broken."""
    shown = visible(text)
    lines = wrapped(shown, _columns(), indent=hanging(shown)) if on_terminal() else [shown]
    look: dict[str, Any] = {"dim": True} if style == "dim" else {"fg": style or None}
    for line in lines:
        click.echo(click.style(line, **look) if style else line)


def hanging(text: str) -> int:
    """Return how far a line that begins with a time of day goes on to the right below it."""
    found = _TIME.match(text)
    return found.end() if found else 0


def wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return *text* in lines of at most *width* columns, broken between words; a path that is longer than a line after one of its `/`."""
    from rich.cells import cell_len  # noqa: PLC0415 (commands that wrap nothing need not wait for it)

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
        *whole, rest = _pieces(word, max(1, width - indent))
        for piece in whole:
            lines.append(line + piece)
            line = " " * indent
        line += rest
    return [*lines, line.rstrip()]


def _pieces(word: str, room: int) -> list[str]:
    """Cut a word that is longer than *room*: after the last `/` that fits, or where there is none wherever the line ends."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415

    pieces, rest = list[str](), word
    while cell_len(rest) > room:
        head = set_cell_size(rest, room).rstrip() or rest[0]
        cut = head.rfind("/") + 1 or len(head)
        pieces.append(rest[:cut])
        rest = rest[cut:]
    return [*pieces, rest]


def hint(text: str) -> None:
    """Write a line that is no result: to stderr."""
    click.echo(as_logged("hint", visible(text)), err=True)


def say_json(value: object, *, indent: int | None = 2) -> None:
    """Write *value* as JSON that any program reads: what JSON cannot hold (NaN) becomes null."""
    click.echo(json.dumps(finite(value), indent=indent, ensure_ascii=True, default=str))


def finite(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return *value* with null for each number that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def clock(at: float) -> str:
    """Return the local time of day; with the date when it was not today."""
    then = time.localtime(at)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def say_rows(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, coloured: int | None = None, last: Literal["cut", "folded"] = "cut"
) -> None:
    """Write *rows* in columns: nothing is cut when piped; on a terminal the last column is cut at its edge.

    The words of column number *coloured* are states, and coloured as such. With *last* ``folded`` the last column is never cut: each of its
    lines has a line, and what is too long for the terminal goes on below.
    """
    room = _columns() if on_terminal() else None
    cells = [list(head), *([" ".join(visible(cell).split()) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for number, row in enumerate(cells):
        more: list[str] = []
        if number and last == "folded":
            row[-1], *more = _folded(rows[number - 1][-1], sum(widths[:-1]) + 2 * (len(widths) - 1), room)
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        _say_row(padded, room, is_head=number == 0, coloured=coloured)
        for line in more:
            click.echo(line)


def _folded(cell: str, before: int, room: int | None) -> list[str]:
    """Return the lines of *cell* below each other, *before* columns from the left but for the first."""
    width = max(LEAST, room - before) if room is not None else None
    lines = [" ".join(line.split()) for line in visible(cell).splitlines()] or [""]
    if width is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) or [""]]
    return [lines[0], *(" " * before + line for line in lines[1:])]


def say_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Write name and value a line, names in one column; further lines of a value stand below its first."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        first, *more = visible(value).splitlines() or [""]
        click.echo(f"  {click.style(name.ljust(width), bold=True)}  {first}")
        for line in more:
            click.echo(f"  {' ' * width}  {line}")


def heading(text: str) -> None:
    """Write a line that stands out."""
    click.echo(click.style(visible(text), bold=True))


def _say_row(padded: list[str], room: int | None, *, is_head: bool, coloured: int | None) -> None:
    line = "  ".join(padded).rstrip()
    if room is not None and len(line) > room:
        line = line[: room - 1] + "…"
    if is_head:
        line = click.style(line, bold=True)
    elif coloured is not None:
        word = padded[coloured].strip()
        before = len("  ".join([*padded[:coloured], ""])) if coloured else 0
        if before + len(word) <= len(line):
            line = line[:before] + click.style(word, fg=colour_of(word)) + line[before + len(word) :]
    click.echo(line)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
