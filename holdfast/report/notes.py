"""Notes of a job's history without their repetitions: the same note that came eleven times is one line, with how often and when last."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from holdfast.history.models import Remark
from holdfast.report.wording import plural

_NUMBER: Final = re.compile(
    r"(?<![\w-])(?<!rank )(?<!ranks )(?<!incident )(?<!question )(?<!generation )[+-]?\d[\d,.]*(?: ?(?:%|ms|s|min|h|d)\b)?"
)
"""A measured value. A number that is part of a name (`node-3`, `rank 1`, `generation 2`) is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note, when it came first and last, and how often."""

    at: float
    last: float
    text: str
    id: str
    times: int = 1

    @property
    def repeated(self) -> str:
        """Say how often it came; empty where it came once."""
        return "" if self.times == 1 else plural(self.times, "time")


def cause_of(text: str) -> str:
    """Return *text* without its measured values: two notes of one cause are the same in this form."""
    return _NUMBER.sub("#", text)


def collapsed(remarks: Iterable[Remark]) -> list[Note]:
    """Return the notes in the order in which each came first; of those with one cause only the first text, counted."""
    found: dict[str, Note] = {}
    for remark in remarks:
        key = cause_of(remark.text)
        known = found.get(key)
        new = Note(at=remark.at, last=remark.at, text=remark.text, id=remark.id)
        found[key] = new if known is None else replace(known, last=remark.at, times=known.times + 1)
    return list(found.values())
