"""`holdfast explain`: what is made of a log line, and why."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Final

from holdfast.classify.explanation import explain
from holdfast.cli.output import echo_facts, echo_json, heading, hint
from holdfast.detectors.catalogue import CATALOGUE, KERNEL_LOG, SYSTEM_LOG, WORKER_OUTPUT
from holdfast.errors import NotReadable
from holdfast.report.text.wording import visible

MOST: Final = 1 << 20
"""Bytes that are read from standard input."""
_LOGS: Final = {"kernel": KERNEL_LOG, "output": WORKER_OUTPUT, "other": SYSTEM_LOG}


def explain_line(line: str, *, log: str | None, as_json: bool) -> int:
    """Explain *line*, or with `-` the lines on standard input."""
    if line == "-":
        if sys.stdin is None:
            raise NotReadable("the line", "on standard input", "standard input is closed", "Give the line as an argument, in quotes")
        line = sys.stdin.buffer.read(MOST).decode(errors="replace")
    found = explain(line, _LOGS[log] if log is not None else None)
    entry = CATALOGUE.get(found.kind or "")
    if as_json:
        advice = {"advice": entry.action, "recommended_action": entry.recommended_action, "reference": entry.reference} if entry else {}
        echo_json({**asdict(found), **advice})
        return 0
    heading(f"{entry.id}: {entry.title}" if entry else "No fault")
    facts = [("matched by", found.matched)]
    if entry is not None:
        facts += [
            ("taken to be from", found.log if found.log != SYSTEM_LOG else "the log of a service or a scheduler"),
            *([("together with", "\n".join(map(visible, found.context)))] if found.context else []),
            ("acts", (f"yes ({entry.recommended_action}): " if found.acts else "no: ") + found.reason.removeprefix("no: ")),
            ("what to do", entry.action),
            ("reference", entry.reference),
        ]
    echo_facts([*facts, *([("would change this", "\n".join(found.changes))] if found.changes else [])])
    if entry is not None:
        hint(f"`holdfast faults show {entry.id}` shows what leads to it and what follows.")
    return 0
