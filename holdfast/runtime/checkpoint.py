"""Save a checkpoint so that it is whole or not there, and so that a failing save never stops training."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.runtime import manifest
from holdfast.runtime.link import link
from holdfast.runtime.manifest import Manifest, Written
from holdfast.runtime.storage import StorageTrouble, write
from holdfast.runtime.trouble import Teller, Trouble
from holdfast.runtime.world import World

_log = logging.getLogger("holdfast.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where checkpoints go, how often (in steps, 0: never), and how many whole ones stay."""

    directory: Path
    every: int
    keep: int
    fixed: bool = False
    """The script itself said how often: what the flow chooses does not hold."""

    def due(self, step: int) -> bool:
        """Say whether the cadence asks for a checkpoint of *step*."""
        return self.every > 0 and step % self.every == 0

    def following(self, every: int | None) -> Keeping:
        """Return the same with a checkpoint *every* so many steps, unless that says nothing or the script has its own mind."""
        return self if every is None or self.fixed else replace(self, every=every)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank did for a checkpoint: the files it wrote, or the trouble: its own, or another's that it heard of."""

    files: Mapping[str, Written]
    trouble: Trouble | None = None
    own: bool = False


class Saver:
    """Writes checkpoints, all ranks together; every method is called by all ranks at the same step."""

    def __init__(self, keeping: Keeping, world: World, generation: int) -> None:
        self._keeping, self._world, self._generation = keeping, world, generation
        self._teller = Teller()
        self._wish: int | None = None
        self.corrupt: set[Path] = set()
        """Checkpoints that were found unusable: never counted as kept, never removed."""
        self.every: int | None = None
        """Steps between two checkpoints from the newest one on, if the flow has a wish: the same on every rank that was told it stands."""

    def save(self, state: Mapping[str, Any], step: int, *, lowest: frozenset[str]) -> bool:
        """Save *state* as the checkpoint of *step*; say, the same on every rank, whether it stands.

        A full disk and its like cost this checkpoint and nothing else. The loss of a peer goes through.
        """
        start = time.monotonic()
        partial = manifest.beside(self._keeping.directory, step, "partial", self._generation)
        parts = self._world.gather(self._write(state, partial, lowest))
        self._wish = None
        stands = self._world.rank == 0 and self._settle(parts, partial, step, start)
        stands, self.every = self._world.told((stands, self._wish if stands else None))
        if stands:
            self._teller.forget()
        return stands

    def _write(self, state: Mapping[str, Any], partial: Path, lowest: frozenset[str]) -> _Part:
        """Write this rank's files."""
        try:
            return _Part(write(state, partial, lowest=lowest, grouped=self._world.grouped))
        except StorageTrouble as failed:
            if failed.cause is None:
                return _Part({}, Trouble("checkpoint-write-failed", failed.words))
            return _Part({}, Trouble.of(failed.cause), own=True)

    def _settle(self, parts: list[_Part], partial: Path, step: int, start: float) -> bool:
        """Put the checkpoint in place, or clear away what there is of it; rank 0 only."""
        place = manifest.folder_of(self._keeping.directory, step)
        trouble = _first(parts)
        try:
            if trouble is None:
                files = {name: file for part in parts for name, file in part.files.items()}
                whole = manifest.manifest(step, self._generation, self._world.size, files)
                if self._commit(whole, partial, place):
                    link().saved(step, place, time.monotonic() - start, whole.size)
                    self._retire()
                    return True
        except OSError as error:
            trouble = Trouble.of(error)
        if trouble is not None:
            self._teller.tell(trouble, step, place)
        shutil.rmtree(partial, ignore_errors=True)
        return False

    def _commit(self, whole: Manifest, partial: Path, place: Path) -> bool:
        """Write the manifest, ask for leave, and rename; say whether the checkpoint now stands."""
        for name, file in whole.files.items():
            if not (partial / name).exists() or (partial / name).stat().st_size != file.size:
                raise OSError(errno.EIO, f"rank 0 does not see {name} as it was written: is the checkpoint directory shared by all nodes?")
        for path in partial.iterdir():
            if path.name not in whole.files:  # an earlier try with more ranks, ended by kill -9
                path.unlink()
        (partial / manifest.MANIFEST).write_text(whole.text())
        manifest.sync(partial / manifest.MANIFEST)
        manifest.sync(partial)
        leave = link().may_commit(whole.step)
        if not leave.ok:
            _log.warning("the checkpoint of step %d is not put in place: %s", whole.step, leave.why)
            return False
        self._wish = leave.every
        if place.exists():  # found unusable, else training would have gone on after it
            place.rename(place.with_name(f"{place.name}.unusable-{time.time_ns()}"))
            self.corrupt.discard(place)
        partial.rename(place)
        manifest.sync(place.parent)
        return True

    def _retire(self) -> None:
        """Remove whole checkpoints beyond the newest *keep*; what cannot be removed stays."""
        directory = self._keeping.directory
        with suppress(OSError):
            sound = [path for path in manifest.candidates(directory) if path not in self.corrupt and manifest.looks_whole(path)]
            for path in sound[self._keeping.keep :]:
                step = int(path.name.removeprefix("step-"))
                away = manifest.beside(directory, step, "removing", self._generation)
                path.rename(away)  # first, so that a kill in the middle leaves no torn checkpoint
                shutil.rmtree(away)

    def clear(self) -> None:
        """Remove what earlier generations left half written or half removed; rank 0 only, before the first save.

        Left by this very generation counts too: it is what a killed process of the same number left, when there is no agent to count.
        """
        with suppress(OSError):
            for path in manifest.leftovers(self._keeping.directory, below=self._generation + 1):
                shutil.rmtree(path, ignore_errors=True)


def _first(parts: list[_Part]) -> Trouble | None:
    """Return the first trouble: one that a rank met itself before those that it heard of."""
    ordered = sorted(parts, key=lambda part: not part.own)
    return next((part.trouble for part in ordered if part.trouble is not None), None)
