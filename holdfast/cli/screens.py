"""Where a watcher writes: a live picture, plain lines, or JSON lines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cli.changes import JobChange, of_progress
from holdfast.cli.frame import Frame, below
from holdfast.cli.job_view import JobView
from holdfast.cli.output import clock, finite, hanging, on_terminal, wrapped
from holdfast.cli.rank_output import Line
from holdfast.report.wording import visible

PROGRESS_EVERY: Final = 10.0
"""Seconds between two lines about progress."""

LONG: Final = 3.0
"""Seconds without a word after which a line says what is waited for."""

FURTHER: Final = 12
"""Columns by which the further lines of a text go on to the right."""
NOTE_LINES: Final = 2
"""Lines that a note may take of a terminal; `holdfast history` has all of it."""

STYLES: Final[Mapping[str, str]] = {
    "adopt": "cyan",
    "end": "bold",
    "flow-died": "red",
    "incident": "yellow",
    "incident-closed": "green",
    "notice": "yellow",
    "refused": "red",
    "note": "cyan",
}
"""How a terminal shows what happened."""


class Screen(Protocol):
    """Somewhere a watcher writes."""

    def tell(self, change: JobChange) -> None:
        """Say something that stands outside the job's history."""
        ...

    def show(self, changes: Sequence[JobChange], outlook: JobView) -> None:
        """Show what is new and where the job stands."""
        ...

    def show_output(self, lines: Sequence[Line]) -> None:
        """Show what ranks have written."""
        ...

    def wait(self, text: str) -> None:
        """Show, where there is no job to show yet, what is waited for."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def screen_for(*, as_json: bool, hint: str) -> Screen:
    """Return the screen that suits who reads: a program, a person at a terminal, or a file."""
    if as_json:
        return JsonScreen()
    return Picture(hint) if on_terminal() else PlainLines()


class _Pace:
    """Says when progress is worth a line: the first step at once, then at most every ten seconds, and only when it moved."""

    def __init__(self) -> None:
        self._due, self._last = 0.0, (-1, -1)

    def is_due(self, outlook: JobView) -> bool:
        """Tell whether to write a line about progress now."""
        step = outlook.step
        if step is None or (step.generation, step.step) == self._last or time.monotonic() < self._due:
            return False
        self._due, self._last = time.monotonic() + PROGRESS_EVERY, (step.generation, step.step)
        return True


class PlainLines:
    """One line a change, with the time of day."""

    def __init__(self) -> None:
        self._pace = _Pace()
        self._waits = 0.0
        self._said: set[str] = set()

    def tell(self, change: JobChange) -> None:
        """Write the change, if it has words."""
        for line in lines_of(change):
            click.echo(line)

    def show_output(self, lines: Sequence[Line]) -> None:
        """Write each line after its rank."""
        for line in lines:
            click.echo(prefixed(line))

    def wait(self, text: str) -> None:
        """Write once what is waited for, when that takes longer."""
        self._waits = self._waits or time.monotonic()
        if time.monotonic() - self._waits > LONG:
            self._once("waits", f"{text} so far")

    def show(self, changes: Sequence[JobChange], outlook: JobView) -> None:
        """Write what is new."""
        for change in changes:
            self.tell(change)
        if self._pace.is_due(outlook):
            self.tell(of_progress(outlook))
        if outlook.no_steps:
            self._once("silent", outlook.no_steps)

    def _once(self, event: str, text: str) -> None:
        if event not in self._said:
            self._said.add(event)
            self.tell(JobChange(event=event, at=time.time(), text=text, record={"text": text}))

    def close(self) -> None:
        """Do nothing: there is nothing to mend."""


class JsonScreen(PlainLines):
    """One JSON object a change."""

    def tell(self, change: JobChange) -> None:
        """Write the change."""
        click.echo(json.dumps(finite(change.as_record()), default=str))

    def show_output(self, lines: Sequence[Line]) -> None:
        """Write each line as an object."""
        for rank, text in lines:
            click.echo(json.dumps({"event": "output", "at": time.time(), "rank": rank, "line": text}))


class Picture:
    """A picture that moves at the bottom of the terminal; what happened scrolls away above it."""

    def __init__(self, hint: str) -> None:
        self._hint, self._notice = hint, ""
        self._console = Console(highlight=False, soft_wrap=False)
        self._size = self._console.size
        self._told: deque[JobChange] = deque(maxlen=100)
        self._live: Live | None = None
        self._quiet: Callable[[], None] = lambda: None

    def tell(self, change: JobChange) -> None:
        """Let the change scroll away above the picture; one that asks for attention stays below it."""
        if change.text:
            self._told.append(change)
            self._print(change)
        if change.event == "notice":
            self._notice = change.text

    def _print(self, change: JobChange) -> None:
        """Write a change in lines of the terminal's width: no word is broken, and a note takes no more than two of them."""
        lines = fitted(change, self._console.size.width)
        self._console.print(Text("\n".join(lines), style=STYLES.get(change.event, "")), soft_wrap=True)

    def show(self, changes: Sequence[JobChange], outlook: JobView) -> None:
        """Draw the picture anew."""
        self._follow_the_size()
        for change in changes:
            self.tell(change)
        self._draw(Frame(outlook, hint=self._hint, notice=self._notice))

    def show_output(self, lines: Sequence[Line]) -> None:
        """Let the lines scroll away above the picture, in their own order."""
        if lines:
            self._console.print(Text("\n".join(map(prefixed, lines))), soft_wrap=True)

    def wait(self, text: str) -> None:
        """Draw what is waited for."""
        self._follow_the_size()
        width = self._console.size.width
        self._draw(Text("\n".join([*wrapped(text, width), *below(self._notice, self._hint, width)]), style="dim", no_wrap=True))

    def _draw(self, frame: RenderableType) -> None:
        if not on_terminal():  # it went away: rich would draw nothing from now on, and say nothing
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._live is None:
            self._quiet = _echo_off()
            self._live = Live(frame, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start(refresh=True)
        else:
            self._live.update(frame, refresh=True)

    def close(self) -> None:
        """Take the picture away and give the cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._quiet()

    def _follow_the_size(self) -> None:
        """Begin on a clean screen when the terminal was resized: how it rewrapped what stood there is not knowable."""
        if self._console.size == self._size:
            return
        self._size = self._console.size
        self.close()
        self._console.clear()
        for change in list(self._told)[-max(1, self._size.height // 4) :]:
            self._print(change)


def _echo_off() -> Callable[[], None]:
    """Keep typed keys (Ctrl-C shows as ``^C``) out of the picture; return what brings the echo back."""
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
    return lambda: _bring_back(number, before)


def _bring_back(number: int, before: list[Any]) -> None:
    with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
        termios.tcsetattr(number, termios.TCSANOW, before)


def fitted(change: JobChange, width: int) -> list[str]:
    """Return the change as lines of at most *width* columns; a note that is longer than two of them goes on in the history."""
    lines = [part for line in lines_of(change) for part in wrapped(line, width, indent=hanging(line) or FURTHER)]
    if change.event != "note" or len(lines) <= NOTE_LINES:
        return lines
    last = lines[NOTE_LINES - 1]
    while cell_len(last) > width - 2:
        last = last.rpartition(" ")[0]
    return [*lines[: NOTE_LINES - 1], f"{last} …"]


def prefixed(line: Line) -> str:
    """Return a line that a rank wrote as a person reads it."""
    rank, text = line
    return f"[rank {rank}] {text}" if rank is not None else f"[holdfast] {text}"


def lines_of(change: JobChange) -> list[str]:
    """Return the change as lines for people."""
    first, *more = visible(change.text).splitlines() or [""]
    return [f"{clock(change.at)}  {first}", *(f"          {line}" for line in more)] if first else []
