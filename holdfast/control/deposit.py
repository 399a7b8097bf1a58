"""Rows that the history does not take now, left with two agents: the flow that comes next has them, on whichever host it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.control.channel import AgentChannel
from holdfast.control.fleet import Fleet
from holdfast.errors import WorldError
from holdfast.history import History
from holdfast.history.changes import Change, write
from holdfast.history.spill import set_aside
from holdfast.log import note

log = logging.getLogger("holdfast.control")

KEEPERS: Final = 2
"""Agents that keep the rows: one may be lost."""
ANSWER: Final = 2.0
"""Seconds that one may take."""
ROWS: Final = 200
"""Rows of one order."""
NUMBER: Final = "n"
"""Under which a row's number travels with it."""


class Deposit:
    """What the recorder of one flow leaves with its agents."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._held: dict[AgentChannel, int] = {}
        """Number of the first row that an agent does not have."""
        self._failing = False

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Have two agents keep all that waits, numbered from *first* to *until*; *records* gives it from a number on. Never raise."""
        for channel in self._keepers():
            since = max(first, self._held.get(channel, first))
            if since >= until:
                continue
            try:
                for part in _parts(since, records(since)):
                    channel.order("deposit", seconds=ANSWER, records=part)
                    self._held[channel] = part[-1][NUMBER] + 1
            except Exception as error:  # noqa: BLE001 (the thread that puts rows on the disk must not end with it)
                if not self._failing:
                    note(log, "deposit.failing", level=logging.WARNING, node=channel.node, why=error)
                self._failing = True
            else:
                self._failing = False

    def forget(self) -> None:
        """Have the agents forget all: the history has it."""
        for channel in self._held:
            if not channel.gone:
                try:
                    channel.order("withdraw", seconds=ANSWER)
                except WorldError as error:  # what is left there is written a second time, which changes nothing
                    note(log, "deposit.stays", node=channel.node, why=error)
        self._held.clear()

    def _keepers(self) -> list[AgentChannel]:
        """Return the agents to ask, those first that have something already."""
        alive = [channel for _, channel in sorted(self._fleet.channels.copy().items()) if not (channel.gone or channel.away)]
        return sorted(alive, key=lambda channel: channel not in self._held)[:KEEPERS]


def collect(fleet: Fleet, nodes: Iterable[str], history: History, spill: Path) -> int:
    """Write what a flow before has left with the agents of *nodes*, have them forget it, and return how many rows there were."""
    found: dict[tuple[int, int], Change] = {}
    answers = fleet.each(nodes, lambda node: list(_of(fleet, node)))
    for records in answers.values():
        for record in records if not isinstance(records, WorldError) else ():
            try:
                found[int(record["by"]["epoch"]), int(record[NUMBER])] = Change.from_record(record)
            except (ValueError, KeyError, TypeError) as error:
                note(log, "deposit.damaged", level=logging.WARNING, why=error)
    if found:
        write(history.engine, [found[number] for number in sorted(found)], lambda change, error: set_aside(spill, change, error))
        fleet.order([node for node, records in answers.items() if records], "withdraw")
        note(log, "deposit.collected", changes=len(found))
    return len(found)


def _of(fleet: Fleet, node: str) -> Iterator[dict[str, Any]]:
    """Yield all that is left with the agent of *node*."""
    place: int | None = 0
    while place is not None:
        answer = fleet.channel(node).order("deposited", since=place)
        yield from answer["records"]
        place = answer["next"] if answer["next"] is None or answer["next"] > place else None  # or it would go on for ever


def _parts(since: int, records: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield *records* with their numbers, so many at a time."""
    numbered = [{**record, NUMBER: number} for number, record in enumerate(records, since)]
    for begin in range(0, len(numbered), ROWS):
        yield numbered[begin : begin + ROWS]
