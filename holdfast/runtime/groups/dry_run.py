"""Where a process goes through the script with no peer running and no message sent: a standby that warms up, or a rank about to join."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from torch import Tensor

from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import first_exchanges, recorded_collectives
from holdfast.runtime.groups.first_exchanges import ExchangeReplay, FirstExchanges, NotRepeatable, ReplayDiverged
from holdfast.runtime.groups.neutral_results import as_equals
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recorded_collectives import RecordedCollectives, key_of

_log = logging.getLogger("holdfast.runtime")

REFUSED_SECONDS: Final = 120.0
"""How long a process that cannot take its rank over waits for its end, which the flow orders at once."""


class DryRun:
    """Answers operations without peers: before the first step from the record of the rank, in a step from a tape or as equals would."""

    def __init__(self, played: RecordedCollectives | None, groups: list[ManagedGroup], *, standby: int | None = None) -> None:
        self._recording, self._groups = played, groups
        self.standby = standby
        """The number of this standby; none in a rank that joins at once."""
        self.known: set[str] = set() if played is None else set(played.entries)
        """Operations that were met here or on the tape."""
        self.calls = self.played = 0
        self.record: Callable[[], tuple[int, FirstExchanges | None]] | None = None
        """Gives the generation that is being come into, and the record of the rank, if anybody has one."""
        self.strayed = ""
        """Why the beginning of the script was not repeated as the record has it; only a standby goes on then."""
        self._replay: ExchangeReplay | None = None
        self._began = False
        self._generation = 0

    @classmethod
    def from_env(cls, groups: list[ManagedGroup], environment: Mapping[str, str] = os.environ) -> DryRun:
        """Return the sandbox that *environment* asks for."""
        standby, folder = environment.get("HOLDFAST_STANDBY"), recorded_collectives.folder(environment)
        path = None if folder is None else folder / f"{name_of(environment, recorded_collectives.read_roles(folder))}.pt"
        made = cls(RecordedCollectives.read(path), groups, standby=int(standby) if standby else None)
        if made.standby is not None:
            made.record = lambda: (0, None if path is None else recorded_collectives.read_startup(path.with_suffix(".startup")))
        return made

    @property
    def replay(self) -> ExchangeReplay | None:
        """What answers before the first step, once there was something to answer; none where nobody has the rank's record."""
        if self.record is not None and not self._began:
            self._began = True
            self._generation, record = self.record()
            if record is None:
                self._stray("no living rank has the record of what this rank received before its first step")
            else:
                self._replay = ExchangeReplay(record)
        return self._replay

    def answer(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> int:
        """Put into *outputs* what the peers would have brought about; return who sent it, where it is taken from anybody."""
        place = first_exchanges.place_of(self._groups, group)
        source = None if self.stepping else self._repeat(group, place, name, outputs, inputs)
        if source is not None or not outputs:
            return source or 0  # a send and a barrier change nothing here
        played = self._recording is not None and self._recording.play(key_of(place, name, outputs, inputs), outputs)
        self._count(place, name, outputs, inputs, played=played)
        if not played:
            if function := first_exchanges.caller():
                self._stray(f"{first_exchanges.script_line()}: nobody has recorded what {function}() brought there")
                raise NotRepeatable(self.strayed)
            as_equals(name, group.rank(), outputs, inputs)
        return 0

    def _repeat(self, group: ManagedGroup, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> int | None:
        """Answer from the record; return who sent it, or nothing where the record does not answer."""
        replay = self.replay
        if replay is None:
            return None
        try:
            answered, source = replay.answer(place, name, outputs, inputs)
        except ReplayDiverged as error:
            self._stray(str(error), goes_on=error.goes_on)
            return 0 if error.goes_on else None
        self._count(place, name, outputs, inputs, played=True)
        if not answered:
            as_equals(name, group.rank(), outputs, inputs)
        return source

    @property
    def notes(self) -> list[str]:
        """Return where this process gave other values than the one before it, in what it repeated."""
        return [] if self._replay is None else self._replay.notes

    stepping = False
    """The script has come to its first step."""

    def begin_steps(self, restored: set[int]) -> None:
        """Be sure that the beginning was repeated; what lies in the memory that the session restores (*restored*) need not have been."""
        if self.stepping:
            return
        replay = self.replay
        self.stepping = True
        if replay is not None and not self.strayed:
            try:
                replay.end(restored)
            except ReplayDiverged as error:
                self._stray(str(error))

    def _count(self, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor], *, played: bool) -> None:
        if outputs:
            self.known.add(key_of(place, name, outputs, inputs))
            self.calls += 1
            self.played += played

    def _stray(self, why: str, *, goes_on: bool = False) -> None:
        """Go on without the record in a standby, which is no rank yet; else have the flow start all ranks again."""
        self.strayed = self.strayed or why
        if not goes_on:
            self._replay = None
        if self.standby is None:
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        """Say that this process cannot take the rank over, and wait for its end: it would go on with other values than the other ranks."""
        why = f"what the ranks exchanged before their first step cannot be repeated: {why}"
        _log.error("%s", why)
        link().report("cannot", generation=self._generation, why=why)
        time.sleep(REFUSED_SECONDS)
        raise NotRepeatable(why)


def name_of(environment: Mapping[str, str], written: list[list[int]]) -> str:
    """Return the name of the tape of the role that this process stands for: the lowest rank of the role recorded it."""
    rank = int(environment["RANK"])
    roles: list[list[int]] = json.loads(environment.get("HOLDFAST_ROLES") or "[]") or written
    first = next((min(role) for role in roles if rank in role), rank)
    return f"world-{environment['WORLD_SIZE']}-rank-{first}"
