"""Collect tracebacks out of a stream of lines: each is one finding, also where several ranks print theirs at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from holdfast.detectors.training.tracebacks import HEAD

MAX_LINES: Final = 400
"""Lines of a traceback that are kept; recursion produces thousands."""
MAX_OPEN: Final = 256
"""Tracebacks that are collected at once; when there are more, the oldest is closed."""
MAX_GAP: Final = 30
"""Lines of others between two lines of a traceback."""

_STAMP: Final = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\s|\w{3} +\d+ \d\d:\d\d:\d\d \S+ \S+: |\[ *\d+\.\d+\] |<\d+>"
    r"|(?:stderr|stdout) [FP] |\d+: (?=\[|Traceback|\s|\w+Error)|\S+ \| )+",
    re.ASCII,
)
_TAG: Final = re.compile(r"^(?:\[[\w:.-]+\]|\([\w=, .:-]+\)):? ?", re.ASCII)
_EXCEPTION: Final = re.compile(r"(?:[^\W\d][\w.<>]*)(?:: |:?$)")
_LINKS: Final = ("The above exception was the direct cause", "During handling of the above exception")
_CONTINUES: Final = re.compile(
    r"^(?:\s|The above exception was the direct cause|During handling of the above exception|CUDA kernel errors might"
    r"|For debugging consider|Compile with `TORCH_USE_CUDA|Device-side assertion|Exception raised from|frame #\d+|Last error:"
    r"|ncclSystemError|ncclInternalError|ncclUnhandled|ncclRemoteError|ncclInvalid|Search for `)"
)


@dataclass(slots=True)
class CollectedTraceback:
    """A traceback, as far as it has been read."""

    first: int
    """Number of its first line."""
    tag: str
    """The prefix of its lines that names the rank."""
    lines: list[str] = field(default_factory=list)
    has_exception: bool = False
    """The exception was read: only its message may follow."""
    gap: int = 0
    """Lines of others since its newest one."""

    @property
    def text(self) -> str:
        """Return all of its lines."""
        return "\n".join(self.lines)


class TracebackCollector:
    """Puts the lines of tracebacks together."""

    def __init__(self) -> None:
        self._open: dict[str, CollectedTraceback] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, line: str, number: int) -> tuple[bool, list[CollectedTraceback]]:
        """Return whether *line* belongs to a traceback, and the tracebacks that are complete now."""
        body = _STAMP.sub("", line)
        tag = found[0] if (found := _TAG.match(body)) else ""
        body = body[len(tag) :]
        tag = tag.rstrip()
        for one in self._open.values():
            one.gap += 1
        done = [self._open.pop(name) for name in [name for name, one in self._open.items() if one.gap > MAX_GAP]]
        current = self._open.get(tag)
        if current is None or not self._belongs(current, body):
            if current is not None and current.has_exception:
                done.append(self._open.pop(tag))
                current = None
            if HEAD not in body:
                return False, done
            done += [self._open.pop(tag)] if current is not None else []
            self._open[tag] = current = CollectedTraceback(first=number, tag=tag)
            if len(self._open) > MAX_OPEN:
                done.append(self._open.pop(next(iter(self._open))))
        self._add(current, body)
        return True, done

    def close(self) -> list[CollectedTraceback]:
        """Return the tracebacks that are open at the end."""
        rest = list(self._open.values())
        self._open.clear()
        return rest

    @staticmethod
    def _belongs(current: CollectedTraceback, body: str) -> bool:
        if current.has_exception:
            last = current.lines[-1].strip()
            if not body.strip():
                return bool(last)  # a chained exception follows an empty line
            if HEAD in body:
                return any(link in line for line in current.lines[-2:] for link in _LINKS)
            return bool(_CONTINUES.match(body)) or bool(current.tag and last and not body.startswith("["))
        return not body.strip() or body[0] in " \t|+^~" or bool(_EXCEPTION.match(body))

    @staticmethod
    def _add(current: CollectedTraceback, body: str) -> None:
        current.gap = 0
        if len(current.lines) < MAX_LINES:
            current.lines.append(body)
        elif not body.startswith((" ", "\t")):
            current.lines[-1] = body
        if HEAD in body:
            current.has_exception = False
        elif body.strip() and body[0] not in " \t|+^~":
            current.has_exception = True
