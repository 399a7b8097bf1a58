"""The picture of a running job on a terminal. Drawn anew at each look, to the terminal's present size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cli.commands.status import loss_of, progress_of, rate_of
from holdfast.cli.job_view import JobView, placed
from holdfast.cli.output import colour_of, wrapped
from holdfast.history.models import Incident
from holdfast.report.wording import NOTHING, count, duration, plural, rank_count, visible

BLOCKS: Final = "▁▂▃▄▅▆▇█"
WIDE: Final = 100
"""Columns from which there is room for the curve of the loss."""
MOST_INCIDENTS: Final = 8
AROUND: Final = 9
"""Lines of the frame without incidents, and one that stays free."""
SHARE: Final = 5
"""One line of so many of the terminal may show incidents, and one more: what happens needs the most."""
REASON_LINES: Final = 2
"""Lines that the reason for a state may take."""
CALM: Final = frozenset({"RUNNING", "COMPLETED"})
"""States that need no reason."""
CLOSING: Final = "the job has ended; its flow ends what is left and closes the books"
MOST_NAMED: Final = 16
"""Nodes that are named at most."""
SEPARATOR: Final = " · "
"""Between the parts of the hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of incidents."""

    name: str
    least: int
    right: bool = False
    rank: int = 0
    """The higher the sooner it is left out; 0 is always shown."""


COLUMNS: Final = (
    Column(name="#", least=2, right=True),
    Column(name="after", least=8, right=True, rank=3),
    Column(name="fault", least=12),
    Column(name="on", least=10, rank=1),
    Column(name="answer", least=10),
    Column(name="down", least=8, right=True),
    Column(name="lost", least=4, right=True, rank=2),
)


def spark(values: Sequence[float | None], width: int) -> str:
    """Draw *values* as a row of blocks, newest right; a dot where one is no number."""
    shown = values[-width:]
    whole = [value for value in shown if value is not None and math.isfinite(value)]
    if not whole:
        return ""
    low, high = min(whole), max(whole)
    size = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((value - low) / size * 8))] if value is not None and math.isfinite(value) else "·" for value in shown)


class Frame:
    """The picture of one `JobView`; knows its size when it is drawn."""

    def __init__(self, outlook: JobView, *, hint: str, notice: str = "") -> None:
        self._outlook, self._hint, self._notice = outlook, hint, notice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        yield self._panel(width)
        room = min(MOST_INCIDENTS, height // SHARE + 1, height - AROUND)
        if self._outlook.incidents and room > 0:
            yield _incidents(self._outlook, room, width)
        for line in below(self._notice, CLOSING if self._outlook.ended else self._hint, width):
            yield Text(line, style="yellow" if self._notice else "dim", no_wrap=True)

    def _panel(self, width: int) -> RenderableType:
        outlook = self._outlook
        colour = colour_of(outlook.state)
        title = Text.assemble((visible(outlook.job.name), "bold"), "  ", (outlook.state, f"bold {colour}"), "  ", _passed(outlook.elapsed))
        inside = max(1, width - 4)
        body: list[RenderableType] = [self._bar(inside), *self._numbers(inside), _members(outlook, inside)]
        if outlook.reason and outlook.state not in CALM:
            body += [_line(line, "dim") for line in _short(f"because {outlook.reason}", inside, REASON_LINES)]
        return Panel(Group(*body), title=title, title_align="left", border_style=colour, width=width)

    def _bar(self, width: int) -> RenderableType:
        outlook = self._outlook
        step, until = (outlook.step.step if outlook.step else 0), outlook.until
        label = f"step {progress_of(outlook)}"
        if not until or not outlook.step:
            return _line(label if outlook.step else outlook.no_steps or "no step yet", "bold")
        share = f"{min(1.0, step / until):.1%}"
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=until, completed=min(step, until), width=max(4, width - len(label) - len(share) - 2))
        grid.add_row(Text(label, style="bold"), bar, share)
        return grid

    def _numbers(self, width: int) -> list[Text]:
        """Return what is measured, on as many lines as that takes: a number that is cut is none."""
        lines = [""]
        for part in self._measured():
            longer = f"{lines[-1]}   {part}" if lines[-1] else part
            if lines[-1] and cell_len(longer) > width:
                lines.append(part)
            else:
                lines[-1] = longer
        found = [_line(line) if cell_len(line) > width else Text(line, no_wrap=True) for line in lines]
        losses = [step.loss for step in self._outlook.steps]
        room = width - len(found[-1]) - 3
        if width + 4 >= WIDE and room > 8 and (curve := spark(losses, min(32, room))):  # noqa: PLR2004 (a shorter curve says nothing)
            found[-1].append("   ").append(curve, style="cyan")
        return found

    def _measured(self) -> Iterator[str]:
        outlook = self._outlook
        facts = {"loss": loss_of(outlook), "": rate_of(outlook), "ETA": duration(outlook.eta)}
        yield from (f"{name} {fact}".strip() for name, fact in facts.items() if fact != NOTHING)
        if saved := outlook.checkpoint:
            yield f"saved {count(saved.step)}, {duration(max(0.0, outlook.at - saved.at))} ago"
        memory = outlook.snapshots
        if memory is not None and memory.step is not None and not outlook.ended:
            yield f"in memory {count(memory.step)}, {plural(memory.age_steps or 0, 'step')} old"


def below(notice: str, hint: str, width: int) -> list[str]:
    """Return what stands below the panel: what asks for attention, whole, or as much of the hint as fits."""
    if notice:
        return wrapped(" ".join(visible(notice).split()), width)
    parts = visible(hint).split(SEPARATOR)
    while len(parts) > 1 and cell_len(SEPARATOR.join(parts)) > width:
        parts.pop()
    return _short(SEPARATOR.join(parts), width, 1)


def _short(text: str, width: int, most: int) -> list[str]:
    """Return the first lines of *text*, cut between two words where there are more than *most*."""
    lines = wrapped(" ".join(visible(text).split()), width)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while " " in last and cell_len(last) > width - 2:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last} …"]


def _members(outlook: JobView, width: int) -> Text:
    """Say who holds which ranks: as many nodes by name as fit on the line."""
    if outlook.generation is None:
        return _line("no workers yet")
    size = rank_count(outlook.generation.world_size, outlook.generation.facts)
    for most in range(min(len(outlook.members), MOST_NAMED), -1, -1):
        where = placed(outlook.members, most) if most else plural(len(outlook.members), "node")
        line = f"generation {outlook.generation.number}: {size} on {where}"
        if cell_len(line) <= width:
            break
    return _line(line)


def _incidents(outlook: JobView, room: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    newest = list(outlook.incidents)[-(room - 1) :] if room > 1 else []
    rows = [(one, _cells(one, outlook)) for one in newest]
    shown = _that_fit([cells for _, cells in rows], width)
    for column in shown:
        table.add_column(
            column.name,
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if column.right else 3,
            min_width=column.least,
            justify="right" if column.right else "left",
        )
    for one, cells in rows:
        table.add_row(*(cells[column.name] for column in shown), style="" if one.closed_at is not None else "yellow")
    if hidden := len(outlook.incidents) - len(newest):
        table.caption, table.caption_justify = f"and {hidden} before", "left"
    return table


def _that_fit(rows: Sequence[dict[str, str]], width: int) -> list[Column]:
    """Return the columns for which there is room; where there is little, those that matter least are left out."""
    shown = list(COLUMNS)

    def needed() -> int:
        return sum(2 + max([column.least, *(cell_len(cells[column.name]) for cells in rows)]) for column in shown)

    for column in sorted((one for one in COLUMNS if one.rank), key=lambda one: -one.rank):
        if needed() > width:
            shown.remove(column)
    return shown


def _cells(one: Incident, outlook: JobView) -> dict[str, str]:
    down = one.downtime_s if one.closed_at is not None else max(0.0, outlook.at - one.fault_at)
    return {
        "#": str(one.number),
        "after": duration(max(0.0, one.fault_at - outlook.job.at)),
        "fault": visible(one.kind),
        "on": visible(one.subject),
        "answer": visible(one.action or NOTHING),
        "down": duration(down),
        "lost": NOTHING if one.steps_lost is None else str(one.steps_lost),
    }


def _passed(seconds: float) -> str:
    """Write a time that runs: it must not change its unit while one looks."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _line(text: str, style: str = "") -> Text:
    return Text(" ".join(visible(text).split()), style=style, no_wrap=True, overflow="ellipsis")
