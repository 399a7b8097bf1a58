"""`holdfast explain`: what is made of a log line, and why."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Final

from holdfast.classify.explanation import explain
from holdfast.classify.origin import NAMES
from holdfast.cli.output import echo_facts, echo_json, heading, hint
from holdfast.detectors.catalogue import CATALOGUE
from holdfast.errors import NotReadable
from holdfast.report.text.wording import visible

MOST: Final = 1 << 20
"""Bytes that are read from standard input."""


def explain_line(line: str, *, log: str | None, as_json: bool) -> int:
    """Explain *line*, or with `-` the lines on standard input."""
    if line == "-":
        if sys.stdin is None:
            raise NotReadable("the line", "on standard input", "standard input is closed", "Give the line as an argument, in quotes")
        line = sys.stdin.buffer.read(MOST).decode(errors="replace")
    found = explain(line, NAMES[log] if log is not None else None)
    entry = CATALOGUE.get(found.kind or "")
    if as_json:
        advice = {"advice": entry.action, "recommended_action": entry.recommended_action, "reference": entry.reference} if entry else {}
        echo_json({**asdict(found), **advice})
        return 0
    heading(f"{entry.id}: {entry.title}" if entry else "No fault")
    echo_facts([(name, "\n".join(map(visible, texts))) for name, texts in found.facts()])
    if entry is not None:
        hint(f"`holdfast faults show {entry.id}` shows what leads to it and what follows.")
    return 0
