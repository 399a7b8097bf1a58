"""Save a checkpoint so that it is whole or not there, and so that a failing save never stops training."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint import fencing, manifest
from holdfast.runtime.checkpoint.collective_save import SavePart, write
from holdfast.runtime.checkpoint.publish import clear, put_in_place, retire
from holdfast.runtime.checkpoint.storage import StorageTrouble, write_metadata
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.state.training import tree_key
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


class Saver:
    """Writes checkpoints, all ranks together; every method is called by all ranks at the same step."""

    def __init__(self, keeping: Keeping, world: World, generation: int) -> None:
        self._keeping, self._world, self._generation = keeping, world, generation
        self._teller = StorageErrorReporter()
        self._wish: int | None = None
        self.corrupt: set[Path] = set()
        """Checkpoints that were found unusable: never counted as kept, never removed."""
        self.every: int | None = None
        """Steps between two checkpoints from the newest one on, if the flow has a wish: the same on every rank that was told it stands."""
        if world.rank == 0:
            fencing.begin(keeping.directory, generation)

    def save(self, state: Mapping[str, Any], step: int, *, lowest: frozenset[str]) -> bool:
        """Save *state* as the checkpoint of *step*; say, the same on every rank, whether it stands.

        A full disk and its like cost this checkpoint and nothing else. The loss of a peer goes through.
        """
        start = time.monotonic()
        partial = manifest.beside(self._keeping.directory, step, "partial", self._generation)
        parts = write(state, partial, self._world, lowest=lowest, own=tree_key(self._world.rank))
        self._wish = None
        stands = self._world.rank == 0 and self._settle(parts, partial, step, start)
        stands, self.every = self._world.told([stands, self._wish if stands else None])
        if stands:
            self._teller.forget()
        return bool(stands)

    def _settle(self, parts: list[SavePart], partial: Path, step: int, start: float) -> bool:
        """Put the checkpoint in place, or clear away what there is of it; rank 0 only."""
        place = manifest.folder_of(self._keeping.directory, step)
        storage_error = next((part.storage_error for part in parts if part.storage_error is not None), None)
        try:
            if storage_error is None:
                files = {name: file for part in parts for name, file in part.files.items()}
                files |= write_metadata((chunk for part in parts for chunk in part.chunks), partial)
                whole = manifest.manifest(step, self._generation, self._world.size, files)
                leave = put_in_place(whole, partial, place, lambda: link().may_commit(step))
                if leave.ok:
                    self._wish = leave.every
                    self.corrupt.discard(place)
                    link().saved(step, place, time.monotonic() - start, whole.size)
                    retire(self._keeping.directory, self._keeping.keep, self._generation, unusable=self.corrupt)
                    return True
                _log.warning("the checkpoint of step %d is not put in place: %s", step, leave.why)
        except OSError as error:
            storage_error = StorageError.of(error)
        except StorageTrouble as failed:
            storage_error = (
                StorageError.of(failed.cause) if failed.cause is not None else StorageError("checkpoint-write-failed", failed.words)
            )
        if storage_error is not None:
            self._teller.tell(storage_error, step, place)
        shutil.rmtree(partial, ignore_errors=True)
        return False

    def clear(self) -> None:
        """Remove what earlier generations left half written or half removed; rank 0 only, before the first save.

        Left by this very generation counts too: it is what a killed process of the same number left, when there is no agent to count.
        """
        clear(self._keeping.directory, self._generation + 1)
