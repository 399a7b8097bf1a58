"""Where a process goes through the script with no peer running and no message sent: a standby that warms up, or a rank about to join."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from torch import Tensor

from holdfast.runtime.groups import tape
from holdfast.runtime.groups.equals import as_equals
from holdfast.runtime.groups.managed import ManagedGroup
from holdfast.runtime.groups.tape import Tape, key_of


class Sandbox:
    """Answers operations from a tape, and where that has nothing, as a group of equals would."""

    def __init__(self, played: Tape | None, groups: list[ManagedGroup], *, standby: int | None = None) -> None:
        self._tape, self._groups = played, groups
        self.standby = standby
        """The number of this standby; none in a rank that joins at once."""
        self.known: set[str] = set() if played is None else set(played.entries)
        """Operations that were met here or on the tape."""
        self.calls = self.played = 0

    @classmethod
    def from_env(cls, groups: list[ManagedGroup], environment: Mapping[str, str] = os.environ) -> Sandbox:
        """Return the sandbox that *environment* asks for."""
        standby, folder = environment.get("HOLDFAST_STANDBY"), tape.folder(environment)
        path = None if folder is None else folder / f"{name_of(environment, tape.read_roles(folder))}.pt"
        return cls(Tape.read(path), groups, standby=int(standby) if standby else None)

    @property
    def has_tape(self) -> bool:
        """Whether there is a tape to answer from."""
        return self._tape is not None

    def answer(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Put into *outputs* what the peers would have brought about."""
        if not outputs:
            return  # a send and a barrier change nothing here
        place = next((place for place, one in enumerate(self._groups) if one is group), len(self._groups))
        key = key_of(place, name, outputs, inputs)
        self.known.add(key)
        self.calls += 1
        if self._tape is not None and self._tape.play(key, outputs):
            self.played += 1
        else:
            as_equals(name, group.rank(), outputs, inputs)


def name_of(environment: Mapping[str, str], written: list[list[int]]) -> str:
    """Return the name of the tape of the role that this process stands for: the lowest rank of the role recorded it."""
    rank = int(environment["RANK"])
    roles: list[list[int]] = json.loads(environment.get("HOLDFAST_ROLES") or "[]") or written
    first = next((min(role) for role in roles if rank in role), rank)
    return f"world-{environment['WORLD_SIZE']}-rank-{first}"
