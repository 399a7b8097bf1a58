# ruff: noqa: SLF001, ARG002, ANN401 (a resumed run needs private attributes of the Trainer; its callbacks' signatures)
"""Hugging Face's Trainer with its state saved by a session: after a fault it resumes bit-identically."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final

import torch
from transformers import Trainer, TrainerCallback, TrainerState

from holdfast.runtime.groups.membership import membership
from holdfast.runtime.session import Session, Step, session
from holdfast.runtime.state import rng

RESUMED: Final = "holdfast"
"""What the Trainer gets as the folder of a checkpoint when the session has restored the state."""
_PARTS: Final = (
    *("_init_training_state", "_run_epoch", "get_batch_samples", "_load_rng_state", "_maybe_log_save_evaluate"),
    "_finalize_training",
)
"""Methods of the Trainer of transformers 5, in the order of their calls, which this callback wraps."""


class HoldfastCallback(TrainerCallback):
    """Save and restore the complete state of a Hugging Face ``Trainer``, so that training after a fault is bit-identical.

    Create it before training: ``HoldfastCallback(trainer)``, then ``trainer.train()``. It saves and restores model, optimizer, scheduler,
    random generators, position in the data and the Trainer's own state, with a `holdfast.session`. A step ends after the Trainer has
    logged, evaluated and saved what is due.

    Args:
        trainer: Trainer of transformers 5, whose ranks each hold the whole model. The callback adds itself to it.
        options: ``checkpoint_dir``, ``save_every`` and ``keep``, as for `holdfast.session`.

    Raises:
        TypeError: The Trainer is not one of transformers 5.
        ValueError: The Trainer uses FSDP or DeepSpeed.
        RuntimeError: ``holdfast.join()`` was called: a Trainer cannot repeat a step, so managed groups are not possible.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        missing = [name for name in _PARTS if not callable(getattr(trainer, name, None))]
        if missing:
            raise TypeError(f"HoldfastCallback needs the Trainer of transformers 5: this one has no {missing[0]}()")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("HoldfastCallback supports models that each rank holds completely: FSDP and DeepSpeed are not supported yet")
        if membership() is not None:
            raise RuntimeError(
                "HoldfastCallback restores a Trainer's state, and the Trainer cannot repeat a step in its process: remove holdfast.join()"
            )
        self._trainer: Any = trainer
        self._options = options
        self._session: Session | None = None
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._done = False
        """The Trainer has applied the step; logging, evaluation and saving may still follow."""
        self._position = Position(trainer)
        self._extra: dict[str, Any] = {"trainer": ""}
        self._settings: list[dict[str, Any]] = []
        self._generators: rng.State | None = None
        """The state of the generators from which training resumes; None when it begins."""
        self._steps_of_epoch = 0
        self._real = {name: getattr(trainer, name) for name in _PARTS}
        for name in _PARTS:
            setattr(trainer, name, getattr(self, name))
        trainer.add_callback(self)

    # -- what the Trainer calls ---------------------------------------------------------------------------------------

    def _init_training_state(
        self,
        max_steps: int,
        steps_of_an_epoch: int,
        epochs: int,
        checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Begin the session, and have the Trainer begin where the session has restored the state."""
        trainer = self._trainer
        if self._session is not None:
            raise RuntimeError("HoldfastCallback supports one training: create another Trainer, in another process, for the next")
        if checkpoint is not None:
            raise ValueError("train(resume_from_checkpoint=...) and HoldfastCallback both restore the state: remove the argument")
        begin: tuple[int, int] = self._real["_init_training_state"](max_steps, steps_of_an_epoch, epochs, None, trial)
        self._steps_of_epoch = steps_of_an_epoch
        self._position.scheduler.set(None)
        trainer.create_optimizer()
        self._session = session(
            model=trainer.model,
            optimizer=trainer.optimizer,
            schedulers=self._position.scheduler,
            data=self._position,
            extra=self._extra,
            **self._options,
        )
        self._session.__enter__()
        self._steps = self._session.steps(until=max_steps)
        done = self._session.steps_done
        if not done:
            return begin
        trainer.state = TrainerState(**json.loads(self._extra["trainer"]))
        trainer._load_callback_state()
        trainer.state.compute_steps(trainer.args, max_steps)
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        self._settings = [{name: value for name, value in group.items() if name != "params"} for group in trainer.optimizer.param_groups]
        self._generators = copy.deepcopy(self._session.restored_generators)
        return done // steps_of_an_epoch, done % steps_of_an_epoch * trainer.args.gradient_accumulation_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the scheduler its state, now that it exists, and begin the first step."""
        trainer, restored = self._trainer, self._generators is not None
        assert self._session is not None
        self._session.stabilize_ddp(trainer.model_wrapped)
        self._position.scheduler.set(trainer.lr_scheduler)
        for group, settings in zip(trainer.optimizer.param_groups, self._settings, strict=bool(self._settings)):
            group.update(settings)  # creating the scheduler has set the learning rate of step 1
        if restored:
            self._position.restore_sums()
        self._step = next(self._steps, None)  # this restores the generators

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the generators with which an epoch's order and its workers begin."""
        if state.global_step % self._steps_of_epoch == 0:
            if self._generators is not None:  # an evaluation before the first epoch has drawn numbers
                rng.apply(self._generators)
            self._position.epoch = rng.capture()

    def _run_epoch(self, **given: Any) -> Any:
        """Run an epoch; the first one after a restore begins at the restored position."""
        generators, self._generators = self._generators, None
        if generators is None:
            return self._real["_run_epoch"](**given)
        module: Any = import_module(Trainer.__module__)
        skip = module.skip_first_batches
        states = [self._position.epoch, self._position.drew, generators]
        module.skip_first_batches = lambda loader, batches: ResumedLoader(skip, loader, batches, states)
        try:
            return self._real["_run_epoch"](**{**given, "resume_from_checkpoint": RESUMED})
        finally:
            module.skip_first_batches = skip

    def get_batch_samples(self, batches: Iterator[Any], number: int, device: torch.device) -> Any:
        """Draw the batches of a step, and store the generators before each."""

        def noting_generators() -> Iterator[Any]:
            while True:
                self._position.drew = rng.capture()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                yield batch

        return self._real["get_batch_samples"](noting_generators(), number, device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do not change the generators when the session has restored them."""
        if checkpoint != RESUMED:
            self._real["_load_rng_state"](checkpoint)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that a step is applied."""
        self._done = True

    def _maybe_log_save_evaluate(self, *given: Any, **more: Any) -> None:
        """Log, evaluate and save what is due, then end the step; the last one of an epoch ends with what is due at the epoch's end."""
        trainer, control = self._trainer, self._trainer.control
        last_of_epoch = trainer.state.global_step % self._steps_of_epoch == 0 or control.should_epoch_stop or control.should_training_stop
        ends, loss = not self._done or not last_of_epoch, self._position.loss()
        long: AbstractContextManager[Any] = nullcontext()
        if self._session is not None and (control.should_evaluate or control.should_save):
            long = self._session.section("evaluation or checkpoint of the Trainer")
        with long:
            self._real["_maybe_log_save_evaluate"](*given, **more)
        step = self._step
        if step is None or trainer.state.global_step != step.number:
            return
        self._done = False
        self._position.note_sums(loss)
        if ends:
            self._extra["trainer"] = json.dumps(dataclasses.asdict(trainer.state))
            step.end(self._position.last)
            self._step = next(self._steps, None)

    def _finalize_training(self, *given: Any, **more: Any) -> Any:
        """End the session before anything else is done with the model."""
        if self._session is not None:
            self._session.__exit__(None, None, None)
        return self._real["_finalize_training"](*given, **more)


class Position:
    """The per-rank state: the generators with which the epoch began, and the sums of losses that are not logged yet."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.scheduler = DeferredScheduler()
        self.epoch: rng.State = rng.capture()
        self.drew: rng.State = self.epoch
        """The generators before the newest batch was drawn."""
        self.last: float | None = None
        """The loss of the newest applied step."""
        self._before = 0.0
        self._sums: dict[str, Any] = {}

    def loss(self) -> float:
        """Return the sum of the losses that are not logged yet."""
        sums = getattr(self._trainer, "_tr_loss", None)
        return float(sums.item()) if isinstance(sums, torch.Tensor) else 0.0

    def note_sums(self, summed: float) -> None:
        """Record what was *summed* before the Trainer may have logged it, and what is left now."""
        trainer = self._trainer
        remaining = self.loss()
        if summed != self._before or self.last is None:
            self.last = summed - self._before
        self._before = remaining
        self._sums = {
            "losses": remaining,
            "logged": float(trainer._total_loss_scalar),
            "at": int(trainer._globalstep_last_logged),
            "floating": float(trainer.current_flos),
        }

    def restore_sums(self) -> None:
        """Give the Trainer the restored sums."""
        trainer, sums = self._trainer, self._sums
        if not sums:
            return
        self._before = sums["losses"]
        trainer._tr_loss.fill_(sums["losses"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged, trainer.current_flos = sums["logged"], sums["at"], sums["floating"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"epoch": self.epoch, "drew": self.drew, "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        self.epoch, self.drew, self._sums = state["epoch"], state["drew"], state["sums"]


class DeferredScheduler:
    """A scheduler that is created after the session has begun: its state waits for it."""

    def __init__(self) -> None:
        self._real: Any = None
        self._state: dict[str, Any] = {}

    def set(self, real: Any) -> None:
        """Use *real* from now on; None while there is none."""
        self._real = real
        if real is not None and self._state:
            real.load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return dict(self._state if self._real is None else self._real.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        self._state = state
        if self._real is not None:
            self._real.load_state_dict(state)


class ResumedLoader:
    """A loader in the middle of an epoch.

    Accelerate's loaders read one batch ahead: the first remaining batch was read before the state was saved, with the generators as
    they were then, and is read with them again.
    """

    def __init__(self, skip: Any, loader: Any, done: int, generators: list[rng.State]) -> None:
        """*skip* returns a loader without its first batches, of which *done* are used.

        *generators*: at the beginning of the epoch, before the newest batch was drawn, and when the state was saved.
        """
        self._loader, self._reads = skip(loader, max(0, done - 2)), done > 1
        self._epoch, self._drew, self._now = generators

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches."""
        rng.apply(self._epoch)
        batches = iter(self._loader)
        if self._reads:
            next(batches, None)
        rng.apply(self._drew)
        next(batches, None)
        rng.apply(self._now)
        yield from batches

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


__all__ = ["HoldfastCallback"]
