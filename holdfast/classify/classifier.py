"""Classify a stream of lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from holdfast.classify.log_stream import blocks, plain
from holdfast.classify.matcher import HEAD, TABLE, WORDS, Matcher, best
from holdfast.classify.traceback_collector import CollectedTraceback, TracebackCollector
from holdfast.detectors.log_lines.classification import judge
from holdfast.detectors.log_lines.heuristics import OTHERS
from holdfast.detectors.log_lines.tables import Tables
from holdfast.detectors.training.exceptions import kind_of
from holdfast.detectors.training.tracebacks import raised_in

MAX_CACHED: Final = 10_000
"""Lines whose kind is cached."""
MAX_CACHED_BYTES: Final = 500
"""Bytes of a line that is worth caching."""
FLOOD: Final = 4
"""A log floods where at least one line in so many is examined, and of these one in so many is cached."""
_STAMP: Final = re.compile(rb"\[ *\d+\.\d+\] |\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* |[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ")
SCRIPT: Final = "script-exception"
_VAGUE: Final = frozenset({SCRIPT, "script-value", "script-name", "process-status"})
"""Kinds that say less of a traceback than the type of its exception does."""
_BY_TYPE: Final = {
    "worker-disk-full": "disk-full",
    "worker-storage-failed": "file-io-error",
    "worker-service-unreachable": "service-unreachable",
    "worker-gpu-out-of-memory": "cuda-out-of-memory",
    "worker-peer-lost": "torch-peer-lost",
    "worker-sigint": "script-interrupted",
}


class Classification(NamedTuple):
    """A fault, and where it was found."""

    line: int
    """Number of its first line, from 1."""
    kind: str
    text: str
    """The line, or a value of a table with its header (`holdfast.detectors.log_lines.tables`)."""


@dataclass(frozen=True, slots=True)
class Page:
    """The result for a block of lines: a line that is neither in a fault nor inside a traceback is benign."""

    first: int
    """Number of its first line."""
    count: int
    faults: list[Classification] = field(default_factory=list)
    """May have one that began on an earlier page: a traceback is classified when it is complete."""
    inside: set[int] = field(default_factory=set)
    """Numbers of the lines that belong to a traceback."""


class Classifier:
    """Classifies lines in their order; a traceback waits for its end."""

    def __init__(self, matcher: Matcher | None = None) -> None:
        self._matcher = matcher or best()
        self._collector = TracebackCollector()
        self._tables = Tables()
        self._lines = 0
        self._known: dict[bytes, str | None] = {}
        """Line without its time stamp to its kind."""
        self._hits = 0
        self._flooded = False

    def feed(self, block: bytes) -> Page:
        """Classify *block*, which consists of complete lines."""
        page = Page(first=self._lines + 1, count=block.count(b"\n"))
        self._lines += page.count
        lines = block.split(b"\n") if self._flooded else []
        cached, found = self._cached(lines) if self._flooded else ({}, self._matcher.candidates(block))
        hits = self._hits
        if cached or found or self._collector or self._tables:
            lines = lines or block.split(b"\n")
            for index in self._indices(sorted([*found, *cached]), page.count):
                line, number, candidates = lines[index], page.first + index, found.get(index, ())
                if (self._collector or HEAD in candidates) and self._collect(line, number, page):
                    continue
                if (self._tables or TABLE in candidates) and self._read_table(line, number, page):
                    continue
                if (name := cached.get(index) or (self._kind(line, candidates) if candidates else None)) is not None:
                    page.faults.append(Classification(number, name, line.decode(errors="replace")))
        hits, examined = self._hits - hits + len(cached), len(found) + len(cached)
        self._flooded = FLOOD * examined > page.count and FLOOD * hits > examined
        return page

    def _cached(self, lines: list[bytes]) -> tuple[dict[int, str], dict[int, Collection[int]]]:
        """Return the faults among *lines* that are cached, and the candidates of the others: in a flood, matching is what takes long."""
        cached: dict[int, str] = {}
        new: list[int] = []
        for index, line in enumerate(lines):
            key = _without_stamp(line)
            if key not in self._known:
                new.append(index)
            elif (name := self._known[key]) is not None:
                cached[index] = name
        found = self._matcher.candidates(b"\n".join([lines[index] for index in new])) if new else {}
        return cached, {new[index]: candidates for index, candidates in found.items()}

    def finish(self) -> Page:
        """Classify the tracebacks that are still open."""
        page = Page(first=self._lines + 1, count=0)
        page.faults.extend(_classified(one) for one in self._collector.close())
        return page

    def _indices(self, hits: list[int], count: int) -> Iterator[int]:
        """Yield the lines to examine: those with candidates, and all while a traceback or a table is open."""
        index = 0
        for hit in [*hits, count]:
            while (self._collector or self._tables) and index < min(hit, count):
                yield index
                index += 1
            if index <= hit < count:
                yield hit
                index = hit + 1

    def _collect(self, line: bytes, number: int, page: Page) -> bool:
        """Return whether *line* belongs to a traceback, and classify those that are complete now."""
        taken, complete = self._collector.take(line.decode(errors="replace"), number)
        page.faults.extend(_classified(one) for one in complete)
        if taken:
            page.inside.add(number)
        return taken

    def _read_table(self, line: bytes, number: int, page: Page) -> bool:
        """Return whether *line* belongs to a table, and classify the first of its values that is a fault with its header, or else itself.

        What is known of the line is of no use here, as its header decides.
        """
        text = line.decode(errors="replace")
        values = self._tables.take(text)
        if values:
            texts = [*values, text]
            found = self._matcher.candidates("\n".join(texts).encode())
            for index in sorted(found):
                numbers = sorted({one for one in found[index] if one < WORDS})
                if numbers and (name := judge(texts[index], numbers, words=False)) is not None:
                    page.faults.append(Classification(number, name, texts[index]))
                    break
        return values is not None

    def _kind(self, line: bytes, candidates: Collection[int]) -> str | None:
        """Return the kind of *line*; floods repeat a line with another time stamp, so it is cached."""
        key = _without_stamp(line)
        if key in self._known:
            self._hits += 1
            return self._known[key]
        numbers = sorted(set(candidates))
        while numbers and numbers[-1] >= WORDS:  # what is no signature has the highest numbers
            numbers.pop()
        name = judge(line.decode(errors="replace"), numbers, words=WORDS in candidates)
        if len(line) <= MAX_CACHED_BYTES:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[key] = name
        return name


def _without_stamp(line: bytes) -> bytes:
    return line[:1] + line[stamp.end() :] if (stamp := _STAMP.match(line)) else line


def classify(read: Callable[[int], bytes]) -> Iterator[Page]:
    """Yield the results for all that *read* returns, a block at a time."""
    classifier = Classifier()
    for block in blocks(read):
        yield classifier.feed(block)
    yield classifier.finish()


def classify_text(text: str, matcher: Matcher | None = None) -> list[Classification]:
    """Return the faults in *text*, by line."""
    classifier = Classifier(matcher)
    block = plain(text.encode(errors="replace"))
    page = classifier.feed(block if block.endswith(b"\n") else block + b"\n")
    return sorted([*page.faults, *classifier.finish().faults])


def _classified(collected: CollectedTraceback) -> Classification:
    """Classify a traceback by the exception that ended it, or by what led to that."""
    raised = raised_in(collected.text)
    if raised is None:
        return Classification(collected.first, SCRIPT, collected.text)
    name = judge(f"{raised.type}: {raised.message}".replace("\n", " "))
    if name is None or name in OTHERS:
        name = SCRIPT
    if name in _VAGUE or raised.peer_lost:
        name = _BY_TYPE.get(kind_of(raised), name)
    return Classification(collected.first, name, collected.text)
