"""Running the script with no peer and no message: a hot spare that warms up, or a process that is about to take over a rank."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from torch import Tensor

from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.dry_runs import first_exchanges, recorded_collectives
from holdfast.runtime.groups.dry_runs.first_exchanges import ExchangeReplay, FirstExchanges, NotRepeatable, ReplayDiverged
from holdfast.runtime.groups.dry_runs.recorded_collectives import RecordedCollectives, key_of
from holdfast.runtime.groups.operations import fill_neutral_result
from holdfast.runtime.groups.process_group import ManagedGroup

_log = logging.getLogger("holdfast.runtime")

REFUSED_SECONDS: Final = 120.0
"""How long a process that cannot take over its rank waits to be stopped, which the controller does at once."""


class DryRun:
    """Answers operations without peers: before the first step from the rank's record, in a step from a recording or neutrally."""

    def __init__(self, recording: RecordedCollectives | None, groups: list[ManagedGroup], *, hot_spare: int | None = None) -> None:
        self._recording, self._groups = recording, groups
        self.hot_spare = hot_spare
        """The number of this hot spare; none in a process that takes over a rank at once."""
        self.known: set[str] = set() if recording is None else set(recording.entries)
        """Operations that were met here or are in the recording."""
        self.calls = self.played = 0
        self.record: Callable[[], tuple[int, FirstExchanges | None]] | None = None
        """Returns the generation to enter, and the record of the rank, if there is one."""
        self.diverged = ""
        """Why the beginning of the script was not repeated as recorded; only a hot spare continues then."""
        self.stepping = False
        """The script has reached its first step."""
        self._replay: ExchangeReplay | None = None
        self._began = False
        self._generation = 0

    @classmethod
    def from_env(cls, groups: list[ManagedGroup], environment: Mapping[str, str] = os.environ) -> DryRun:
        """Return the dry run that *environment* asks for: from the recording of this process's role, which its lowest rank made."""
        hot_spare, folder = environment.get("HOLDFAST_HOT_SPARE"), recorded_collectives.folder(environment)
        path = None
        if folder is not None:
            rank = int(environment["RANK"])
            roles: list[list[int]] = json.loads(environment.get("HOLDFAST_ROLES") or "[]") or recorded_collectives.read_roles(folder)
            first = next((min(role) for role in roles if rank in role), rank)
            path = folder / f"world-{environment['WORLD_SIZE']}-rank-{first}.pt"
        made = cls(RecordedCollectives.read(path), groups, hot_spare=int(hot_spare) if hot_spare else None)
        if made.hot_spare is not None:
            made.record = lambda: (0, None if path is None else recorded_collectives.read_startup(path.with_suffix(".startup")))
        return made

    @property
    def replay(self) -> ExchangeReplay | None:
        """What answers before the first step, once there was something to answer; none where the rank's record is lost."""
        if self.record is not None and not self._began:
            self._began = True
            self._generation, record = self.record()
            if record is None:
                self._diverge("no surviving rank has the record of what this rank received before its first step")
            else:
                self._replay = ExchangeReplay(record)
        return self._replay

    @property
    def notes(self) -> list[str]:
        """Return where this process gave other values than the one before it, in what it repeated."""
        return [] if self._replay is None else self._replay.notes

    def answer(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> int:
        """Fill *outputs* with what the peers would have sent; return the source rank of a receive from any source."""
        place = first_exchanges.index_of(self._groups, group)
        source = None if self.stepping else self._repeat(group, place, name, outputs, inputs)
        if source is not None or not outputs:
            return source or 0  # a send and a barrier change nothing here
        played = self._recording is not None and self._recording.play(key_of(place, name, outputs, inputs), outputs)
        self._count(place, name, outputs, inputs, played=played)
        if not played:
            if function := first_exchanges.calling_function():
                self._diverge(f"{first_exchanges.script_line()}: the result of {function}() was not recorded")
                raise NotRepeatable(self.diverged)
            fill_neutral_result(name, group.rank(), outputs, inputs)
        return 0

    def _repeat(self, group: ManagedGroup, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> int | None:
        """Answer from the record; return the source rank, or None where the record has no answer."""
        replay = self.replay
        if replay is None:
            return None
        try:
            answered, source = replay.answer(place, name, outputs, inputs)
        except ReplayDiverged as error:
            self._diverge(str(error), continues=error.continues)
            return 0 if error.continues else None
        self._count(place, name, outputs, inputs, played=True)
        if not answered:
            fill_neutral_result(name, group.rank(), outputs, inputs)
        return source

    def begin_steps(self, restored: set[int]) -> None:
        """Check that the beginning was repeated; results in memory that the session restores (*restored*) need not have been."""
        if self.stepping:
            return
        replay = self.replay
        self.stepping = True
        if replay is not None and not self.diverged:
            try:
                replay.end(restored)
            except ReplayDiverged as error:
                self._diverge(str(error))

    def _count(self, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor], *, played: bool) -> None:
        if outputs:
            self.known.add(key_of(place, name, outputs, inputs))
            self.calls += 1
            self.played += played

    def _diverge(self, why: str, *, continues: bool = False) -> None:
        """Continue without the record in a hot spare, which has no rank yet; otherwise have the controller restart all ranks."""
        self.diverged = self.diverged or why
        if not continues:
            self._replay = None
        if self.hot_spare is None:
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        """Report that this process cannot take over the rank, and wait to be stopped: it would have other values than the other ranks."""
        why = f"what the ranks exchanged before their first step cannot be repeated: {why}"
        _log.error("%s", why)
        link().report("recovery-failed", generation=self._generation, why=why)
        time.sleep(REFUSED_SECONDS)
        raise NotRepeatable(why)
