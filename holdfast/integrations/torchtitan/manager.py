# ruff: noqa: SLF001, ANN401 (a resumed run needs private parts of the session; torchtitan's objects have no public types)
"""The checkpoint manager: the Trainer calls it when training begins, after each step, and at the end, which is all that a session needs."""

from __future__ import annotations

import functools
import logging
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE, CheckpointManager
from torchtitan.tools import filesystem

from holdfast.integrations.torchtitan.state import ModelParts, RankState
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.session import Session, session
from holdfast.runtime.telemetry.progress import section

_log: Final = logging.getLogger("holdfast.runtime")

OBSTACLE: Final = "torchtitan's Trainer cannot compute a step again"


class HoldfastCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan is not installed where types are checked
    """Make the training of a torchtitan ``Trainer`` resumable: after a fault it continues bit-identically.

    It is chosen by the config: ``config.checkpoint = HoldfastCheckpointManager.Config(...)``, or `with_holdfast`. It reports steps and
    losses, declares validations and saves as sections, and keeps in-memory snapshots and checkpoints of model, optimizers, schedulers,
    random generators, position in the data, steps and tokens. torchtitan's own checkpoints are written as ever, by the same settings; when
    training begins, the newest state is taken, the session's or torchtitan's. Outside of a Holdfast job it is a ``CheckpointManager``.

    A save of torchtitan that cannot be written is reported and removed, and training continues; older checkpoints stay.

    Raises:
        RuntimeError: From ``load``: this process has a session already, or the data cannot continue on this number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # as above
        """The settings of torchtitan's own checkpoints. Those of Holdfast are in the job file."""

    def __init__(self, config: Any, *, model_parts: list[Any], **given: Any) -> None:
        """Take what the Trainer gives to its checkpoint manager."""
        super().__init__(config, model_parts=model_parts, **given)
        self._session: Session | None = None
        self._parts = model_parts
        self._loss: float | None = None
        """The loss of this step on all ranks, where the Trainer has logged it."""
        self._tokens = 0
        self._saving = 0
        """The step of the newest asynchronous save."""
        self._reporter = StorageErrorReporter()
        if not self.enable and link().attached:
            _log.warning("checkpoint.enable is off: Holdfast knows neither steps nor state of this training. Set --checkpoint.enable")

    # -- in the order in which the Trainer calls them -------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        """Restore the newest state, of the session or of torchtitan, and begin the first step."""
        if not link().attached:
            return bool(super()._load(step))
        trainer = self.states[TRAIN_STATE]
        current = self._begin(trainer)
        done, own = current.steps_done, self._find_load_step() if step == -1 else step
        loaded = bool(done)
        if not done or own > done:
            loaded = bool(super()._load(step))
            if trainer.step != done:
                current._continue_after(trainer.step, Path(self._create_checkpoint_id(trainer.step)))
        trainer.step = current.steps_done
        current._begin_prepared_loop()
        return loaded

    def _begin(self, trainer: Any) -> Session:
        """Begin the session; this restores its newest state."""
        if link().has_session:
            raise RuntimeError("HoldfastCheckpointManager has a session of its own: remove the script's holdfast.session")
        data = RankState(trainer, self.states[DATALOADER], any_data=DATALOADER in self.exclude_from_loading)
        optimizers, schedulers = list(self.states[OPTIMIZER]), self.states[LR_SCHEDULER]
        self._session = session(model=ModelParts(self._parts), optimizer=optimizers, schedulers=schedulers, data=data)
        training = trainer.config.training
        self._session._until = training.steps
        dims = trainer.parallel_dims
        copies = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        self._tokens = training.local_batch_size * training.seq_len * trainer.gradient_accumulation_steps * copies
        trainer.metrics_processor.log = functools.partial(self._note_loss, trainer, trainer.metrics_processor.log)
        if trainer.config.validator.enable:
            trainer.validator.validate = functools.partial(_in_section, "validation", trainer.validator.validate)
        self._session._prepare_loop(OBSTACLE)
        if data.problem:
            raise RuntimeError(data.problem)
        return self._session

    def _note_loss(self, trainer: Any, log: Any, step: int, loss: float, *given: Any, **more: Any) -> Any:
        dims = trainer.parallel_dims
        self._loss = float(loss)
        if dims.pp_enabled:  # only the last stage has the loss; others log -1
            both = torch.tensor(loss if trainer.pp_has_last_stage else -math.inf, device=trainer.device)
            dist.all_reduce(both, dist.ReduceOp.MAX, dims.get_mesh("pp").get_group())
            self._loss = float(both)
        return log(step, loss, *given, **more)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 (torchtitan's signature)
        """Save torchtitan's own checkpoint if it is due, then end the step."""
        if self._session is None:
            return bool(super()._save(curr_step, last_step))
        saved = self._should_save(curr_step, last_step) and self._save_own(curr_step, last_step=last_step)
        loss, self._loss = self._loss, None
        self._session.step(loss, tokens=self._tokens)
        return saved

    def _save_own(self, step: int, *, last_step: bool) -> bool:
        with section("checkpoint of torchtitan"):
            try:
                saved = bool(super()._save(step, last_step))
            except CheckpointException as error:
                self._report_failed(error, step)
                return False
        if self.save_future is None:
            self._reporter.reset()
        else:
            self._saving = step
        return saved

    def _wait_for_saving(self) -> None:
        """Wait for the asynchronous save before; one that failed does not end the training either."""
        if self._session is None:
            super()._wait_for_saving()
            return
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            self.save_future = None
            self._report_failed(error, self._saving)
        else:
            self._reporter.reset()

    def _report_failed(self, error: CheckpointException, step: int) -> None:
        """Report this rank's part in the failed save of *step*, and remove what was written; raise an error of another cause.

        *error* is raised on all ranks alike, and has the errors of those that failed.
        """
        found = {rank: StorageError.of_save(one, Path(self.folder)) for rank, (one, _) in error.failures.items()}
        if not any(found.values()):
            raise error
        path = self._create_checkpoint_id(step)
        if (own := found.get(dist.get_rank())) is not None:
            self._reporter.report(own, step, Path(path))
        if dist.get_rank() == 0:  # torchtitan would count it as one of the newest checkpoints, and remove a complete one for it
            with suppress(OSError):
                filesystem.rmtree(path)

    def _close(self) -> None:
        """End the session, unless an error ends the training."""
        current, self._session = getattr(self, "_session", None), None
        if current is not None and sys.exc_info()[0] is None:
            current.close()
        super()._close()


def _in_section(name: str, function: Any, *given: Any, **more: Any) -> Any:
    with section(name):
        return function(*given, **more)
