"""Show a job that is followed: as a live picture on a terminal, as plain lines, or as JSON lines."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cli.changes import JobChange, progress_change
from holdfast.cli.job_view import JobView, ranks_by_node
from holdfast.cli.output import clock, colour_of, finite, hanging, on_terminal, wrapped
from holdfast.cli.rank_output import Line
from holdfast.history.models import Incident
from holdfast.report.wording import NOTHING, count, duration, plural, rank_count, visible

PROGRESS_INTERVAL: Final = 10.0
"""Seconds between two lines about progress."""
WAIT_NOTE_AFTER: Final = 3.0
"""Seconds without a line after which one says what is waited for."""
INDENT: Final = 12
"""Indent of the further lines of a text."""
NOTE_LINES: Final = 2
"""Lines that a note may take on a terminal; `holdfast ps -a` shows all of it."""
STYLES: Final[Mapping[str, str]] = {
    "reattach": "cyan",
    "end": "bold",
    "controller-died": "red",
    "incident": "yellow",
    "incident-closed": "green",
    "notice": "yellow",
    "refused": "red",
    "note": "cyan",
}
"""How a terminal shows each kind of change."""


class Screen(Protocol):
    """What a watched job is shown on."""

    def show_change(self, change: JobChange) -> None:
        """Show a change that is not in the job's history."""
        ...

    def show(self, changes: Sequence[JobChange], view: JobView) -> None:
        """Show what is new and the present view of the job."""
        ...

    def show_output(self, lines: Sequence[Line]) -> None:
        """Show what ranks have written."""
        ...

    def wait(self, text: str) -> None:
        """Show what is waited for, while there is no job to show yet."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


def screen_for(*, as_json: bool, hint: str) -> Screen:
    """Return the screen for the reader: a program, a person at a terminal, or a file."""
    if as_json:
        return JsonScreen()
    return Picture(hint) if on_terminal() else PlainLines()


# -- lines ------------------------------------------------------------------------------------------------------------


class PlainLines:
    """One line for each change, with the time of day; progress at most every ten seconds, and only when there is any."""

    def __init__(self) -> None:
        self._progress_due, self._last_step = 0.0, (-1, -1)
        self._waiting_since = 0.0
        self._shown_once: set[str] = set()

    def show_change(self, change: JobChange) -> None:
        """Write the change, if it has a text."""
        for line in lines_of(change):
            click.echo(line)

    def show_output(self, lines: Sequence[Line]) -> None:
        """Write each line with its rank."""
        for line in lines:
            click.echo(prefixed(line))

    def wait(self, text: str) -> None:
        """Write once what is waited for, when that takes longer."""
        self._waiting_since = self._waiting_since or time.monotonic()
        if time.monotonic() - self._waiting_since > WAIT_NOTE_AFTER:
            self._once("waits", f"{text} so far")

    def show(self, changes: Sequence[JobChange], view: JobView) -> None:
        """Write what is new."""
        for change in changes:
            self.show_change(change)
        step = view.step
        if step is not None and (step.generation, step.step) != self._last_step and time.monotonic() >= self._progress_due:
            self._progress_due, self._last_step = time.monotonic() + PROGRESS_INTERVAL, (step.generation, step.step)
            self.show_change(progress_change(view))
        if view.no_steps:
            self._once("silent", view.no_steps)

    def _once(self, event: str, text: str) -> None:
        if event not in self._shown_once:
            self._shown_once.add(event)
            self.show_change(JobChange(event=event, at=time.time(), text=text, record={"text": text}))

    def close(self) -> None:
        """Do nothing: lines leave the terminal as it was."""


class JsonScreen(PlainLines):
    """One JSON object for each change."""

    def show_change(self, change: JobChange) -> None:
        """Write the change."""
        click.echo(json.dumps(finite(change.as_record()), default=str))

    def show_output(self, lines: Sequence[Line]) -> None:
        """Write each line as an object."""
        for rank, text in lines:
            click.echo(json.dumps({"event": "output", "at": time.time(), "rank": rank, "line": text}))


def lines_of(change: JobChange) -> list[str]:
    """Return the change as lines for people."""
    first, *more = visible(change.text).splitlines() or [""]
    return [f"{clock(change.at)}  {first}", *(f"          {line}" for line in more)] if first else []


def prefixed(line: Line) -> str:
    """Return a line that a rank wrote as a person reads it."""
    rank, text = line
    return f"[rank {rank}] {text}" if rank is not None else f"[holdfast] {text}"


# -- a live picture ---------------------------------------------------------------------------------------------------


class Picture:
    """A live picture at the bottom of the terminal; changes scroll by above it."""

    def __init__(self, hint: str) -> None:
        self._hint, self._notice = hint, ""
        self._console = Console(highlight=False, soft_wrap=False)
        self._size = self._console.size
        self._changes: deque[JobChange] = deque(maxlen=100)
        self._live: Live | None = None
        self._echo_on: Callable[[], None] = lambda: None

    def show_change(self, change: JobChange) -> None:
        """Print the change above the picture; a notice also stays below it."""
        if change.text:
            self._changes.append(change)
            self._print(change)
        if change.event == "notice":
            self._notice = change.text

    def _print(self, change: JobChange) -> None:
        """Print a change, wrapped to the terminal; a note takes at most two lines."""
        width = self._console.size.width
        lines = [part for line in lines_of(change) for part in wrapped(line, width, indent=hanging(line) or INDENT)]
        if change.event == "note" and len(lines) > NOTE_LINES:
            last = lines[NOTE_LINES - 1]
            while cell_len(last) > width - 2:
                last = last.rpartition(" ")[0]
            lines = [*lines[: NOTE_LINES - 1], f"{last} …"]
        self._console.print(Text("\n".join(lines), style=STYLES.get(change.event, "")), soft_wrap=True)

    def show(self, changes: Sequence[JobChange], view: JobView) -> None:
        """Redraw the picture."""
        self._redraw_if_resized()
        for change in changes:
            self.show_change(change)
        self._draw(Frame(view, hint=self._hint, notice=self._notice))

    def show_output(self, lines: Sequence[Line]) -> None:
        """Print the lines above the picture, in their own order."""
        if lines:
            self._console.print(Text("\n".join(map(prefixed, lines))), soft_wrap=True)

    def wait(self, text: str) -> None:
        """Draw what is waited for."""
        self._redraw_if_resized()
        width = self._console.size.width
        self._draw(Text("\n".join([*wrapped(text, width), *footer(self._notice, self._hint, width)]), style="dim", no_wrap=True))

    def _draw(self, frame: RenderableType) -> None:
        if not on_terminal():  # it was closed: rich would draw nothing from now on, without an error
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._live is None:
            self._echo_on = _echo_off()
            self._live = Live(frame, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start(refresh=True)
        else:
            self._live.update(frame, refresh=True)

    def close(self) -> None:
        """Remove the picture and restore the cursor."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._echo_on()

    def _redraw_if_resized(self) -> None:
        """Begin on a cleared screen when the terminal was resized: how it rewrapped its content is unknown."""
        if self._console.size == self._size:
            return
        self._size = self._console.size
        self.close()
        self._console.clear()
        for change in list(self._changes)[-max(1, self._size.height // 4) :]:
            self._print(change)


def _echo_off() -> Callable[[], None]:
    """Keep typed keys (Ctrl-C shows as ``^C``) out of the picture; return the function that restores the echo."""
    number = sys.stdout.fileno()
    try:
        if os.tcgetpgrp(number) != os.getpgrp():
            return lambda: None  # in the background, where changing the terminal would stop us
        before = termios.tcgetattr(number)
        quiet = [*before]
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(number, termios.TCSANOW, quiet)
    except (OSError, termios.error):
        return lambda: None

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be closed
            termios.tcsetattr(number, termios.TCSANOW, before)

    return restore


BLOCKS: Final = "▁▂▃▄▅▆▇█"
WIDE: Final = 100
"""Columns from which there is room for the loss curve."""
MAX_INCIDENTS: Final = 8
OTHER_LINES: Final = 9
"""Lines of the frame without incidents, and an empty one."""
INCIDENT_SHARE: Final = 5
"""One in so many lines of the terminal may show incidents, and one more: the changes need the most."""
REASON_LINES: Final = 2
"""Lines that the reason of a state may take."""
UNREMARKABLE: Final = frozenset({"RUNNING", "COMPLETED"})
"""States that need no reason."""
CLOSING: Final = "the job has ended; its controller ends the remaining processes and completes the history"
MAX_NODES: Final = 16
"""Nodes that are named at most."""
SEPARATOR: Final = " · "
"""Between the parts of the hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of incidents."""

    name: str
    min_width: int
    right: bool = False
    rank: int = 0
    """Columns of a higher rank are left out first; 0: always shown."""


COLUMNS: Final = (
    Column(name="#", min_width=2, right=True),
    Column(name="after", min_width=8, right=True, rank=3),
    Column(name="fault", min_width=12),
    Column(name="on", min_width=10, rank=1),
    Column(name="action", min_width=10),
    Column(name="down", min_width=8, right=True),
    Column(name="lost", min_width=4, right=True, rank=2),
)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw *values* as a row of blocks, newest right; a dot for each that is not a finite number."""
    shown = values[-width:]
    numbers = [value for value in shown if value is not None and math.isfinite(value)]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    size = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((value - low) / size * 8))] if value is not None and math.isfinite(value) else "·" for value in shown)


class Frame:
    """The picture of one `JobView`, sized when it is drawn."""

    def __init__(self, view: JobView, *, hint: str, notice: str = "") -> None:
        self._view, self._hint, self._notice = view, hint, notice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        yield self._panel(width)
        room = min(MAX_INCIDENTS, height // INCIDENT_SHARE + 1, height - OTHER_LINES)
        if self._view.incidents and room > 0:
            yield _incidents(self._view, room, width)
        for line in footer(self._notice, CLOSING if self._view.ended else self._hint, width):
            yield Text(line, style="yellow" if self._notice else "dim", no_wrap=True)

    def _panel(self, width: int) -> RenderableType:
        view = self._view
        colour = colour_of(view.state)
        seconds = int(view.elapsed)
        elapsed = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"  # in a unit that does not change while it is watched
        title = Text.assemble((visible(view.job.name), "bold"), "  ", (view.state, f"bold {colour}"), "  ", elapsed)
        inside = max(1, width - 4)
        body: list[RenderableType] = [self._bar(inside), *self._numbers(inside), _members(view, inside)]
        if view.reason and view.state not in UNREMARKABLE:
            body += [_line(line, "dim") for line in _first_lines(f"because {view.reason}", inside, REASON_LINES)]
        return Panel(Group(*body), title=title, title_align="left", border_style=colour, width=width)

    def _bar(self, width: int) -> RenderableType:
        view = self._view
        step, until = (view.step.step if view.step else 0), view.until
        label = f"step {view.progress}"
        if not until or not view.step:
            return _line(label if view.step else view.no_steps or "no step yet", "bold")
        share = f"{min(1.0, step / until):.1%}"
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=until, completed=min(step, until), width=max(4, width - len(label) - len(share) - 2))
        grid.add_row(Text(label, style="bold"), bar, share)
        return grid

    def _numbers(self, width: int) -> list[Text]:
        """Return the measured numbers, on as many lines as that takes: a cut number is worthless."""
        lines = [""]
        for part in self._measured():
            longer = f"{lines[-1]}   {part}" if lines[-1] else part
            if lines[-1] and cell_len(longer) > width:
                lines.append(part)
            else:
                lines[-1] = longer
        found = [_line(line) if cell_len(line) > width else Text(line, no_wrap=True) for line in lines]
        losses = [step.loss for step in self._view.steps]
        room = width - len(found[-1]) - 3
        if width + 4 >= WIDE and room > 8 and (curve := sparkline(losses, min(32, room))):  # noqa: PLR2004 (a shorter curve shows nothing)
            found[-1].append("   ").append(curve, style="cyan")
        return found

    def _measured(self) -> Iterator[str]:
        view = self._view
        facts = {"loss": view.loss, "": view.speed, "ETA": duration(view.eta)}
        yield from (f"{name} {fact}".strip() for name, fact in facts.items() if fact != NOTHING)
        if saved := view.checkpoint:
            yield f"saved {count(saved.step)}, {duration(max(0.0, view.at - saved.at))} ago"
        memory = view.snapshots
        if memory is not None and memory.step is not None and not view.ended:
            yield f"in memory {count(memory.step)}, {plural(memory.age_steps or 0, 'step')} old"


def footer(notice: str, hint: str, width: int) -> list[str]:
    """Return the lines below the panel: the whole notice, or as much of the hint as fits."""
    if notice:
        return wrapped(" ".join(visible(notice).split()), width)
    parts = visible(hint).split(SEPARATOR)
    while len(parts) > 1 and cell_len(SEPARATOR.join(parts)) > width:
        parts.pop()
    return _first_lines(SEPARATOR.join(parts), width, 1)


def _first_lines(text: str, width: int, most: int) -> list[str]:
    """Return the first lines of *text*, cut between two words where there are more than *most*."""
    lines = wrapped(" ".join(visible(text).split()), width)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while " " in last and cell_len(last) > width - 2:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last} …"]


def _members(view: JobView, width: int) -> Text:
    """Return which node has which ranks: as many nodes by name as fit on the line."""
    if view.generation is None:
        return _line("no workers yet")
    size = rank_count(view.generation.world_size, view.generation.facts)
    for most in range(min(len(view.members), MAX_NODES), -1, -1):
        where = ranks_by_node(view.members, most) if most else plural(len(view.members), "node")
        line = f"generation {view.generation.number}: {size} on {where}"
        if cell_len(line) <= width:
            break
    return _line(line)


def _incidents(view: JobView, room: int, width: int) -> Table:
    """Return the table of the newest incidents; where the terminal is narrow, columns of a high rank are left out."""
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    newest = list(view.incidents)[-(room - 1) :] if room > 1 else []
    rows = [(one, _cells(one, view)) for one in newest]
    shown = list(COLUMNS)
    for column in sorted((one for one in COLUMNS if one.rank), key=lambda one: -one.rank):
        if sum(2 + max([one.min_width, *(cell_len(cells[one.name]) for _, cells in rows)]) for one in shown) > width:
            shown.remove(column)
    for column in shown:
        table.add_column(
            column.name,
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if column.right else 3,
            min_width=column.min_width,
            justify="right" if column.right else "left",
        )
    for one, cells in rows:
        table.add_row(*(cells[column.name] for column in shown), style="" if one.closed_at is not None else "yellow")
    if hidden := len(view.incidents) - len(newest):
        table.caption, table.caption_justify = f"and {hidden} before", "left"
    return table


def _cells(one: Incident, view: JobView) -> dict[str, str]:
    down = one.downtime_s if one.closed_at is not None else max(0.0, view.at - one.fault_at)
    return {
        "#": str(one.number),
        "after": duration(max(0.0, one.fault_at - view.job.at)),
        "fault": visible(one.kind),
        "on": visible(one.target),
        "action": visible(one.action or NOTHING),
        "down": duration(down),
        "lost": NOTHING if one.steps_lost is None else str(one.steps_lost),
    }


def _line(text: str, style: str = "") -> Text:
    return Text(" ".join(visible(text).split()), style=style, no_wrap=True, overflow="ellipsis")
