"""What Prefect prints of a flow's logs, when nobody reads it any more."""

from __future__ import annotations

from rich.console import Console


def outlive_readers() -> None:
    """Go on when nobody reads any more what this process prints, as when the Prefect worker that started it was killed.

    Prefect prints its logs by rich, which takes a broken pipe for the user's wish to end: `SystemExit` in each thread that has a line to
    log, the one that steers a job included.
    """
    Console.on_broken_pipe = _fall_silent  # type: ignore[method-assign, assignment]


def _fall_silent(console: Console) -> None:
    console.quiet = True
