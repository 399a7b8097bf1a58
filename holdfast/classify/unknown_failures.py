"""Failures that nothing in the catalogue knew, out of the history: the most frequent first, ready to become kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.log_heuristics import OTHERS, UNKNOWN
from detectors.outputs import GENERIC, NAMELESS
from holdfast.classify.classifier import judge_lines
from holdfast.history.models import FaultRecord

CATCH_ALL: Final = GENERIC | OTHERS
"""Kinds that say that something failed, and not what."""
_VARIES: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d+(?:\.\d+)?")
_LETTERS: Final = re.compile(r"[^a-z0-9]+")
MOST_CONTEXTS: Final = 3


@dataclass(slots=True)
class UnknownFailure:
    """A failure without a kind of its own, as often as it came."""

    shape: str
    """Its words, with numbers and addresses taken out."""
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
        """Count one more."""
        self.times += 1
        self.jobs.add(fault.job_id)
        self.nodes |= {fault.node} if fault.node else set()
        if fault.at >= self.last:
            self.last, self.quote = fault.at, str(fault.evidence.get("quote", ""))
        if detail := str(fault.evidence.get("detail", "")).strip():
            self.contexts = [detail, *(one for one in self.contexts if one != detail)][:MOST_CONTEXTS]

    def record(self) -> dict[str, Any]:
        """Return it for programs."""
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
            'blame = "none"',
            'action = ""',
            f"match = ['{pattern}']",
            f"unhealthy = {json.dumps(self.quote, ensure_ascii=False)}",
        ))  # fmt: skip


def unknown(faults: Iterable[FaultRecord]) -> list[UnknownFailure]:
    """Return what no kind of the catalogue names in *faults*, the most frequent first."""
    found: dict[tuple[str, str], UnknownFailure] = {}
    told = list(faults)
    with_context = {_end(fault) for fault in told if fault.kind == UNKNOWN}
    for fault in told:
        if fault.kind in GENERIC and _end(fault) in with_context:
            continue  # the same end, recorded with its context beside
        quote = str(fault.evidence.get("quote", ""))
        if fault.kind in CATCH_ALL and not _is_known(quote, str(fault.evidence.get("detail", ""))):
            shape = _VARIES.sub("N", quote)[:160]
            found.setdefault((fault.kind, shape), UnknownFailure(shape=shape, kind=fault.kind)).add(fault)
    return sorted(found.values(), key=lambda one: (-one.times, -one.last))


def _is_known(quote: str, detail: str) -> bool:
    """Tell whether the words of a failure, or what was printed before it, are of a kind of their own."""
    said = {verdict.kind for text in (quote, detail) if text for verdict in judge_lines(text)}
    return bool(said - NAMELESS)


def _end(fault: FaultRecord) -> tuple[str, int | None, float]:
    return fault.job_id, fault.rank, fault.at
