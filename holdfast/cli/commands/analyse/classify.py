"""`holdfast faults find`: which lines of a log are faults."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, Final

from holdfast.classify import Classification, Page, classify
from holdfast.classify.events import Event, Events
from holdfast.classify.log_stream import decoded
from holdfast.cli.output import echo, hint
from holdfast.detectors.catalogue import CATALOGUE, TAKES_NODE_OUT
from holdfast.detectors.confirmation import acts_alone
from holdfast.errors import NotReadable
from holdfast.report.text.wording import plural, visible

QUOTED: Final = 500
"""Characters of a line that a classification repeats."""
_BENIGN: Final = (
    ', "classification": "benign", "kind": null, "attributed_to": "none", "recommended_action": null, "action": null, "acts": false}\n'
)


def classify_log(log: Path | None, *, as_json: bool) -> int:
    """Classify the log at a path, or standard input; return 0 whatever is in it."""
    if log is None or str(log) == "-":
        if sys.stdin is None:
            raise NotReadable("the log", "on standard input", "standard input is closed", "Name a file, or pipe a log in")
        _classify(sys.stdin.buffer, "on standard input", as_json=as_json)
        return 0
    try:
        with log.open("rb") as file:
            _classify(file, str(log), as_json=as_json)
    except IsADirectoryError as error:
        raise NotReadable("the log", str(log), "it is a directory", "Name a file in it") from error
    except FileNotFoundError as error:
        raise NotReadable("the log", str(log), "there is no such file", "Check the path") from error
    except PermissionError as error:
        raise NotReadable("the log", str(log), error.strerror or str(error)) from error
    return 0


def _classify(log: IO[bytes], name: str, *, as_json: bool) -> None:
    read: Callable[[int], bytes] = log.read1 if isinstance(log, io.BufferedReader) else log.read
    found: Counter[str] = Counter()
    events, lines, number = Events(), 0, 0

    def show(complete: Iterable[Event]) -> int:
        shown = [_text(event) for event in complete]
        for text in shown:
            echo(text)
        return len(shown)

    for page in classify(decoded(read, name)):
        lines += page.count
        found.update(fault.kind for fault in page.faults)
        if as_json:
            sys.stdout.write(json_lines(page))
        else:
            number += show([*events.feed(page.faults, lines), *events.finish()])  # what has arrived is shown, and waits for no further line
        sys.stdout.flush()
    if as_json:
        return
    of_kinds = f" of {plural(len(found), 'kind')}:" if found else "."
    together = f" in {plural(number, 'event')}" if number < found.total() else ""
    hint(f"{plural(lines, 'line')}, {plural(found.total(), 'fault')}{together}{of_kinds}")
    for kind, times in found.most_common():
        hint(f"  {times:>7}  {kind}: {CATALOGUE[kind].title}")
    if found:
        hint(f"`holdfast faults show {found.most_common(1)[0][0]}` explains what to do.")


def json_lines(page: Page) -> str:
    """Return the classification of *page*, one JSON object a line; that of a traceback is where its last line was read."""
    here = {fault.line: _json_line(fault) for fault in page.faults if page.first <= fault.line}
    earlier = "".join(_json_line(fault) for fault in page.faults if fault.line < page.first)
    rows = [f'{{"line": {number}{_BENIGN}' for number in range(page.first, page.first + page.count)]
    for number in page.inside:
        rows[number - page.first] = ""
    for number, row in here.items():
        rows[number - page.first] = row
    return earlier + "".join(rows)


def _json_line(fault: Classification) -> str:
    acts = "true" if acts_alone(CATALOGUE[fault.kind], fault.text) else "false"
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


def _text(event: Event) -> str:
    """Return an event as one line: its first fault, and how many more lines are part of it."""
    more = event.count - 1
    if not more:
        return _line(event.first)
    others = ", ".join(kind for kind in event.kinds if kind != event.first.kind)
    return f"{_line(event.first)} (and {plural(more, 'more line')} to {event.last}{f': {others}' if others else ''})"


def _line(fault: Classification) -> str:
    entry = CATALOGUE[fault.kind]
    first, *more = visible(fault.text[:QUOTED]).splitlines() or [""]
    last = f" … {more[-1].strip()}" if more else ""
    action = str(entry.recommended_action)
    if entry.recommended_action in TAKES_NODE_OUT and not acts_alone(entry, fault.text):
        action += " if confirmed"
    return f"{fault.line}: {fault.kind} ({action}, attributed to {entry.attributed_to}): {first.strip()}{last}"
