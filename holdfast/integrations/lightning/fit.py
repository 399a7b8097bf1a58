# ruff: noqa: SLF001, ANN401 (the places where a step begins and ends are private methods of Lightning's loops)
"""One ``Trainer.fit`` under a session: a step ends where the next one would fetch its first batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.integrations.lightning.data import track
from holdfast.integrations.lightning.state import RankState
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.session import Session, Step, session

PARTS: Final = (
    *("_checkpoint_connector._restore_modules_and_callbacks", "_checkpoint_connector.restore_training_state"),
    *("fit_loop._load_combined_loader_states", "fit_loop.run", "fit_loop.epoch_loop.advance", "fit_loop.epoch_loop.val_loop.run"),
    *("save_checkpoint", "strategy.save_checkpoint", "strategy.remove_checkpoint"),
    *("fit_loop.epoch_loop._results", "_logger_connector._first_loop_iter"),
)
"""Attributes of a Trainer of Lightning 2.6 that this module and `state` need."""

_log = logging.getLogger("holdfast.integrations")


class Fit:
    """Wraps the parts of a Trainer in which a step ends, until `unwrap`."""

    def __init__(self, trainer: Any, module: Any, options: dict[str, Any]) -> None:
        self._trainer, self._module, self._options = trainer, module, options
        self._state = RankState(trainer, module)
        self._session: Session | None = None
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None
        self._losses: list[Tensor] = []
        self._counted = 0
        """The calls of an optimizer when the newest step ended."""
        self._versions: list[tuple[Tensor, int]] = []
        """How often each tensor of the model had been changed when it was restored."""
        self._unreadable: Exception | None = None
        """Why ``ckpt_path`` could not be loaded."""
        self._path = ""
        self._sanity_steps: int | None = None
        """Batches of the sanity check, which is left out after a restore."""
        self._wrapped: list[tuple[Any, str]] = []
        loops = trainer.fit_loop
        connector = trainer._checkpoint_connector
        self._restore_files = self._wrap(connector, "_restore_modules_and_callbacks", self._restored_files)
        self._restore = self._wrap(connector, "restore_training_state", self._restored)
        self._load_loaders = self._wrap(loops, "_load_combined_loader_states", self._loaders_made)
        self._run = self._wrap(loops, "run", self._ran)
        self._advance = self._wrap(loops.epoch_loop, "advance", self._advanced)
        self._validate = self._wrap(loops.epoch_loop.val_loop, "run", self._validated)
        self._save = self._wrap(trainer, "save_checkpoint", self._saved)
        self._write = self._wrap(trainer.strategy, "save_checkpoint", self._written)
        self._remove = self._wrap(trainer.strategy, "remove_checkpoint", self._removed)
        self._reporter = StorageErrorReporter()
        self._write_failed = False
        """The newest checkpoint of Lightning could not be written by this rank."""

    def _wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Put *ours* in place of a method of *owner*; return the method."""
        real: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, ours)
        self._wrapped.append((owner, name))
        return real

    def unwrap(self) -> None:
        """Leave the Trainer as it was."""
        while self._wrapped:
            owner, name = self._wrapped.pop()
            vars(owner).pop(name, None)
        if self._sanity_steps is not None:
            self._trainer.num_sanity_val_steps, self._sanity_steps = self._sanity_steps, None

    def add_loss(self, outputs: Any) -> None:
        """Record the loss of a batch; what a ``training_step`` may return is a tensor, a mapping with ``loss``, or None."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))

    # -- in the order in which Lightning calls them ---------------------------------------------------------------------

    def _restored_files(self, checkpoint_path: Any = None, *more: Any, **named: Any) -> None:
        """Load ``ckpt_path``; one that cannot be read, which a killed rank may leave, only matters if the session has no state."""
        try:
            self._restore_files(checkpoint_path, *more, **named)
        except Exception as error:  # noqa: BLE001 (files are read by torch, fsspec and hooks of the user; `_restored` judges)
            self._unreadable = error
            self._path = str(checkpoint_path)
            connector = self._trainer._checkpoint_connector
            connector._loaded_checkpoint, connector._ckpt_path = {}, None

    def _restored(self) -> None:
        """Begin the session; the newest state of the job replaces what ``ckpt_path`` has given."""
        self._restore()
        trainer, state = self._trainer, self._state
        state.check()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._session = session(model=self._module, optimizer=list(trainer.optimizers), schedulers=schedulers, data=state, **self._options)
        self._session.__enter__()
        self._session.stabilize_ddp(trainer.strategy.model)
        if self._session.steps_done:
            if state.loaded is None:
                raise RuntimeError("the restored state was not saved by a HoldfastCallback of Lightning: give the job another name")
            within = state.restore_objects()
            self._sanity_steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
            self._versions = [(one, one._version) for one in (*self._module.parameters(), *self._module.buffers())]
            if not within:
                state.loaded = None
            if self._unreadable is not None:
                _log.warning("the newest state of the job is restored; ckpt_path=%r cannot be loaded", self._path)
        elif self._unreadable is not None:
            why = str(self._unreadable).partition("\n")[0]
            raise RuntimeError(
                f"ckpt_path={self._path!r} cannot be loaded, and Holdfast has no state of this job yet: give a complete checkpoint ({why})"
            ) from self._unreadable
        self._counted = trainer.global_step

    def _loaders_made(self) -> None:
        """Count what is taken from the training data."""
        self._load_loaders()
        track(self._trainer.fit_loop._combined_loader, lambda: int(self._trainer.fit_loop.epoch_progress.current.processed))

    def _ran(self) -> None:
        """Train; then end the last step and the session."""
        self._run()
        self._end_step()
        if self._session is not None:
            self._session.__exit__(None, None, None)
        self.unwrap()

    def _advanced(self, fetcher: Any) -> None:
        """End the step before and begin the next one, unless this batch is accumulated into the same."""
        if self._state.loaded is not None:
            self._warn_of_changes()
            self._state.restore_loops()
        if self._steps is None:
            assert self._session is not None
            self._steps = self._session.steps(until=self._until())
            self._begin_step()
        elif self._end_step():
            self._begin_step()
        self._advance(fetcher)

    def _validated(self, *given: Any, **named: Any) -> Any:
        assert self._session is not None
        with self._session.section("validation"):
            return self._validate(*given, **named)

    def _saved(self, *given: Any, **named: Any) -> Any:
        if self._session is None:
            return self._save(*given, **named)
        with self._session.section("checkpoint of Lightning"):
            return self._save(*given, **named)

    def _written(self, checkpoint: dict[str, Any], filepath: Any, *more: Any, **named: Any) -> None:
        """Write a checkpoint; report one that cannot be written, which is no reason to end the training.

        Lightning lets the error end the rank, while the others wait for it in a barrier.
        """
        try:
            self._write(checkpoint, filepath, *more, **named)
        except Exception as error:
            found = StorageError.of_save(error, Path(filepath).parent)
            if found is None:
                raise
            self._write_failed = True
            self._reporter.report(found, self._trainer.global_step, Path(filepath))
        else:
            self._write_failed = False
            self._reporter.reset()

    def _removed(self, filepath: Any, *more: Any, **named: Any) -> None:
        """Remove an older checkpoint, unless the one that replaces it could not be written."""
        if not self._write_failed:
            self._remove(filepath, *more, **named)

    # -- steps ----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        assert self._session is not None
        assert self._steps is not None
        self._step = next(self._steps, None)
        if self._step is None:  # training goes on: callbacks may change how many batches a step has
            self._steps = self._session.steps()
            self._step = next(self._steps)

    def _end_step(self) -> bool:
        """End the step if an optimizer was called since it began; return whether."""
        calls = self._trainer.global_step
        if self._step is None or calls == self._counted:
            return False
        self._counted = calls
        losses, self._losses = self._losses, []
        self._step.end(torch.stack(losses).mean() if losses else None)
        self._step = None
        return True

    def _until(self) -> int | None:
        """Return the number of the last step, where the Trainer's limits say it."""
        if not self._module.automatic_optimization:
            return None  # the calls of optimizers per batch are the script's own
        total = math.inf
        with suppress(Exception):  # an epoch of unknown length
            total = self._trainer.estimated_stepping_batches
        assert self._session is not None
        return self._session.steps_done + max(0, int(total) - self._trainer.global_step) if math.isfinite(total) else None

    def _warn_of_changes(self) -> None:
        """Report a hook that changes the model when training starts: the restored weights are not those of the run before."""
        if any(one._version != version for one, version in self._versions):
            _log.warning(
                "a hook that starts the training (on_train_start, on_train_epoch_start) has changed the model after it was restored: this "
                "run is not bit-identical to an undisturbed one"
            )
        self._versions = []
