"""Parse kubeconfig files, on nodes that may have no parser of YAML: the block style in which programs write them, and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_ENTRY: Final = re.compile(r"""(?P<key>[\w./:@-]+|"[^"\\]*"|'[^']*'):(?:[ \t]+(?P<value>.*))?$""", re.ASCII)
_FLOW: Final[dict[str, Any]] = {"{}": {}, "[]": [], "null": None, "~": None, "": None}
"""Values that are no text. Numbers and booleans stay text: nothing in a kubeconfig needs them otherwise."""
_STRUCTURE: Final = ("{", "[", "|", ">", "&", "*", "!")
"""Beginnings of values that programs do not write into a kubeconfig."""
_QUOTED: Final = re.compile(r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^']|'')*')(?:\s+\#.*)?""")
DEEPEST: Final = 32


class NotUnderstood(ValueError):
    """The text is no kubeconfig that this module understands."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    indent: int
    text: str


def parse(text: str) -> dict[str, Any]:
    """Return the tables in a kubeconfig; texts are unquoted. Raise `NotUnderstood`, with the number of the line."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise NotUnderstood("it is neither YAML in block style nor JSON") from None
    else:
        lines = [
            _Line(number, len(line) - len(line.lstrip(" ")), line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#") and line.strip() != "---"
        ]
        found, rest = _block(lines, 0, 0)
        if rest < len(lines):
            raise _error(lines[rest])
    if not isinstance(found, dict):
        raise NotUnderstood("it holds no tables")
    return found


def _error(line: _Line) -> NotUnderstood:
    """Return an error that names the line, whose text may be a secret."""
    return NotUnderstood(f"line {line.number} is not as programs write it")


def _block(lines: list[_Line], at: int, depth: int) -> tuple[Any, int]:
    """Return the table or list that begins with line *at*, and the number of the line after it."""
    if at >= len(lines):
        return None, at
    if depth > DEEPEST:
        raise _error(lines[at])
    return (_list if lines[at].text.startswith("-") else _table)(lines, at, depth)


def _table(lines: list[_Line], at: int, depth: int) -> tuple[dict[str, Any], int]:
    indent, found = lines[at].indent, dict[str, Any]()
    while at < len(lines) and lines[at].indent == indent and not lines[at].text.startswith("- "):
        entry = _ENTRY.match(lines[at].text)
        if entry is None:
            raise _error(lines[at])
        key, value = _unquoted(entry["key"], lines[at]), (entry["value"] or "").strip()
        at += 1
        if not value and at < len(lines) and (lines[at].indent > indent or (lines[at].indent == indent and lines[at].text.startswith("-"))):
            found[key], at = _block(lines, at, depth + 1)
        else:
            found[key] = _value(value, lines[at - 1])
    return found, at


def _list(lines: list[_Line], at: int, depth: int) -> tuple[list[Any], int]:
    indent, found = lines[at].indent, list[Any]()
    while at < len(lines) and lines[at].indent == indent and lines[at].text.startswith("-"):
        line = lines[at]
        inner = line.text[1:].lstrip(" ")
        if inner and _ENTRY.match(inner):
            # The rest of the line is the first entry of a table that goes on below it.
            lines[at] = _Line(line.number, indent + len(line.text) - len(inner), inner)
            item, at = _block(lines, at, depth + 1)
        elif inner:
            item, at = _value(inner, line), at + 1
        else:
            item, at = _block(lines, at + 1, depth + 1)
        found.append(item)
    return found, at


def _value(text: str, line: _Line) -> Any:  # noqa: ANN401 (text, or an empty value)
    if text in _FLOW:
        return _FLOW[text]
    if text.startswith(_STRUCTURE):
        raise _error(line)
    if text.startswith(("'", '"')):
        quoted = _QUOTED.fullmatch(text)
        if quoted is None:
            raise _error(line)
        return _unquoted(quoted["text"], line)
    return re.split(r"\s#", text)[0].strip()


def _unquoted(text: str, line: _Line) -> str:
    """Return a text without its quotes, if it has any."""
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            raise _error(line) from None
    return text[1:-1].replace("''", "'") if text.startswith("'") else text
