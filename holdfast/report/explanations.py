"""What is said of a hypothesis on the page of an incident: what `holdfast explain` says of a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.detectors.catalogue import LOGS
from holdfast.report.case import Hypothesis

if TYPE_CHECKING:
    from holdfast.classify.explanation import Explanation

_OF_LOGS: Final = tuple(f"{log} o" for log in LOGS)
"""How the sources of lines begin: ``kernel log on node-1``, ``worker output of rank 3``."""


def explained(one: Hypothesis) -> Iterator[tuple[str, str]]:
    """Yield what a hypothesis was recognised by, whether it acts and why, what to do, and what would change that: names and texts."""
    found = _explanation(one)
    if found is not None:
        for name, texts in found.facts():
            yield name, "; ".join(texts)
    elif one.proof:
        yield "acts", one.proof


def explained_in_short(one: Hypothesis) -> Iterator[tuple[str, str]]:
    """Yield the same on one line, for a hypothesis that is not the most likely one."""
    found = _explanation(one)
    if found is not None:
        yield "acts", f"{found.whether_it_acts}; matched by {found.matched}"
    elif one.proof:
        yield "acts", one.proof


def _explanation(one: Hypothesis) -> Explanation | None:
    """Return the explanation of a hypothesis by its first report from a log, or else by its first report."""
    from holdfast.classify.explanation import explain_report  # noqa: PLC0415 (signatures take half a second to load)

    reports = [(source, quote) for _, source, quote in one.evidence]
    of_logs = [(source, quote) for source, quote in reports if source.startswith(_OF_LOGS)]
    source, quote = next(iter([*of_logs, *reports]), ("", ""))
    return explain_report(one.kind, source, quote, one.proof, one.recommended_action)
