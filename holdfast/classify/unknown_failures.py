"""Find the failures in the history that the catalogue has no kind for, most frequent first, as drafts of new kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.classify.classifier import classify_text
from holdfast.detectors.log_lines.heuristics import OTHERS, UNKNOWN
from holdfast.detectors.log_lines.outputs import GENERIC, NAMELESS
from holdfast.history.models import FaultRecord

CATCH_ALL: Final = GENERIC | OTHERS
"""Kinds that say that something failed, but not what."""
_VARIES: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d+(?:\.\d+)?")
_LETTERS: Final = re.compile(r"[^a-z0-9]+")
MOST_CONTEXTS: Final = 3


@dataclass(slots=True)
class UnknownFailure:
    """A failure without a kind of its own, and its occurrences."""

    shape: str
    """Its text without numbers and addresses."""
    kind: str
    """What it was recorded as."""
    times: int = 0
    jobs: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    last: float = 0.0
    quote: str = ""
    contexts: list[str] = field(default_factory=list)
    """The newest outputs or tracebacks around it."""

    def add(self, fault: FaultRecord) -> None:
        """Count one more occurrence."""
        self.times += 1
        self.jobs.add(fault.job_id)
        self.nodes |= {fault.node} if fault.node else set()
        if fault.at >= self.last:
            self.last, self.quote = fault.at, str(fault.evidence.get("quote", ""))
        if detail := str(fault.evidence.get("detail", "")).strip():
            self.contexts = [detail, *(one for one in self.contexts if one != detail)][:MOST_CONTEXTS]

    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "kind": self.kind,
            "shape": self.shape,
            "times": self.times,
            "jobs": len(self.jobs),
            "nodes": sorted(self.nodes),
            "last": self.last,
            "quote": self.quote,
            "contexts": self.contexts,
            "signature": self.draft(),
        }

    def draft(self) -> str:
        """Return a table for `detectors/signatures`, for a person to complete."""
        name = "-".join(_LETTERS.sub(" ", self.shape.lower()).split()[:4]) or "unnamed"
        pattern = re.escape(self.shape).replace("N", r"\S+").replace(r"\ ", " ").replace("'", ".")
        return "\n".join((
            f"[{name}]",
            'title = ""',
            'recommended_action = "monitor"',
            'attributed_to = "none"',
            'action = ""',
            f"match = ['{pattern}']",
            f"unhealthy = {json.dumps(self.quote, ensure_ascii=False)}",
        ))  # fmt: skip


def find_unknown_failures(faults: Iterable[FaultRecord]) -> list[UnknownFailure]:
    """Return the failures in *faults* without a kind of their own, most frequent first."""
    found: dict[tuple[str, str], UnknownFailure] = {}
    faults = list(faults)
    with_context = {_end(fault) for fault in faults if fault.kind == UNKNOWN}
    for fault in faults:
        if fault.kind not in CATCH_ALL or (fault.kind in GENERIC and _end(fault) in with_context):
            continue  # the same end is also recorded with its context
        quote, detail = str(fault.evidence.get("quote", "")), str(fault.evidence.get("detail", ""))
        kinds = {one.kind for text in (quote, detail) if text for one in classify_text(text)}
        if not kinds - NAMELESS:
            shape = _VARIES.sub("N", quote)[:160]
            found.setdefault((fault.kind, shape), UnknownFailure(shape=shape, kind=fault.kind)).add(fault)
    return sorted(found.values(), key=lambda one: (-one.times, -one.last))


def _end(fault: FaultRecord) -> tuple[str, int | None, float]:
    """Return what identifies the end of a worker."""
    return fault.job_id, fault.rank, fault.at
