"""What Prefect prints of a flow's logs: in the format that is asked for, and also when nobody reads it any more."""

from __future__ import annotations

from functools import cache

from rich.console import Console

from holdfast.log import convert


@cache  # a program prepares for what it says before its flow, which would do it again
def prepare_output() -> None:
    """Log JSON where that is asked for, and go on when nobody reads it any more, as when the Prefect worker that started this was killed.

    Prefect prints its logs by rich, which takes a broken pipe for the user's wish to end: `SystemExit` in each thread that has a line to
    log, the one that steers a job included.
    """
    convert()
    Console.on_broken_pipe = _fall_silent  # type: ignore[method-assign, assignment]


def _fall_silent(console: Console) -> None:
    console.quiet = True
