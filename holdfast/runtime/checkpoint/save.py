"""Save a checkpoint with all ranks together: it is complete or absent, and a failing save never stops training."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.collective_save import SavePart, write
from holdfast.runtime.checkpoint.publish import begin_generation, clear, put_in_place, retire
from holdfast.runtime.checkpoint.storage import WriteFailed, write_metadata
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.state.training import tree_key
from holdfast.runtime.world import World

_log = logging.getLogger("holdfast.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints go, the interval in steps (0: never), and how many complete ones to keep."""

    directory: Path
    every: int
    keep: int
    fixed: bool = False
    """The script has set the interval: the controller does not change it."""

    def due(self, step: int) -> bool:
        """Return whether a checkpoint of *step* is due."""
        return self.every > 0 and step % self.every == 0

    def with_interval(self, every: int | None) -> CheckpointSettings:
        """Return these settings with the interval *every*, unless it is None or the script has set its own."""
        return self if every is None or self.fixed else replace(self, every=every)


class Saver:
    """Writes checkpoints; every method is called by all ranks at the same step."""

    def __init__(self, settings: CheckpointSettings, world: World, generation: int) -> None:
        self._settings, self._world, self._generation = settings, world, generation
        self._reporter = StorageErrorReporter()
        self._new_interval: int | None = None
        self.corrupt: set[Path] = set()
        """Checkpoints found unusable: they are never counted as kept, and never removed."""
        self.every: int | None = None
        """The interval from the newest checkpoint on, if the controller has chosen one; the same on every rank."""
        if world.rank == 0:
            begin_generation(settings.directory, generation)

    def save(self, state: Mapping[str, Any], step: int, *, lowest: frozenset[str]) -> bool:
        """Save *state* as the checkpoint of *step*; return, the same on every rank, whether it is complete.

        A storage error costs this checkpoint and nothing else. The loss of a peer is raised.
        """
        start = time.monotonic()
        partial = manifest.staging_folder(self._settings.directory, step, "partial", self._generation)
        parts = write(state, partial, self._world, lowest=lowest, own=tree_key(self._world.rank))
        self._new_interval = None
        saved = self._world.rank == 0 and self._publish(parts, partial, step, start)
        saved, self.every = self._world.broadcast([saved, self._new_interval if saved else None])
        if saved:
            self._reporter.reset()
        return bool(saved)

    def _publish(self, parts: list[SavePart], partial: Path, step: int, start: float) -> bool:
        """Publish the checkpoint, or remove its files; rank 0 only."""
        place = manifest.folder_of(self._settings.directory, step)
        failure = next((part.storage_error for part in parts if part.storage_error is not None), None)
        try:
            if failure is None:
                files = {name: file for part in parts for name, file in part.files.items()}
                files |= write_metadata((chunk for part in parts for chunk in part.chunks), partial)
                written = manifest.manifest(step, self._generation, self._world.size, files)
                answer = put_in_place(written, partial, place, lambda: link().may_commit(step))
                if answer.ok:
                    self._new_interval = answer.every
                    self.corrupt.discard(place)
                    link().saved(step, place, time.monotonic() - start, written.size)
                    retire(self._settings.directory, self._settings.keep, self._generation, unusable=self.corrupt)
                    return True
                _log.warning("the checkpoint of step %d is not published: %s", step, answer.why)
        except OSError as error:
            failure = StorageError.of(error)
        except WriteFailed as error:
            failure = error.as_storage_error()
        if failure is not None:
            self._reporter.report(failure, step, place)
        shutil.rmtree(partial, ignore_errors=True)
        return False

    def clear(self) -> None:
        """Remove incomplete checkpoints of earlier generations; rank 0 only, before the first save.

        Those of this generation too: without an agent that counts, a killed process of the same number left them.
        """
        clear(self._settings.directory, self._generation + 1)
