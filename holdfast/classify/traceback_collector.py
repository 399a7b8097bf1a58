"""Tracebacks out of lines: each is one finding, also where several ranks print theirs at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from detectors.tracebacks import HEAD

MOST_LINES: Final = 400
"""Lines of a traceback that are kept; recursion makes thousands."""
MOST_OPEN: Final = 256
"""Tracebacks that are gathered at once; when there are more, the oldest is closed."""
PATIENCE: Final = 30
"""Lines of others that may stand between two lines of a traceback."""

_STAMP: Final = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\s|\w{3} +\d+ \d\d:\d\d:\d\d \S+ \S+: |\[ *\d+\.\d+\] |<\d+>"
    r"|(?:stderr|stdout) [FP] |\d+: (?=\[|Traceback|\s|\w+Error)|\S+ \| )+",
    re.ASCII,
)
_TAG: Final = re.compile(r"^(?:\[[\w:.-]+\]|\([\w=, .:-]+\)):? ?", re.ASCII)
_EXCEPTION: Final = re.compile(r"(?:[^\W\d][\w.<>]*)(?:: |:?$)")
_LINKS: Final = ("The above exception was the direct cause", "During handling of the above exception")
_GOES_ON: Final = re.compile(
    r"^(?:\s|The above exception was the direct cause|During handling of the above exception|CUDA kernel errors might"
    r"|For debugging consider|Compile with `TORCH_USE_CUDA|Device-side assertion|Exception raised from|frame #\d+|Last error:"
    r"|ncclSystemError|ncclInternalError|ncclUnhandled|ncclRemoteError|ncclInvalid|Search for `)"
)


@dataclass(slots=True)
class CollectedTraceback:
    """A traceback, as far as it has been read."""

    first: int
    tag: str
    lines: list[str] = field(default_factory=list)
    said: bool = False
    """The exception has been named: only its message may follow."""
    silence: int = 0
    """Lines of others since its newest one."""

    @property
    def text(self) -> str:
        """The whole of it."""
        return "\n".join(self.lines)


class TracebackCollector:
    """Puts the lines of tracebacks together."""

    def __init__(self) -> None:
        self._open: dict[str, CollectedTraceback] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, line: str, number: int) -> tuple[bool, list[CollectedTraceback]]:
        """Return whether *line* belongs to a traceback, and the tracebacks that are whole now."""
        body = _STAMP.sub("", line)
        tag = found[0] if (found := _TAG.match(body)) else ""
        body = body[len(tag) :]
        tag = tag.rstrip()
        done = self._wait()
        mine = self._open.get(tag)
        if mine is None or not self._belongs(mine, body):
            if mine is not None and mine.said:
                done.append(self._open.pop(tag))
                mine = None
            if HEAD not in body:
                return False, done
            done += [self._open.pop(tag)] if mine is not None else []
            self._open[tag] = mine = CollectedTraceback(first=number, tag=tag)
            if len(self._open) > MOST_OPEN:
                done.append(self._open.pop(next(iter(self._open))))
        self._add(mine, body)
        return True, done

    def close(self) -> list[CollectedTraceback]:
        """Return what is open at the end."""
        rest = list(self._open.values())
        self._open.clear()
        return rest

    def _wait(self) -> list[CollectedTraceback]:
        """Close what has been silent for too long."""
        for one in self._open.values():
            one.silence += 1
        return [self._open.pop(tag) for tag in [tag for tag, one in self._open.items() if one.silence > PATIENCE]]

    @staticmethod
    def _belongs(mine: CollectedTraceback, body: str) -> bool:
        if mine.said:
            last = mine.lines[-1].strip()
            if not body.strip():
                return bool(last)  # what led to this exception, or what it led to, stands behind an empty line
            if HEAD in body:
                return any(link in line for line in mine.lines[-2:] for link in _LINKS)
            return bool(_GOES_ON.match(body)) or bool(mine.tag and last and not body.startswith("["))
        return not body.strip() or body[0] in " \t|+^~" or bool(_EXCEPTION.match(body))

    @staticmethod
    def _add(mine: CollectedTraceback, body: str) -> None:
        mine.silence = 0
        if len(mine.lines) < MOST_LINES:
            mine.lines.append(body)
        elif not body.startswith((" ", "\t")):
            mine.lines[-1] = body
        if HEAD in body:
            mine.said = False
        elif body.strip() and body[0] not in " \t|+^~":
            mine.said = True
