"""Classify log lines: the first signature that matches, else a heuristic about words.

`judge` is the complete rule. The matcher for millions of lines (`holdfast.classify`) preselects signatures and passes their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.evidence import HangLimits, LogLine
from holdfast.detectors.log_lines.heuristics import kind_by_words
from holdfast.detectors.signatures import SIGNATURES

LONGEST: Final = 16384
"""Maximum number of characters to match in a line."""
_ALL: Final = range(len(SIGNATURES))


def warm() -> None:
    """Compile all expressions now, not when the first line is matched."""
    for signature in SIGNATURES:
        _ = signature.regex


def judge(text: str, candidates: Iterable[int] = _ALL, *, words: bool = True) -> str | None:
    """Return the fault kind of a log line; None if it reports no fault.

    *candidates*: numbers of the signatures to try, in order. *words*: whether to apply the heuristic about words.
    """
    text = text[:LONGEST]
    for number in candidates:
        signature = SIGNATURES[number]
        if found := signature.regex.search(text):
            return signature.kind_of(found)
    return kind_by_words(text) if words else None


def see_line(seen: LogLine, _limits: HangLimits) -> Fault | None:
    """Return the fault of a log line; None if it reports none."""
    name = judge(seen.text)
    if name is None:
        return None
    return Fault(kind=name, at=seen.at, node=seen.node, rank=seen.rank, quote=seen.text[:500], signature=name)
