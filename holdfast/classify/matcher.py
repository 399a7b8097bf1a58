"""Find which signatures may match on which line: one pass of Hyperscan over a block of lines, for all signatures at once.

Hyperscan reports too much where an expression looks ahead or back, or where a match crosses a line end, and never too little:
`holdfast.detectors.log_lines.classification.judge` tries each candidate on its own line. Without the package every signature is a
candidate everywhere, which gives the same results some hundred times slower.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.log_lines.heuristics import TROUBLE
from holdfast.detectors.log_lines.tables import OPENS
from holdfast.detectors.signatures import SIGNATURES
from holdfast.paths import home

WORDS: Final = len(SIGNATURES)
"""Number of the candidate: the line contains a word that suggests an error."""
HEAD: Final = WORDS + 1
"""Number of the candidate: a traceback begins here."""

TABLE: Final = WORDS + 2
"""Number of the candidate: a table may begin here."""

_BITS: Final = 16
_NUMBER: Final = (1 << _BITS) - 1
_HEAD: Final = r"Traceback \(most recent call last\)"
_SET: Final = re.compile(r"\\.|\[(?P<excludes>\^)?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a set of characters."""
_BEGINNINGS: Final = {HEAD: re.compile(_HEAD.encode()), TABLE: re.compile(OPENS.encode())}
_BEGINS: Final = re.compile(b"|".join(one.pattern for one in _BEGINNINGS.values()))
_APPROXIMATE: Final = ("(?!", "(?=", "(?<!", "(?<=", "(?P=")
"""What Hyperscan can only match approximately."""


class NaiveMatcher:
    """Returns every signature as a candidate on every line."""

    def candidates(self, block: bytes) -> Mapping[int, Collection[int]]:
        """Return the numbers of the signatures that may match, for each line of *block* (by its index).

        `HEAD` is among them where a traceback begins, and `TABLE` where a table may begin.
        """
        every = set(range(HEAD))
        found: dict[int, set[int]] = {}
        for index, line in enumerate(block.split(b"\n")):
            found[index] = every
            if _BEGINS.search(line):
                found[index] = every | {number for number, begins in _BEGINNINGS.items() if begins.search(line)}
        return found


class HyperscanMatcher:
    """Searches for all signatures in one pass, with a *database* of Hyperscan."""

    def __init__(self, database: Any) -> None:  # noqa: ANN401 (of a package that may be missing)
        self._database = database

    def candidates(self, block: bytes) -> Mapping[int, Collection[int]]:
        """Return the numbers of the signatures that may match, for each line of *block* (by its index) that has any."""
        events: list[int] = []  # the end of a match and its signature in one number, as a flood makes millions of them
        keep = events.append
        self._database.scan(block, match_event_handler=lambda number, _begin, end, _flags, _context: keep(end << _BITS | number))
        events.sort()
        found: dict[int, list[int]] = {}
        current: list[int] | None = None
        line = before = 0
        for event in events:
            end = event >> _BITS
            if end > before + 1:
                passed = block.count(b"\n", before, end - 1)
                before = end - 1
                if passed:
                    line, current = line + passed, None
            if current is None:
                found[line] = current = []
            current.append(event & _NUMBER)
        return found


Matcher = NaiveMatcher | HyperscanMatcher


@functools.cache
def best() -> Matcher:
    """Return the fastest matcher that is available here."""
    try:
        import hyperscan  # noqa: PLC0415 (is compiled for each platform, and may be missing)
    except ImportError:
        return NaiveMatcher()
    return HyperscanMatcher(_database(hyperscan, home() / "cache"))


def _database(hyperscan: Any, folder: Path) -> Any:  # noqa: ANN401 (a package that may be missing)
    """Return the database of all expressions, cached in *folder* because it takes seconds to compile."""
    patterns = [_within_a_line(pattern) for pattern in (*(signature.pattern for signature in SIGNATURES), TROUBLE, _HEAD, OPENS)]
    identity = "\n".join([*patterns, str(hyperscan.__version__), platform.machine()])
    cached = folder / f"signatures-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.hyperscan"
    with contextlib.suppress(OSError, hyperscan.error):
        database = hyperscan.loadb(cached.read_bytes(), hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
        return database
    exact = int(hyperscan.HS_FLAG_MULTILINE)
    approximate = exact | int(hyperscan.HS_FLAG_PREFILTER)
    database = hyperscan.Database()
    database.compile(
        expressions=[pattern.encode() for pattern in patterns],
        ids=list(range(len(patterns))),
        flags=[approximate if any(part in pattern for part in _APPROXIMATE) else exact for pattern in patterns],
    )
    with contextlib.suppress(OSError):  # without a writable folder it is compiled each time
        _write_atomically(cached, hyperscan.dumpb(database))
    return database


def _within_a_line(pattern: str) -> str:
    """Return *pattern* with sets that exclude characters excluding the end of a line too: ``[^|]*`` would run through the whole block."""
    return _SET.sub(lambda found: f"{found[0][:-1]}\\n]" if found["excludes"] else found[0], pattern)


def _write_atomically(path: Path, content: bytes) -> None:
    """Write *content* to *path* completely or not at all, and remove older databases."""
    path.parent.mkdir(parents=True, exist_ok=True)
    older = set(path.parent.glob("signatures-*.hyperscan"))
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
    for one in older - {path}:
        one.unlink(missing_ok=True)
