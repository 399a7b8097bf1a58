"""Job events without repetitions: the same note that came eleven times is one line, with the count and the last time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from holdfast.history.models import JobEvent
from holdfast.plurals import plural
from holdfast.report.text.wording import listing

_NUMBER: Final = re.compile(
    r"(?<![\w-])(?<!rank )(?<!ranks )(?<!incident )(?<!approval )(?<!generation )[+-]?\d[\d,.]*(?: ?(?:%|ms|s|min|h|d)\b)?"
)
"""A measured value, but no number that is part of a name (`node-3`, `rank 1`, `generation 2`)."""
_NAME: Final = re.compile(r"\w[\w.-]*\w|\w")
_RANK_ON_NODE: Final = re.compile(r"\brank \d+ on (?=@)")
_MOST_NODES: Final = 4
"""Other nodes that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note, when it came first and last, how often, and about which nodes."""

    at: float
    last: float
    text: str
    id: str
    times: int = 1
    nodes: tuple[str, ...] = ()
    """Nodes that later ones name and the first one does not."""

    @property
    def repeated(self) -> str:
        """Return how often it came and about which other nodes; empty if it came once."""
        also = f", also of {listing(self.nodes, _MOST_NODES)}" if self.nodes else ""
        return "" if self.times == 1 else f"{plural(self.times, 'time')}{also}"


def cause_of(text: str, nodes: Collection[str] = ()) -> str:
    """Return *text* without measured values and names of *nodes*: notes with the same cause are equal in this form."""
    unnamed = _NAME.sub(lambda found: "@" if found[0] in nodes else found[0], text) if nodes else text
    return _NUMBER.sub("#", _RANK_ON_NODE.sub("rank # on ", unnamed))


def collapsed(events: Iterable[JobEvent], nodes: Collection[str] = ()) -> list[Note]:
    """Return the events in order of their first occurrence; events with the same cause become one note with the first text and a count."""
    found: dict[str, Note] = {}
    for event in events:
        key = cause_of(event.text, nodes)
        known = found.get(key)
        if known is None:
            found[key] = Note(at=event.at, last=event.at, text=event.text, id=event.id)
            continue
        named = [name for name in _NAME.findall(event.text) if name in nodes and name not in (*_NAME.findall(known.text), *known.nodes)]
        found[key] = replace(known, last=event.at, times=known.times + 1, nodes=(*known.nodes, *named))
    return list(found.values())
