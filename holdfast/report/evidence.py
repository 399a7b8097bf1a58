"""A fault's evidence in a form to show: short values in a line, long ones in a block of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.report import wording

LONGEST: Final = 8000
"""Characters of one piece of evidence that are shown; the history has all of it."""
_LINE: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of evidence: its *name*, its *text*, and whether it is a *block*."""

    name: str
    text: str
    block: bool


def pieces(evidence: Mapping[str, Any], *, longest: int = LONGEST) -> Iterator[Piece]:
    """Yield the pieces of *evidence* in the order given, without those that say nothing."""
    for name, value in evidence.items():
        if value is None or value in ("", [], {}):
            continue
        text = wording.clipped(_text(value), longest)
        yield Piece(name=str(name).replace("_", " "), text=text, block="\n" in text or len(text) > _LINE)


def _text(value: object) -> str:
    match value:
        case str():
            return value
        case bool():
            return "yes" if value else "no"
        case list() if all(isinstance(item, str | int) for item in value):
            return ("\n" if any(isinstance(item, str) for item in value) else ", ").join(map(str, value))
        case list() | dict():
            return json.dumps(value, indent=2, ensure_ascii=False, default=str)
        case _:
            return str(value)
