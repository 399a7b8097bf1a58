"""The picture of a running job on a terminal. Drawn anew at each look, to the terminal's present size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cli.outlook import Outlook, placed
from holdfast.cli.output import colour_of
from holdfast.cli.status import loss_of, progress_of, rate_of
from holdfast.history.models import Incident
from holdfast.report.wording import NOTHING, count, duration, in_ranks, plural, visible

BLOCKS: Final = "▁▂▃▄▅▆▇█"
WIDE: Final = 100
"""Columns from which there is room for the curve of the loss."""
MOST_INCIDENTS: Final = 8
AROUND: Final = 9
"""Lines of the frame without incidents, and one that stays free."""
CLOSING: Final = "the job has ended; its flow ends what is left and closes the books"
NARROW: Final = 72
"""Columns below which the table of incidents shows only what matters most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of incidents."""

    name: str
    least: int
    right: bool = False
    matters: bool = True


COLUMNS: Final = (
    Column(name="#", least=2, right=True),
    Column(name="after", least=8, right=True, matters=False),
    Column(name="fault", least=12),
    Column(name="on", least=10, matters=False),
    Column(name="answer", least=10),
    Column(name="down", least=8, right=True),
    Column(name="lost", least=4, right=True, matters=False),
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
    """The picture of one `Outlook`; knows its size when it is drawn."""

    def __init__(self, outlook: Outlook, *, hint: str, notice: str = "") -> None:
        self._outlook, self._hint, self._notice = outlook, hint, notice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        yield self._panel(width)
        room = min(MOST_INCIDENTS, height - AROUND)
        if self._outlook.incidents and room > 0:
            yield _incidents(self._outlook, room, width)
        if self._notice:
            yield _line(self._notice, "yellow")
        yield _line(CLOSING if self._outlook.ended else self._hint, "dim")

    def _panel(self, width: int) -> RenderableType:
        outlook = self._outlook
        colour = colour_of(outlook.state)
        title = Text.assemble((visible(outlook.job.name), "bold"), "  ", (outlook.state, f"bold {colour}"), "  ", _passed(outlook.elapsed))
        body: list[RenderableType] = [self._bar(width - 4), self._numbers(width), _members(outlook)]
        body.append(_line(f"because {outlook.because}" if outlook.because else "", "dim"))
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

    def _numbers(self, width: int) -> RenderableType:
        outlook = self._outlook
        facts = {"loss": loss_of(outlook), "": rate_of(outlook), "ETA": duration(outlook.eta)}
        parts = [f"{name} {fact}".strip() for name, fact in facts.items() if fact != NOTHING]
        if saved := outlook.checkpoint:
            parts.append(f"saved {count(saved.step)}, {duration(max(0.0, outlook.at - saved.at))} ago")
        memory = outlook.snapshots
        if memory is not None and memory.step is not None and not outlook.ended:
            parts.append(f"in memory {count(memory.step)}, {plural(memory.age_steps or 0, 'step')} old")
        text = Text("   ".join(parts), no_wrap=True, overflow="ellipsis")
        losses = [step.loss for step in outlook.steps]
        room = width - 4 - len(text) - 3
        if width >= WIDE and room > 8 and (curve := spark(losses, min(32, room))):  # noqa: PLR2004 (a shorter curve says nothing)
            text.append("   ").append(curve, style="cyan")
        return text


def _members(outlook: Outlook) -> Text:
    if outlook.generation is None:
        return _line("no workers yet")
    size = in_ranks(outlook.generation.world_size, outlook.generation.facts)
    return _line(f"generation {outlook.generation.number}: {size} on {placed(outlook.members)}")


def _incidents(outlook: Outlook, room: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    shown = COLUMNS if width >= NARROW else [column for column in COLUMNS if column.matters]
    for column in shown:
        table.add_column(
            column.name,
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if column.right else 3,
            min_width=column.least,
            justify="right" if column.right else "left",
        )
    newest = list(outlook.incidents)[-(room - 1) :] if room > 1 else []
    for one in newest:
        cells = _cells(one, outlook)
        table.add_row(*(cells[column.name] for column in shown), style="" if one.closed_at is not None else "yellow")
    if hidden := len(outlook.incidents) - len(newest):
        table.caption, table.caption_justify = f"and {hidden} before", "left"
    return table


def _cells(one: Incident, outlook: Outlook) -> dict[str, str]:
    down = one.downtime_s if one.closed_at is not None else max(0.0, outlook.at - one.fault_at)
    return {
        "#": str(one.number),
        "after": duration(max(0.0, one.fault_at - outlook.job.at)),
        "fault": visible(one.kind),
        "on": visible(one.subject),
        "answer": visible(one.rung or NOTHING),
        "down": duration(down),
        "lost": NOTHING if one.steps_lost is None else str(one.steps_lost),
    }


def _passed(seconds: float) -> str:
    """Write a time that runs: it must not change its unit while one looks."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _line(text: str, style: str = "") -> Text:
    return Text(" ".join(visible(text).split()), style=style, no_wrap=True, overflow="ellipsis")
