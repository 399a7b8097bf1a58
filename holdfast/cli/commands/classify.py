"""`holdfast classify`: what the lines of a log tell of."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, Final

from detectors.catalogue import CATALOGUE
from holdfast.classify import Classification, Page, classify
from holdfast.classify.log_stream import decoded
from holdfast.cli.output import hint, say
from holdfast.errors import NotReadable
from holdfast.report.wording import count, plural, visible

QUOTED: Final = 500
"""Characters of a line that a verdict repeats."""
_BENIGN: Final = ', "verdict": "benign", "kind": null, "blame": "none", "recommended_action": null, "action": null}\n'


def classify_log(path: Path | None, *, as_json: bool) -> int:
    """Judge the log at *path*, or what comes in; 0 whatever was found in it."""
    if path is None or str(path) == "-":
        if sys.stdin is None:
            raise NotReadable("the log", "that comes in", "standard input is closed", "Name a file, or pipe a log in")
        _tell(sys.stdin.buffer, "that comes in", as_json=as_json)
        return 0
    try:
        with path.open("rb") as log:
            _tell(log, str(path), as_json=as_json)
    except IsADirectoryError as error:
        raise NotReadable("the log", str(path), "it is a directory", "Name a file in it") from error
    except FileNotFoundError as error:
        raise NotReadable("the log", str(path), "there is no such file", "Check the path") from error
    except PermissionError as error:
        raise NotReadable("the log", str(path), error.strerror or str(error)) from error
    return 0


def _tell(log: IO[bytes], name: str, *, as_json: bool) -> None:
    read: Callable[[int], bytes] = log.read1 if isinstance(log, io.BufferedReader) else log.read
    found: Counter[str] = Counter()
    lines = 0
    for page in classify(decoded(read, name)):
        lines += page.count
        found.update(fault.kind for fault in page.faults)
        if as_json:
            sys.stdout.write(json_lines(page))
        else:
            for fault in page.faults:
                say(_for_a_person(fault))
        sys.stdout.flush()
    if not as_json:
        _sum_up(lines, found)


def json_lines(page: Page) -> str:
    """Return the verdicts on *page*, one JSON object a line; those on tracebacks stand where they became whole."""
    told = {fault.line: _json_line(fault) for fault in page.faults if page.first <= fault.line}
    earlier = "".join(_json_line(fault) for fault in page.faults if fault.line < page.first)
    numbers: Iterable[int] = range(page.first, page.first + page.count)
    if not told and not page.inside:
        return earlier + "".join([f'{{"line": {number}{_BENIGN}' for number in numbers])
    silent = page.inside
    rest = (told.get(number) or ("" if number in silent else f'{{"line": {number}{_BENIGN}') for number in numbers)
    return earlier + "".join(rest)


def _json_line(fault: Classification) -> str:
    return f'{{"line": {fault.line}{_tail(fault.kind)}, "text": {encode_basestring_ascii(fault.text[:QUOTED])}}}\n'


_TAILS: Final[dict[str, str]] = {}


def _tail(kind: str) -> str:
    """Return what every verdict of *kind* says, made once."""
    if kind not in _TAILS:
        entry = CATALOGUE[kind]
        said = {
            "verdict": "fault",
            "kind": kind,
            "blame": entry.blame,
            "recommended_action": entry.recommended_action,
            "action": entry.action,
        }
        _TAILS[kind] = ", " + json.dumps(said)[1:-1]
    return _TAILS[kind]


def _for_a_person(fault: Classification) -> str:
    entry = CATALOGUE[fault.kind]
    first, *more = visible(fault.text[:QUOTED]).splitlines() or [""]
    last = f" … {more[-1].strip()}" if more else ""
    return f"{fault.line}: {fault.kind} ({entry.recommended_action}, blames {entry.blame}): {first.strip()}{last}"


def _sum_up(lines: int, found: Counter[str]) -> None:
    """Say on the error output what was found, so that the lines themselves can be piped."""
    hint(f"{count(lines)} lines, {plural(found.total(), 'fault')}" + (f" of {plural(len(found), 'kind')}:" if found else "."))
    for kind, times in found.most_common():
        hint(f"  {times:>7}  {kind}: {CATALOGUE[kind].title}")
    if found:
        hint(f"`holdfast faults show {found.most_common(1)[0][0]}` says what to do.")
