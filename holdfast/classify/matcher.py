"""Which signatures may match on which line: one pass of Hyperscan over a block of lines, for all signatures at once.

Hyperscan answers with more than is true where an expression looks ahead or back, or where a match runs over a line's end, and never with
less: `detectors.logs.judge` tries each candidate on its own line. Without the package every signature is a candidate everywhere, which
gives the same verdicts some hundred times slower.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from detectors.log_heuristics import TROUBLE
from detectors.signatures import SIGNATURES
from holdfast.paths import home

WORDS: Final = len(SIGNATURES)
"""Stands among the candidates for: the line holds a word of trouble."""
HEAD: Final = WORDS + 1
"""Stands among the candidates for: a traceback begins here."""

_BITS: Final = 16
_NUMBER: Final = (1 << _BITS) - 1
_HEAD: Final = r"Traceback \(most recent call last\)"
_NOT_ITS_OWN: Final = ("(?!", "(?=", "(?<!", "(?<=", "(?P=")
"""What Hyperscan can only match approximately."""


class Matcher(Protocol):
    """Finds candidates."""

    def candidates(self, block: bytes) -> Mapping[int, Collection[int]]:
        """Return, for each line of *block* (by its place, from 0) on which anything may match, the numbers of what may."""


class EveryOne:
    """Takes every signature for a candidate on every line."""

    def candidates(self, block: bytes) -> Mapping[int, Collection[int]]:
        """Return all lines with all numbers; a traceback begins where its head stands."""
        every = set(range(HEAD))
        head = _HEAD.replace("\\", "").encode()
        return {place: every | {HEAD} if head in line else every for place, line in enumerate(block.split(b"\n"))}


class AllAtOnce:
    """Searches for all signatures in one pass, with a *database* of Hyperscan's."""

    def __init__(self, database: Any) -> None:  # noqa: ANN401 (of a package that may be missing)
        self._database = database

    def candidates(self, block: bytes) -> Mapping[int, Collection[int]]:
        """Return the lines on which anything may match."""
        events: list[int] = []  # where a match ends, and of what: one number, as a flood makes millions of them
        keep = events.append
        self._database.scan(block, match_event_handler=lambda number, _begin, end, _flags, _context: keep(end << _BITS | number))
        events.sort()
        found: dict[int, list[int]] = {}
        mine: list[int] | None = None
        place = before = 0
        for event in events:
            end = event >> _BITS
            if end > before + 1:
                passed = block.count(b"\n", before, end - 1)
                before = end - 1
                if passed:
                    place, mine = place + passed, None
            if mine is None:
                found[place] = mine = []
            mine.append(event & _NUMBER)
        return found


@functools.cache
def best() -> Matcher:
    """Return the fastest matcher that can be had here."""
    try:
        import hyperscan  # noqa: PLC0415 (has to be compiled for the machine, and may be missing there)
    except ImportError:
        return EveryOne()
    return AllAtOnce(_database(hyperscan, home() / "cache"))


def _database(hyperscan: Any, folder: Path) -> Any:  # noqa: ANN401 (a package that may be missing)
    """Return the database of all expressions: kept in *folder*, as it takes seconds to make."""
    patterns = [*(signature.pattern for signature in SIGNATURES), TROUBLE, _HEAD]
    words = "\n".join([*patterns, str(hyperscan.__version__), platform.machine()])
    kept = folder / f"signatures-{hashlib.sha256(words.encode()).hexdigest()[:16]}.hyperscan"
    with contextlib.suppress(OSError, hyperscan.error):
        database = hyperscan.loadb(kept.read_bytes(), hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
        return database
    database = _compiled(hyperscan, patterns)
    with contextlib.suppress(OSError):  # a folder that cannot be written costs seconds, each time
        _keep(kept, hyperscan.dumpb(database))
    return database


def _compiled(hyperscan: Any, patterns: list[str]) -> Any:  # noqa: ANN401 (a package that may be missing)
    plain = int(hyperscan.HS_FLAG_MULTILINE)
    loose = plain | int(hyperscan.HS_FLAG_PREFILTER)
    database = hyperscan.Database()
    database.compile(
        expressions=[pattern.encode() for pattern in patterns],
        ids=list(range(len(patterns))),
        flags=[loose if any(mark in pattern for mark in _NOT_ITS_OWN) else plain for pattern in patterns],
    )
    return database


def _keep(place: Path, content: bytes) -> None:
    """Put *content* in place whole or not at all, and take older databases away."""
    place.parent.mkdir(parents=True, exist_ok=True)
    older = set(place.parent.glob("signatures-*.hyperscan"))
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(place)
    for one in older - {place}:
        one.unlink(missing_ok=True)
