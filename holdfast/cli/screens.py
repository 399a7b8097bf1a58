"""Show a job that is followed: as a live picture on a terminal, as plain lines, or as JSON lines."""

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
from typing import Final, Protocol

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cli.changes import JobChange, progress_change, recovery_change
from holdfast.cli.frame import Frame, footer, max_events
from holdfast.cli.job_view import JobView
from holdfast.cli.output import clock, finite, first_lines, hanging, on_terminal, wrapped
from holdfast.cli.rank_output import Line
from holdfast.report.text.wording import visible

PROGRESS_INTERVAL: Final = 10.0
"""Seconds between two lines about progress."""
SPINNER: Final = "⠋⠙⠸⠴⠦⠇"
SPINNER_SECONDS: Final = 0.2
"""Seconds between two of its pictures, as many as between two polls."""
WAIT_NOTE_AFTER: Final = 3.0
"""Seconds without a line after which one says what is waited for."""
INDENT: Final = 12
"""Indent of the further lines of a text."""
NOTE_LINES: Final = 2
"""Lines that a note may take on a terminal; `holdfast status --events` shows all of it."""
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

    def wait(self, what: str, seconds: float) -> None:
        """Show what is waited for, and for how long already, while there is no job to show yet."""
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
        self._waiting, self._recovery_due = dict[str, float](), 0.0
        """Since when each thing is waited for, in seconds of waiting; and when the next line about a recovery is due."""
        self._shown_once: set[str] = set()

    def show_change(self, change: JobChange) -> None:
        """Write the change, if it has a text."""
        for line in lines_of(change):
            click.echo(line)

    def show_output(self, lines: Sequence[Line]) -> None:
        """Write each line with its rank."""
        for line in lines:
            click.echo(prefixed(line))

    def wait(self, what: str, seconds: float) -> None:
        """Write once of each thing that is waited for, when it takes longer."""
        if what not in self._waiting:
            self._waiting[what] = seconds
        if seconds - self._waiting[what] > WAIT_NOTE_AFTER:
            self._once("waits", f"waiting for {what}", key=what)

    def show(self, changes: Sequence[JobChange], view: JobView) -> None:
        """Write what is new."""
        for change in changes:
            self.show_change(change)
        step = view.step
        if step is not None and (step.generation, step.step) != self._last_step and time.monotonic() >= self._progress_due:
            self._progress_due, self._last_step = time.monotonic() + PROGRESS_INTERVAL, (step.generation, step.step)
            self.show_change(progress_change(view))
        self._show_recovery(view)
        if view.no_steps:
            self._once("silent", f"steps {view.no_steps}")

    def _show_recovery(self, view: JobView) -> None:
        """Write now and then how far a recovery has got that takes long."""
        recovery = view.recovery
        if recovery is None or recovery.is_over:
            self._recovery_due = 0.0
        elif not self._recovery_due:
            self._recovery_due = time.monotonic() + PROGRESS_INTERVAL
        elif time.monotonic() >= self._recovery_due:
            self._recovery_due = time.monotonic() + PROGRESS_INTERVAL
            self.show_change(recovery_change(view, recovery))

    def _once(self, event: str, text: str, *, key: str = "") -> None:
        if event + key not in self._shown_once:
            self._shown_once.add(event + key)
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
        self._changes: deque[tuple[JobChange, int]] = deque(maxlen=100)
        """The newest changes, each with the number of lines that were printed before it."""
        self._printed, self._frame_lines = 0, 0
        self._live: Live | None = None
        self._echo_on: Callable[[], None] = lambda: None

    def show_change(self, change: JobChange) -> None:
        """Print the change above the picture; a notice also stays below it."""
        if change.text:
            self._changes.append((change, self._printed))
            self._print(change)
        if change.event == "notice":
            self._notice = change.text

    def _print(self, change: JobChange) -> None:
        """Print a change, wrapped to the terminal; a note takes at most two lines."""
        width = self._console.size.width
        if change.event == "note":
            text = " ".join(line.strip() for line in lines_of(change))
            lines = first_lines(text, width, NOTE_LINES, indent=hanging(text))
        else:
            lines = [part for line in lines_of(change) for part in wrapped(line, width, indent=hanging(line) or INDENT)]
        self._printed += len(lines)
        self._console.print(Text("\n".join(lines), style=STYLES.get(change.event, "")), soft_wrap=True)

    def show(self, changes: Sequence[JobChange], view: JobView) -> None:
        """Redraw the picture."""
        self._redraw_if_resized()
        for change in changes:
            self.show_change(change)
        frame = Frame(view, hint=self._hint, notice=self._notice, events=self._scrolled_away())
        self._draw(frame)
        self._frame_lines = frame.lines

    def _scrolled_away(self) -> list[JobChange]:
        """Return the newest changes that the output of ranks has moved off the screen."""
        size = self._console.size
        room = size.height - self._frame_lines
        newest = list(self._changes)[-max_events(size.height) :]
        return [change for change, before in newest if self._printed - before > room]

    def show_output(self, lines: Sequence[Line]) -> None:
        """Print the lines above the picture, in their own order."""
        if lines:
            text, width = [prefixed(line) for line in lines], self._console.size.width
            self._printed += sum(max(1, -(-cell_len(line) // width)) for line in text)
            self._console.print(Text("\n".join(text)), soft_wrap=True)

    def wait(self, what: str, seconds: float) -> None:
        """Draw what is waited for, with the time that it takes and a sign that turns."""
        self._redraw_if_resized()
        width = self._console.size.width
        text = f"{SPINNER[int(seconds / SPINNER_SECONDS) % len(SPINNER)]} {seconds:.0f} s: waiting for {what}"
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
        kept = [change for change, _ in list(self._changes)[-max(1, self._size.height // 4) :]]
        self._changes.clear()
        for change in kept:
            self._changes.append((change, self._printed))
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
