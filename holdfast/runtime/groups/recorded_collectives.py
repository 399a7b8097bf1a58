"""A tape of what collectives brought in a real iteration, so that a standby can go through one with no peer at all.

Only outputs are kept, once per role, on disk. Zeros in their place would not do: a count that is reduced to zero and divided by, a mask of
no token, an index out of range end a warm-up in NaN or in an exception. Operations are known by the place of their group among the groups
of the rank, their name and their shapes; several alike are answered in turn.
"""

from __future__ import annotations

import json
import os
import pickle  # only for the name of its error: a tape is read without running what is in it
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.runtime.groups.first_exchanges import FirstExchanges
from holdfast.runtime.groups.process_group import ManagedGroup

SMALL: Final = 64 * 1024
"""Bytes of outputs up to which every rank records, from the very beginning: what is told only once (bucket orders, sizes) is small."""
LARGEST_STARTUP: Final = 2**20
"""Bytes of a rank's record from before its first step up to which it is left on disk too."""
WARM_UP_STEPS: Final = 3
"""Iterations of a warm-up: DDP settles its buckets after the first, a lazy optimizer makes its state in the first."""


def key_of(place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return what an operation is known by."""
    shapes = ";".join(f"{tuple(one.shape)}{str(one.dtype).removeprefix('torch.')}" for one in (outputs or inputs))
    return f"{place}/{name}/{shapes}"


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where tapes lie: beside the checkpoints, which all nodes see."""
    if environment.get("HOLDFAST_RECORDINGS"):
        return Path(environment["HOLDFAST_RECORDINGS"])
    place = environment.get("HOLDFAST_CHECKPOINT_DIR")
    return Path(place) / "recordings" if place else None


def write_roles(place: Path, roles: list[list[int]]) -> None:
    """Leave beside the tapes which ranks play the same role."""
    place.mkdir(parents=True, exist_ok=True)
    beside = place / f"roles.{os.getpid()}"
    beside.write_text(json.dumps(roles))
    beside.replace(place / "roles.json")


def write_facts(place: Path, facts: dict[str, Any]) -> None:
    """Leave beside the tapes what all ranks know of each other, for when none of them is left."""
    place.mkdir(parents=True, exist_ok=True)
    beside = place / f"facts.{os.getpid()}"
    beside.write_text(json.dumps(facts))
    beside.replace(place / "facts.json")


def read_facts(place: Path | None, world: int) -> dict[str, Any]:
    """Return what ranks of a world of this size have left so; nothing where there is nothing."""
    with suppress(OSError, ValueError, AttributeError):
        facts = json.loads((place / "facts.json").read_text()) if place is not None else {}
        if len(facts.get("groups", ())) == world:
            return dict(facts)
    return {}


def startup_of(place: Path, world: int, rank: int) -> Path:
    """Return where what *rank* received before its first step is left."""
    return place / f"world-{world}-rank-{rank}.startup"


def write_startup(path: Path, data: bytes) -> None:
    """Leave at *path*, beside the tapes, what a rank received before its first step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_startup(path: Path) -> FirstExchanges | None:
    """Return what `write_startup` left at *path*, if it can be read."""
    with suppress(OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        return FirstExchanges.of(path.read_bytes())
    return None


def read_roles(place: Path | None) -> list[list[int]]:
    """Return what `write_roles` left."""
    with suppress(OSError, ValueError):
        found: list[list[int]] = json.loads((place / "roles.json").read_text()) if place is not None else []
        return found
    return []


class CollectiveRecorder:
    """Records what a rank's operations bring."""

    def __init__(self) -> None:
        self.entries: dict[str, list[list[Tensor]]] = {}
        self.whole = False
        """Whether large outputs are recorded as well: in one iteration, on one rank of each role."""

    def begun(self, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Return what records the outputs once they are there."""
        size = sum(one.numel() * one.element_size() for one in outputs)
        if not outputs or (size > SMALL and not self.whole):
            return None
        key = key_of(place, name, outputs, inputs)

        def record(_source: int = 0) -> None:
            self.entries.setdefault(key, []).append([one.detach().cpu().clone() for one in outputs])

        return record

    def write(self, path: Path) -> None:
        """Leave the tape at *path*, whole or not at all; raise ``OSError`` when it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            torch.save(self.entries, beside)
            beside.replace(path)
        except RuntimeError as error:  # torch's own words for a disk that is full, among others
            raise OSError(str(error).partition("\n")[0]) from error
        finally:
            beside.unlink(missing_ok=True)


class RecordedCollectives:
    """What a sandbox answers from."""

    def __init__(self, entries: dict[str, list[list[Tensor]]]) -> None:
        self.entries = entries
        self._turns: dict[str, int] = {}

    @classmethod
    def read(cls, path: Path | None) -> RecordedCollectives | None:
        """Return the tape at *path*, if there is one that can be read."""
        if path is None:
            return None
        with suppress(OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            return cls(torch.load(path, weights_only=True))
        return None

    def play(self, key: str, outputs: list[Tensor]) -> bool:
        """Put the next recorded outputs of *key* into *outputs*; tell whether there are any."""
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
    """Which operations of a promoted standby its warm-up had met, and which were new to it."""

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self.met: dict[str, int] = {}

    def begun(self, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Take note of an operation."""
        key = key_of(place, name, outputs, inputs)
        self.met[key] = self.met.get(key, 0) + 1
        return None

    def told(self) -> dict[str, Any]:
        """Return the figure: calls and kinds of calls that were foreseen, of all; and those that were not."""
        new = sorted(set(self.met) - self._known)
        calls = sum(self.met.values())
        missed = sum(self.met[key] for key in new)
        return {"calls": calls, "foreseen": calls - missed, "kinds": len(self.met), "first_met": new[:50]}


class OnGroup:
    """Tells a recorder, or who counts, at which place among its rank's groups a group stands."""

    def __init__(self, groups: list[ManagedGroup], to: CollectiveRecorder | Coverage) -> None:
        self._groups, self._to = groups, to

    def begun(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Pass an operation on."""
        place = next((place for place, one in enumerate(self._groups) if one is group), len(self._groups))
        return self._to.begun(place, name, outputs, inputs)
