"""Prepare Prefect's log output: the requested format, and no crash when the reader of the output is gone."""

from __future__ import annotations

from functools import cache

from rich.console import Console

from holdfast.log import convert


@cache  # a program calls it before its flow does
def prepare_output() -> None:
    """Log JSON if requested, and survive a broken pipe, as when the Prefect worker that started this process was killed.

    Prefect prints its logs with rich, which answers a broken pipe with `SystemExit` in every thread that logs, the controller's included.
    """
    convert()
    Console.on_broken_pipe = _mute  # type: ignore[method-assign, assignment]


def _mute(console: Console) -> None:
    console.quiet = True
