"""A collector that stays: it looks once for each line that asks it to, and ends with the connection that it was started over.

To start an interpreter and to unpack the readers takes a node some tenths of a second of a core, and the way to it a login; a look itself
takes a fraction of that.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import IO, Any, Final

from holdfast.probe.readers import collect

IDLE: Final = 900
"""Seconds without a question after which it ends: the connection of a machine that lost its power is never closed."""
OVERTIME: Final = 30
"""Seconds beyond a look's own deadline after which it ends."""


def main(_arguments: list[str], questions: IO[bytes] | None = None, answers: IO[str] | None = None) -> None:
    """Answer each question, a line of JSON: `mark` comes back before the look; `node`, `root` and `seconds` are as `collect` has them."""
    questions, answers = questions or sys.stdin.buffer, answers or sys.stdout
    while question := _next(questions):
        asked: dict[str, Any] = json.loads(question)
        signal.alarm(int(asked["seconds"]) + OVERTIME)
        look = collect.look(asked["node"], Path(asked.get("root", "/")), float(asked["seconds"]))
        answers.write(f"{asked['mark']} {json.dumps(look)}\n")
        answers.flush()


def _next(questions: IO[bytes]) -> bytes:
    """Wait for a question; nothing when there will be none. Whatever hangs, the alarm ends this process."""
    signal.alarm(IDLE)
    return questions.readline()
