"""`holdfast faults find`: which lines of a log are faults."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, Final

from holdfast.classify import Classification, Page, classify
from holdfast.classify.events import Event, Events
from holdfast.classify.log_stream import decoded
from holdfast.classify.origin import NAMES, acts_in, places_of
from holdfast.cli.output import echo, hint
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import TAKES_NODE_OUT, FaultKind
from holdfast.detectors.confirmation import acts_alone
from holdfast.detectors.log_lines.heuristics import OTHERS
from holdfast.errors import NotReadable
from holdfast.plurals import plural
from holdfast.report.text.wording import visible

QUOTED: Final = 500
"""Characters of a line that a classification repeats."""
EXAMPLES: Final = 2
"""Lines that are shown of each kind that only words tell."""
_BENIGN: Final = (
    ', "classification": "benign", "kind": null, "attributed_to": "none", "recommended_action": null, "action": null, "acts": false}\n'
)


def classify_log(file: Path | None, *, log: str | None, every: bool, as_json: bool) -> int:
    """Classify the log at a path, or standard input; return 0 whatever is in it."""
    output = _Output(log=NAMES[log] if log else "", every=every, as_json=as_json)
    if file is None or str(file) == "-":
        if sys.stdin is None:
            raise NotReadable("the log", "on standard input", "standard input is closed", "Name a file, or pipe a log in")
        output.write(sys.stdin.buffer, "on standard input")
        return 0
    try:
        with file.open("rb") as stream:
            output.write(stream, str(file))
    except IsADirectoryError as error:
        raise NotReadable("the log", str(file), "it is a directory", "Name a file in it") from error
    except FileNotFoundError as error:
        raise NotReadable("the log", str(file), "there is no such file", "Check the path") from error
    except PermissionError as error:
        raise NotReadable("the log", str(file), error.strerror or str(error)) from error
    return 0


@dataclass(slots=True, kw_only=True)
class _Output:
    """Writes what is found in a log."""

    log: str
    """What the log is, one of `LOGS`; empty: each line shows it, or does not."""
    every: bool
    """Whether to write each line that only its words make a fault."""
    as_json: bool
    _found: Counter[str] = field(default_factory=Counter)
    _others: dict[str, list[str]] = field(default_factory=dict)
    """Kinds of lines that only their words make faults, with the first such lines."""
    _events: int = 0

    def write(self, stream: IO[bytes], name: str) -> None:
        """Write what is found in *stream*."""
        read: Callable[[int], bytes] = stream.read1 if isinstance(stream, io.BufferedReader) else stream.read
        events, lines = Events(), 0
        for page in classify(decoded(read, name)):
            lines += page.count
            self._found.update(fault.kind for fault in page.faults)
            if self.as_json:
                sys.stdout.write(json_lines(page, self.log))
            else:  # what has arrived is shown, and waits for no further line
                self._show([*events.feed(page.faults, lines), *events.finish()])
            sys.stdout.flush()
        if not self.as_json:
            self._sum_up(lines)

    def _show(self, complete: list[Event]) -> None:
        """Write events in the order of their first lines."""
        for event in sorted(complete, key=lambda one: one.first.line):
            kind = event.first.kind
            if self.every or kind not in OTHERS:
                self._events += 1
                echo(_text(event, self.log))
            elif len(examples := self._others.setdefault(kind, [])) < EXAMPLES:
                examples.append(_text(event, self.log, short=True))

    def _sum_up(self, lines: int) -> None:
        for kind, examples in self._others.items():
            echo(f"{kind}: {plural(self._found[kind], 'line')} by words alone, such as")
            for example in examples:
                echo(f"  {example}")
        known = Counter({kind: times for kind, times in self._found.items() if kind not in self._others})
        of_kinds = f" of {plural(len(known), 'kind')}:" if known else "."
        together = f" in {plural(self._events, 'event')}" if self._events < known.total() else ""
        hint(f"{plural(lines, 'line')}, {plural(known.total(), 'fault')}{together}{of_kinds}")
        for kind, times in known.most_common():
            hint(f"  {times:>7}  {kind}: {CATALOGUE[kind].title}")
        if self._others:
            words = self._found.total() - known.total()
            hint(f"{plural(words, 'further line')} without a signature, which nothing is done about; `--all` shows each.")
        if known:
            hint(f"`holdfast faults show {known.most_common(1)[0][0]}` explains what to do.")


def json_lines(page: Page, log: str = "") -> str:
    """Return the classification of *page*, one JSON object a line; that of a traceback is where its last line was read."""
    here = {fault.line: _json_line(fault, log) for fault in page.faults if page.first <= fault.line}
    earlier = "".join(_json_line(fault, log) for fault in page.faults if fault.line < page.first)
    rows = [f'{{"line": {number}{_BENIGN}' for number in range(page.first, page.first + page.count)]
    for number in page.inside:
        rows[number - page.first] = ""
    for number, row in here.items():
        rows[number - page.first] = row
    return earlier + "".join(rows)


def _json_line(fault: Classification, log: str) -> str:
    acts = "true" if acts_in(CATALOGUE[fault.kind], fault.text, log) else "false"
    text = encode_basestring_ascii(fault.text[:QUOTED])
    return f'{{"line": {fault.line}{_json_of_kind(fault.kind)}, "acts": {acts}, "text": {text}}}\n'


@functools.cache
def _json_of_kind(kind: str) -> str:
    """Return the fields that are the same for every fault of *kind*."""
    entry = CATALOGUE[kind]
    fields = {
        "classification": "fault",
        "kind": kind,
        "attributed_to": entry.attributed_to,
        "recommended_action": entry.recommended_action,
        "action": entry.action,
    }
    return ", " + json.dumps(fields)[1:-1]


def _text(event: Event, log: str, *, short: bool = False) -> str:
    """Return an event as one line: its first fault, and how many more lines are part of it; *short*: without its kind."""
    first = _words(event.first) if short else _line(event.first, log)
    more = event.count - 1
    if not more:
        return first
    others = ", ".join(kind for kind in event.kinds if kind != event.first.kind)
    return f"{first} (and {plural(more, 'more line')} to {event.last}{f': {others}' if others else ''})"


def _line(fault: Classification, log: str) -> str:
    entry = CATALOGUE[fault.kind]
    action = f"{entry.recommended_action}{_condition(entry, fault.text, log)}"
    number, _, words = _words(fault).partition(": ")
    return f"{number}: {fault.kind} ({action}, attributed to {entry.attributed_to}): {words}"


def _words(fault: Classification) -> str:
    first, *more = visible(fault.text[:QUOTED]).splitlines() or [""]
    last = f" … {more[-1].strip()}" if more else ""
    return f"{fault.line}: {first.strip()}{last}"


def _condition(entry: FaultKind, text: str, log: str) -> str:
    """Return on what condition a node is left because of *text*: none if it proves the fault, or if no node is left for this kind."""
    if entry.recommended_action not in TAKES_NODE_OUT or acts_in(entry, text, log):
        return ""
    if log and log not in entry.logs:
        return f" if {places_of(entry)} says it" if entry.logs else " if measured"
    return f" if it is a line of {places_of(entry)}" if acts_alone(entry, text) else " if confirmed"
