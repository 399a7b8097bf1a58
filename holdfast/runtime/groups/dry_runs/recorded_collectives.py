"""Outputs of collectives recorded in a real iteration, so that a hot spare can run one without any peer.

Only outputs are kept, once per role, on disk. Zeros in their place would not do: a count that is reduced to zero and divided by, a mask of
no token, an index out of range end a warm-up in NaN or in an exception. Operations are identified by the index of their group among the
rank's groups, their name and their shapes; identical ones are answered in turn.
"""

from __future__ import annotations

import json
import os
import pickle  # only for the name of its error: a recording is read without running code in it
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.runtime.groups.dry_runs.first_exchanges import FirstExchanges, index_of, shapes_of
from holdfast.runtime.groups.process_group import ManagedGroup

MAX_SMALL: Final = 64 * 1024
"""Bytes of outputs up to which every rank records from the start: what is sent only once (bucket orders, sizes) is small."""
MAX_STARTUP: Final = 2**20
"""Bytes of a rank's record from before its first step up to which it is written to disk too."""
WARM_UP_STEPS: Final = 3
"""Iterations of a warm-up: DDP settles its buckets after the first, a lazy optimizer creates its state in the first."""
_UNREADABLE: Final = (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError)


def key_of(place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return the identity of an operation of the group with index *place*."""
    return f"{place}/{name}/{shapes_of(outputs, inputs)}"


# -- the folder of recordings -----------------------------------------------------------------------------------------


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where recordings lie: next to the checkpoints, which all nodes see."""
    if environment.get("HOLDFAST_RECORDINGS"):
        return Path(environment["HOLDFAST_RECORDINGS"])
    place = environment.get("HOLDFAST_CHECKPOINT_DIR")
    return Path(place) / "recordings" if place else None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Create or replace the file at *path* atomically with what *write* writes; raise ``OSError`` when it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_roles_and_facts(place: Path, roles: list[list[int]], facts: dict[str, Any]) -> None:
    """Write which ranks have the same role, and what all ranks know of each other, for a time when none of them is left."""
    _write(place / "roles.json", lambda path: path.write_text(json.dumps(roles)))
    _write(place / "facts.json", lambda path: path.write_text(json.dumps(facts)))


def read_facts(place: Path | None, world: int) -> dict[str, Any]:
    """Return the facts written by ranks of a world of this size; nothing where there are none."""
    with suppress(*_UNREADABLE):
        facts = json.loads((place / "facts.json").read_text()) if place is not None else {}
        if len(facts.get("groups", ())) == world:
            return dict(facts)
    return {}


def read_roles(place: Path | None) -> list[list[int]]:
    """Return the roles that were written, if any."""
    with suppress(*_UNREADABLE):
        found: list[list[int]] = json.loads((place / "roles.json").read_text()) if place is not None else []
        return found
    return []


def startup_path(place: Path, world: int, rank: int) -> Path:
    """Return the file of what *rank* received before its first step."""
    return place / f"world-{world}-rank-{rank}.startup"


def write_startup(path: Path, data: bytes) -> None:
    """Write what a rank received before its first step."""
    _write(path, lambda temporary: temporary.write_bytes(data))


def read_startup(path: Path) -> FirstExchanges | None:
    """Return the record that `write_startup` wrote, if it can be read."""
    with suppress(*_UNREADABLE):
        return FirstExchanges.of(path.read_bytes())
    return None


# -- recording and replaying ------------------------------------------------------------------------------------------


class CollectiveRecorder:
    """Records the outputs of a rank's operations in *groups*."""

    def __init__(self, groups: list[ManagedGroup]) -> None:
        self._groups = groups
        self.entries: dict[str, list[list[Tensor]]] = {}
        self.complete = False
        """Whether large outputs are recorded as well: in one iteration, on one rank of each role."""

    def started(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Return a callback that records the outputs once they are there."""
        size = sum(one.numel() * one.element_size() for one in outputs)
        if not outputs or (size > MAX_SMALL and not self.complete):
            return None
        key = key_of(index_of(self._groups, group), name, outputs, inputs)

        def record(_source: int = 0) -> None:
            self.entries.setdefault(key, []).append([one.detach().cpu().clone() for one in outputs])

        return record

    def write(self, path: Path) -> None:
        """Write the recording atomically; raise ``OSError`` when it cannot be written."""
        try:
            _write(path, lambda temporary: torch.save(self.entries, temporary))
        except RuntimeError as error:  # torch's own error for a full disk, among others
            raise OSError(str(error).partition("\n")[0]) from error


class RecordedCollectives:
    """A recording that a dry run answers from."""

    def __init__(self, entries: dict[str, list[list[Tensor]]]) -> None:
        self.entries = entries
        self._turns: dict[str, int] = {}

    @classmethod
    def read(cls, path: Path | None) -> RecordedCollectives | None:
        """Return the recording at *path*, if there is one that can be read."""
        with suppress(*_UNREADABLE):
            return None if path is None else cls(torch.load(path, weights_only=True))
        return None

    def play(self, key: str, outputs: list[Tensor]) -> bool:
        """Copy the next recorded outputs of *key* into *outputs*; return whether there are any."""
        recorded = self.entries.get(key)
        if not recorded:
            return False
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        with torch.no_grad():
            for one, value in zip(outputs, recorded[turn % len(recorded)], strict=True):
                one.detach().copy_(value)
        return True


class Coverage:
    """Which operations of an activated hot spare its warm-up had met (*known*), and which were new to it."""

    def __init__(self, groups: list[ManagedGroup], known: set[str]) -> None:
        self._groups, self._known = groups, known
        self._met: dict[str, int] = {}

    def started(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Count an operation."""
        key = key_of(index_of(self._groups, group), name, outputs, inputs)
        self._met[key] = self._met.get(key, 0) + 1
        return None

    def summary(self) -> dict[str, Any]:
        """Return the number of calls and of kinds of calls, how many calls were foreseen, and the first kinds that were not."""
        new = sorted(set(self._met) - self._known)
        calls = sum(self._met.values())
        missed = sum(self._met[key] for key in new)
        return {"calls": calls, "foreseen": calls - missed, "kinds": len(self._met), "first_met": new[:50]}
