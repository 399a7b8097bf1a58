"""Verdicts on a stream of lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from detectors.exceptions import kind_of
from detectors.log_heuristics import OTHERS
from detectors.logs import judge
from detectors.tracebacks import raised_in
from holdfast.classify.line_blocks import blocks, plain
from holdfast.classify.matcher import HEAD, WORDS, Matcher, best
from holdfast.classify.traceback_collector import CollectedTraceback, TracebackCollector

REMEMBERED: Final = 10_000
"""Lines whose kind is remembered."""
SHORT: Final = 500
"""Bytes of a line that is worth remembering."""
FLOOD: Final = 4
"""A log floods where one line in so many was looked at, and of these one in so many was known."""
_STAMP: Final = re.compile(rb"\[ *\d+\.\d+\] |\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* |[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ")
SCRIPT: Final = "script-exception"
_VAGUE: Final = frozenset({SCRIPT, "script-value", "script-name", "process-status"})
"""Answers that say less of a traceback than the number of its error does."""
_BY_NUMBER: Final = {
    "worker-disk-full": "disk-full",
    "worker-storage-failed": "file-io-error",
    "worker-service-unreachable": "service-unreachable",
    "worker-gpu-out-of-memory": "cuda-out-of-memory",
    "worker-peer-lost": "torch-peer-lost",
    "worker-sigint": "script-interrupted",
}


class Classification(NamedTuple):
    """A fault, and where it was seen."""

    line: int
    """Number of its first line, from 1."""
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """What was found in a block of lines: every line that is neither named nor inside a traceback is benign."""

    first: int
    """Number of its first line."""
    count: int
    faults: list[Classification] = field(default_factory=list)
    """May hold one that began on an earlier page: a traceback is judged when it is whole."""
    inside: set[int] = field(default_factory=set)
    """Numbers of lines that belong to a traceback and have no verdict of their own."""


class Classifier:
    """Judges lines in the order they come; a traceback that is not whole waits for its end."""

    def __init__(self, matcher: Matcher | None = None) -> None:
        self._matcher = matcher or best()
        self._gatherer = TracebackCollector()
        self._lines = 0
        self._known: dict[bytes, str | None] = {}
        self._hits = 0
        self._flooded = False

    def feed(self, block: bytes) -> Page:
        """Judge *block*, which holds whole lines."""
        page = Page(first=self._lines + 1, count=block.count(b"\n"))
        self._lines += page.count
        lines = block.split(b"\n") if self._flooded else []
        told, found = self._told_before(lines) if self._flooded else ({}, self._matcher.candidates(block))
        known = self._hits
        if told or found or self._gatherer:
            lines = lines or block.split(b"\n")
            for place in self._places(sorted([*found, *told]), page.count):
                line, number, candidates = lines[place], page.first + place, found.get(place, ())
                if (self._gatherer or HEAD in candidates) and self._gather(line, number, page):
                    continue
                if (name := told.get(place) or (self._kind(line, candidates) if candidates else None)) is not None:
                    page.faults.append(Classification(number, name, line.decode(errors="replace")))
        known, asked = self._hits - known + len(told), len(found) + len(told)
        self._flooded = FLOOD * asked > page.count and FLOOD * known > asked
        return page

    def _told_before(self, lines: list[bytes]) -> tuple[dict[int, str], dict[int, Collection[int]]]:
        """Return the faults among *lines* that are known, and what may match on the others: in a flood, matching is what takes the time."""
        told: dict[int, str] = {}
        new: list[int] = []
        for place, line in enumerate(lines):
            said = line[:1] + line[stamp.end() :] if (stamp := _STAMP.match(line)) else line
            if said not in self._known:
                new.append(place)
            elif (name := self._known[said]) is not None:
                told[place] = name
        found = self._matcher.candidates(b"\n".join([lines[place] for place in new])) if new else {}
        return told, {new[place]: candidates for place, candidates in found.items()}

    def finish(self) -> Page:
        """Judge what is still open."""
        page = Page(first=self._lines + 1, count=0)
        page.faults.extend(_verdict(one) for one in self._gatherer.close())
        return page

    def _places(self, hits: list[int], count: int) -> Iterator[int]:
        """Yield the lines to look at: those with candidates, and all while a traceback is open."""
        place = 0
        for hit in [*hits, count]:
            while self._gatherer and place < min(hit, count):
                yield place
                place += 1
            if place <= hit < count:
                yield hit
                place = hit + 1

    def _gather(self, line: bytes, number: int, page: Page) -> bool:
        """Tell whether *line* belongs to a traceback, and judge those that are whole now."""
        taken, whole = self._gatherer.take(line.decode(errors="replace"), number)
        page.faults.extend(_verdict(one) for one in whole)
        if taken:
            page.inside.add(number)
        return taken

    def _kind(self, line: bytes, candidates: Collection[int]) -> str | None:
        """Return the kind of *line*: floods repeat a line with another time, and what was judged once is known."""
        said = line[:1] + line[stamp.end() :] if (stamp := _STAMP.match(line)) else line
        if said in self._known:
            self._hits += 1
            return self._known[said]
        numbers = sorted({one for one in candidates if one < WORDS})
        name = judge(line.decode(errors="replace"), numbers, words=WORDS in candidates)
        if len(line) <= SHORT:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[said] = name
        return name


def classify(read: Callable[[int], bytes]) -> Iterator[Page]:
    """Yield the verdicts on all that *read* has to give, a block at a time."""
    classifier = Classifier()
    for block in blocks(read):
        yield classifier.feed(block)
    yield classifier.finish()


def judge_lines(text: str, matcher: Matcher | None = None) -> list[Classification]:
    """Return the faults in *text*, by line."""
    classifier = Classifier(matcher)
    block = plain(text.encode(errors="replace"))
    page = classifier.feed(block if block.endswith(b"\n") else block + b"\n")
    return sorted([*page.faults, *classifier.finish().faults])


def _verdict(gathered: CollectedTraceback) -> Classification:
    """Judge a traceback by the exception it ended in, or by what led to that."""
    raised = raised_in(gathered.text)
    if raised is None:
        return Classification(gathered.first, SCRIPT, gathered.text)
    name = judge(f"{raised.type}: {raised.message}".replace("\n", " "))
    if name is None or name in OTHERS:
        name = SCRIPT
    if name in _VAGUE or raised.peer_lost:
        name = _BY_NUMBER.get(kind_of(raised), name)
    return Classification(gathered.first, name, gathered.text)
