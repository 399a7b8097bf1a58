# ruff: noqa: ARG002, ANN401 (the signatures of a Trainer's callbacks)
"""The callback: it finds its Trainer when training begins, and passes the Trainer's events on to the training."""

from __future__ import annotations

import functools
from typing import Any, Final

import transformers
from transformers import Trainer, TrainerCallback

from holdfast.integrations.huggingface.training import PARTS, ResumableTraining, Resume
from holdfast.runtime.agent_client import link

_train: Final[Any] = Trainer.train


class HoldfastCallback(TrainerCallback):
    """Make the training of a Hugging Face ``Trainer`` resumable: after a fault it continues bit-identically.

    ``Trainer(..., callbacks=[HoldfastCallback()])``, and nothing else changes. It reports steps and losses, declares evaluations and saves
    as sections, takes in-memory snapshots and checkpoints, and restores model, optimizer, scheduler, random generators, position in the
    data, gradient accumulation and the Trainer's own state. A step ends after the Trainer has logged, evaluated and saved what is due.
    Outside of a Holdfast job it does nothing.

    ``trainer.train(resume_from_checkpoint=True)`` stays as it is: the newest state is taken, the session's or that of a complete checkpoint
    of the Trainer. One that was torn by a failure is skipped.

    Args:
        options: ``checkpoint_dir``, ``save_every`` and ``keep``, as for `holdfast.session`.

    Raises:
        ImportError: The installed transformers is too old.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._training: ResumableTraining | None = None
        missing = [name for name in PARTS if not callable(getattr(Trainer, name, None))]
        if missing and link().attached:
            raise ImportError(
                f"HoldfastCallback needs transformers 5.23 or newer, and {transformers.__version__} is installed: its Trainer has no "
                f"{missing[0]}(). Run pip install --upgrade transformers"
            )

    def train(self, trainer: Trainer, resume: Resume, *rest: Any, **given: Any) -> Any:
        """Run ``trainer.train()`` with the state of the session."""
        if self._training is not None:
            raise RuntimeError("HoldfastCallback supports one training: create another Trainer, in another process, for the next")
        self._training = ResumableTraining(trainer, self._options, resume)
        return _train(trainer, None, *rest, **given)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first step."""
        if self._training is not None:
            self._training.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the generators with which the epoch begins."""
        if self._training is not None:
            self._training.begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that a step is applied."""
        if self._training is not None:
            self._training.applied = True


@functools.wraps(_train)
def _train_with_callback(self: Trainer, resume_from_checkpoint: Resume = None, *rest: Any, **given: Any) -> Any:
    """Hand a Trainer that has a `HoldfastCallback` to it; any other Trainer trains as ever."""
    callback = next((one for one in self.callback_handler.callbacks if isinstance(one, HoldfastCallback)), None)
    if callback is None or not link().attached:
        return _train(self, resume_from_checkpoint, *rest, **given)
    return callback.train(self, resume_from_checkpoint, *rest, **given)


# The events of a callback name the model and the optimizer, but not the Trainer, whose loop must begin in the middle after a fault. The
# first event of a callback that is added later comes when that loop has begun. And stack frames are nobody's interface; `train` is.
Trainer.train = _train_with_callback  # type: ignore[method-assign]
