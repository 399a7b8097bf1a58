"""Put faults of a log that belong together into one event: repetitions, and several lines about one fault.

An Xid and its explanation, an NVSwitch error and its data lines, the retries of a disk: a person reads them once, with their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.classify.classifier import Classification
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.associations import Scope, between
from holdfast.detectors.causes import device_in
from holdfast.detectors.log_lines.heuristics import OTHERS

GAP: Final = 20
"""Lines after which a further line is another event."""
MOST_OPEN: Final = 64
"""Events that are open at once: the oldest is closed when there are more."""
SURELY: Final = 0.5
"""How strongly the first fault has to explain a later one that joins its event, 0 to 1."""


@dataclass(slots=True)
class Event:
    """Faults that belong together; the first one stands for them."""

    first: Classification
    last: int
    """Line of the newest one."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Kinds of its lines, with their numbers."""

    @property
    def count(self) -> int:
        """Number of its faults."""
        return self.kinds.total()


class Events:
    """Puts faults into events, in the order of their lines; memory is bounded."""

    def __init__(self) -> None:
        self._open: list[Event] = []

    def feed(self, faults: Iterable[Classification], until: int) -> Iterator[Event]:
        """Yield the events that are complete once all lines up to *until* were read."""
        for fault in sorted(faults):
            yield from self._close(fault.line)
            event = next((one for one in self._open if _belongs(one, fault)), None)
            if event is None:
                self._open.append(event := Event(first=fault, last=fault.line))
                if len(self._open) > MOST_OPEN:
                    yield self._open.pop(0)
            event.last = fault.line + fault.text.count("\n")
            event.kinds[fault.kind] += 1
        yield from self._close(until)

    def finish(self) -> Iterator[Event]:
        """Yield the events that are still open."""
        yield from self._open
        self._open.clear()

    def _close(self, line: int) -> Iterator[Event]:
        done = [one for one in self._open if line - one.last > GAP]
        self._open = [one for one in self._open if line - one.last <= GAP]
        yield from done


def _belongs(event: Event, fault: Classification) -> bool:
    """Return whether *fault* repeats *event*, or follows from it and is of the same device, or of the same log if one names none."""
    one, other = device_in(event.first.text), device_in(fault.text)
    if one and other and one != other:
        return False
    if fault.kind == event.first.kind:
        return one == other
    if not (one and other) and not _share_a_log(event.first.kind, fault.kind):
        return False
    if event.first.kind in OTHERS:
        return False  # such lines are counted only, and nothing that a signature knows is counted with them
    rules = between(event.first.kind, fault.kind)
    return any(rule.strength >= SURELY and rule.scope in {Scope.DEVICE, Scope.NODE, Scope.RANK} for rule in rules)


def _share_a_log(one: str, other: str) -> bool:
    """Return whether lines of both kinds are written to the same log: those of two logs are side by side in a mixed one only by chance."""
    return not set(CATALOGUE[one].logs).isdisjoint(CATALOGUE[other].logs)
