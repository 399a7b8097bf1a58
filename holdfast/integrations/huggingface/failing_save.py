# ruff: noqa: ANN401 (the Trainer's own methods have no public names)
"""A save of the Trainer that fails, for want of space on the disk or of permissions: no reason to end the training.

The Trainer lets the error end the rank. Other ranks may wait in a barrier of the same save by then, so a part that cannot be written is
noted, and the rest of the save goes on; only the removal of older checkpoints is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from holdfast.runtime.checkpoint.storage_errors import StorageError

WRITERS: Final = ("_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""Methods of the Trainer that write a part of a checkpoint, on the ranks that have it."""


class _NoRotationError(Exception):
    """Ends a save that has failed, before it removes older checkpoints."""


class FailingSave:
    """Around one save: catches what cannot be written."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        """*folder*: where *trainer* saves."""
        self._trainer, self._folder = trainer, folder
        self.error: StorageError | None = None
        """The first error; None while all parts are written."""

    def __enter__(self) -> Self:
        for name in WRITERS:
            setattr(self._trainer, name, functools.partial(self._write, getattr(self._trainer, name)))
        # the last part that is written, before older checkpoints are removed
        self._state = self._trainer.state
        self._state.save_to_json = functools.partial(self._write_last, self._state.save_to_json)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        for name in WRITERS:
            vars(self._trainer).pop(name, None)
        vars(self._state).pop("save_to_json", None)
        return isinstance(error, _NoRotationError)

    def _write(self, method: Callable[..., Any], *given: Any, **more: Any) -> Any:
        try:
            return method(*given, **more)
        except Exception as error:
            found = StorageError.of_save(error, self._folder)
            if found is None:
                raise
            self.error = self.error or found
            return None

    def _write_last(self, method: Callable[..., Any], *given: Any, **more: Any) -> None:
        self._write(method, *given, **more)
        if self.error is not None:
            raise _NoRotationError
