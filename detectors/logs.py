"""What a line of any log tells of: the first signature that knows it, or else its words. Pure, and on the standard library alone.

`judge` is the whole rule. A matcher that goes through millions of lines (`holdfast.classify`) finds out faster which signatures may
match, and hands their numbers over; without numbers, each signature is tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from detectors.catalogue import Fault
from detectors.evidence import HangLimits, LogLine
from detectors.log_heuristics import look
from detectors.signatures import SIGNATURES

LONGEST: Final = 16384
"""Characters of a line that are looked at: nothing that names a fault stands further back."""
_ALL: Final = range(len(SIGNATURES))


def warm() -> None:
    """Compile every expression now, rather than when a line is first judged."""
    for signature in SIGNATURES:
        _ = signature.regex


def judge(text: str, candidates: Iterable[int] = _ALL, *, words: bool = True) -> str | None:
    """Return the kind of fault that *text* tells of; None: of none.

    *candidates* are the numbers of the signatures that may match, in order; *words* says whether it may hold a word of trouble.
    """
    text = text[:LONGEST]
    for number in candidates:
        signature = SIGNATURES[number]
        if found := signature.regex.search(text):
            return signature.kind_of(found)
    return look(text) if words else None


def see_line(seen: LogLine, _limits: HangLimits) -> Fault | None:
    """Name what a line tells of; None for one that tells of no fault."""
    name = judge(seen.text)
    if name is None:
        return None
    return Fault(kind=name, at=seen.at, node=seen.node, rank=seen.rank, quote=seen.text[:500], signature=name)
