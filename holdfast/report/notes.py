"""Notes of a job's history without their repetitions: the same note that came eleven times is one line, with how often and when last."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from holdfast.history.models import JobEvent
from holdfast.report.wording import plural, some

_NUMBER: Final = re.compile(
    r"(?<![\w-])(?<!rank )(?<!ranks )(?<!incident )(?<!question )(?<!generation )[+-]?\d[\d,.]*(?: ?(?:%|ms|s|min|h|d)\b)?"
)
"""A measured value. A number that is part of a name (`node-3`, `rank 1`, `generation 2`) is none."""


_NAME: Final = re.compile(r"\w[\w.-]*\w|\w")
_RANK_THERE: Final = re.compile(r"\brank \d+ on (?=@)")
_SHOWN: Final = 4
"""Other nodes that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note, when it came first and last, how often, and on which nodes."""

    at: float
    last: float
    text: str
    id: str
    times: int = 1
    nodes: tuple[str, ...] = ()
    """Those that the later ones named and the first did not."""

    @property
    def repeated(self) -> str:
        """Say how often it came, and of which other nodes; empty where it came once."""
        also = f", also of {some(self.nodes, _SHOWN)}" if self.nodes else ""
        return "" if self.times == 1 else f"{plural(self.times, 'time')}{also}"


def cause_of(text: str, nodes: Collection[str] = ()) -> str:
    """Return *text* without its measured values and the names of *nodes*: two notes of one cause are the same in this form."""
    unnamed = _NAME.sub(lambda found: "@" if found[0] in nodes else found[0], text) if nodes else text
    return _NUMBER.sub("#", _RANK_THERE.sub("rank # on ", unnamed))


def collapsed(job_events: Iterable[JobEvent], nodes: Collection[str] = ()) -> list[Note]:
    """Return the notes in the order in which each came first; of those with one cause only the first text, counted."""
    found: dict[str, Note] = {}
    for remark in job_events:
        key = cause_of(remark.text, nodes)
        known = found.get(key)
        if known is None:
            found[key] = Note(at=remark.at, last=remark.at, text=remark.text, id=remark.id)
            continue
        named = [name for name in _NAME.findall(remark.text) if name in nodes and name not in (*_NAME.findall(known.text), *known.nodes)]
        found[key] = replace(known, last=remark.at, times=known.times + 1, nodes=(*known.nodes, *named))
    return list(found.values())
