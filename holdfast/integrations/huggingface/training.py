# ruff: noqa: SLF001, ANN401 (a resumed run needs private attributes of the Trainer)
"""A Trainer's training with its state kept by a session: after a fault it resumes bit-identically."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from holdfast.integrations.huggingface import checkpoints
from holdfast.integrations.huggingface.failing_save import FailingSave
from holdfast.integrations.huggingface.position import Position, ResumedLoader
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.session import Session, session
from holdfast.runtime.state import rng
from holdfast.runtime.world import World

_log: Final = logging.getLogger("holdfast.runtime")

Resume = str | os.PathLike[str] | bool | None
"""What a script gives to ``trainer.train(resume_from_checkpoint=...)``."""
RESUMED: Final = "holdfast"
"""What the Trainer gets as the folder of a checkpoint when the session has restored the state."""
OBSTACLE: Final = "the Trainer cannot compute a step again"
PARTS: Final = (
    *("_inner_training_loop", "_init_training_state", "_run_epoch", "get_batch_samples", "_load_rng_state", "training_step"),
    *("_maybe_log_save_evaluate", "_evaluate", "_save_checkpoint", "_finalize_training"),
)
"""Methods of the Trainer, in the order of their calls, which `ResumableTraining` wraps."""


class ResumableTraining:
    """One training of *trainer*, whose `PARTS` are the methods of this object while it lasts."""

    def __init__(self, trainer: Trainer, options: dict[str, Any], resume: Resume) -> None:
        """*options*: of the session. *resume*: what the script has given to ``trainer.train(resume_from_checkpoint=...)``."""
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("HoldfastCallback supports models that each rank holds completely: FSDP and DeepSpeed are not supported yet")
        if trainer.args.auto_find_batch_size:
            raise ValueError(
                "HoldfastCallback needs one batch size for the whole training: set per_device_train_batch_size, and leave out "
                "auto_find_batch_size"
            )
        if link().has_session:
            raise RuntimeError("HoldfastCallback has a session of its own: remove the script's holdfast.session, or the callback")
        self._trainer: Any = trainer
        self._options, self._resume = options, resume
        self._session: Session
        self._checkpoint: Path | None = None
        """The checkpoint of the Trainer from which training resumes, where the session has nothing newer."""
        self.applied = False
        """The Trainer has applied the step; logging, evaluation and saving may still follow."""
        self._position = Position(trainer)
        self._extra: dict[str, Any] = {"trainer": ""}
        self._settings: list[dict[str, Any]] = []
        self._generators: rng.State | None = None
        """The state of the generators from which training resumes; None when it begins."""
        self._steps_of_epoch = 0
        self._loss: torch.Tensor | None = None
        """The sum of the losses of this step's batches on this rank."""
        self._reporter = StorageErrorReporter()
        self._real = {name: getattr(trainer, name) for name in PARTS}
        for name in PARTS:
            setattr(trainer, name, getattr(self, name))

    # -- the beginning ------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, **given: Any) -> Any:
        """Restore the newest state, of the session or of the Trainer, and run the loop."""
        trainer = self._trainer
        trainer.create_optimizer()
        if getattr(trainer.accelerator, "scaler", None) is not None:
            self._extra["scaler"] = trainer.accelerator.scaler
        parts: dict[str, Any] = {"schedulers": self._position.scheduler, "data": self._position, "extra": self._extra}
        self._session = session(model=trainer.model, optimizer=trainer.optimizer, **parts, **self._options)
        self._session._prepare_loop(OBSTACLE)
        self._checkpoint = self._choose_checkpoint() if self._resume else None
        if self._checkpoint is None:
            return self._real["_inner_training_loop"](**given)
        self._forget_restored()
        trainer._load_from_checkpoint(str(self._checkpoint))
        return self._real["_inner_training_loop"](**{**given, "resume_from_checkpoint": str(self._checkpoint)})

    def _choose_checkpoint(self) -> Path | None:
        """Return the Trainer's checkpoint to resume from; None where the session has restored a newer state, or there is none at all."""
        done, world = self._session.steps_done, World.current()
        output, newest = Path(self._trainer.args.output_dir), None
        if isinstance(self._resume, str | os.PathLike):
            given = Path(self._resume)
            problem = next((one for one in world.gather(self._problem_of(given)) if one), "")
            if not problem:
                step = int(json.loads((given / "trainer_state.json").read_text())["global_step"])
                return given if step > done else None
            if given.absolute().parent != output.absolute() and not done:
                raise ValueError(f"resume_from_checkpoint={str(given)!r} is no complete checkpoint: {problem}. Give a complete one")
            newest = next(iter(checkpoints.steps_of(output)), None)  # as a script does that asks `get_last_checkpoint`
        complete = set.intersection(*map(set, world.gather(self._complete(output, after=done))))
        if complete:
            return checkpoints.path_of(output, max(complete))
        if newest is None and not done and link().generation <= 1 and not checkpoints.steps_of(output):
            raise ValueError(f"there is no checkpoint to resume from in {output}: leave out resume_from_checkpoint, or correct output_dir")
        return None

    def _complete(self, output: Path, *, after: int) -> list[int]:
        """Return the steps of complete checkpoints that this rank sees in *output*, later than the step *after*; log the others."""
        found = []
        for step in (one for one in checkpoints.steps_of(output) if one > after):
            problem = self._problem_of(checkpoints.path_of(output, step))
            if not problem:
                found.append(step)
            elif World.current().rank == 0:
                _log.warning("checkpoint-%d of the Trainer is not complete and is left out: %s", step, problem)
        return found

    def _problem_of(self, checkpoint: Path) -> str:
        args = self._trainer.args
        return checkpoints.problem_of(checkpoint, args.world_size, weights_only=args.save_only_model)

    def _forget_restored(self) -> None:
        """Have the Trainer load its own checkpoint: what the session has restored is older."""
        position, trainer = self._position, self._trainer
        position.scheduler.forget()
        position.forget()
        trainer.optimizer.state.clear()
        self._extra["trainer"] = ""
        step = int(json.loads((self._checkpoint / "trainer_state.json").read_text())["global_step"])  # type: ignore[operator]
        self._session._continue_after(step, self._checkpoint)

    def _init_training_state(self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, trial: Any) -> tuple[int, int]:
        """Have the Trainer begin where the session has restored the state."""
        trainer, done = self._trainer, self._session.steps_done
        self._steps_of_epoch, self._session._until = steps_of_epoch, max_steps
        begin: tuple[int, int] = self._real["_init_training_state"](max_steps, steps_of_epoch, epochs, checkpoint, trial)
        if checkpoint is not None or not done:
            return begin
        trainer.state = TrainerState(**json.loads(self._extra["trainer"]))
        self._restore_callbacks()
        trainer.state.compute_steps(trainer.args, max_steps)
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        self._settings = [{name: value for name, value in group.items() if name != "params"} for group in trainer.optimizer.param_groups]
        self._generators = copy.deepcopy(self._session.restored_generators)
        return done // steps_of_epoch, done % steps_of_epoch * trainer.args.gradient_accumulation_steps

    def begin(self) -> None:
        """Give the scheduler its state, now that it exists, and begin the first step."""
        trainer, restored = self._trainer, self._generators is not None
        self._session.stabilize_ddp(trainer.model_wrapped)
        self._position.scheduler.set(trainer.lr_scheduler)
        for group, settings in zip(trainer.optimizer.param_groups, self._settings, strict=bool(self._settings)):
            group.update(settings)  # creating the scheduler has set the learning rate of step 1
        if restored:
            self._position.restore_sums()
        self._session._begin_prepared_loop()  # this restores the generators

    # -- epochs and batches -------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Store the generators with which an epoch's order and its workers begin."""
        if self._trainer.state.global_step % self._steps_of_epoch == 0:
            if self._generators is not None:  # an evaluation before the first epoch has drawn numbers
                rng.apply(self._generators)
            self._position.epoch = rng.capture()

    def _run_epoch(self, **given: Any) -> Any:
        """Run an epoch; the first one after a restore begins at the restored position."""
        generators, self._generators = self._generators, None
        if generators is None:
            if self._checkpoint is not None and self._session.steps_done % self._steps_of_epoch:
                self._position.epoch = rng.capture()
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

    def training_step(self, *given: Any, **more: Any) -> Any:
        """Compute a batch, and add its loss to that of the step."""
        loss = self._real["training_step"](*given, **more)
        self._loss = loss.detach().clone() if self._loss is None else self._loss + loss.detach()
        return loss

    # -- the end of a step --------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *given: Any, **more: Any) -> None:
        """Log, evaluate and save what is due, then end the step; the last one of an epoch ends with what is due at the epoch's end."""
        trainer, control = self._trainer, self._trainer.control
        last_of_epoch = trainer.state.global_step % self._steps_of_epoch == 0 or control.should_epoch_stop or control.should_training_stop
        ends = not self.applied or not last_of_epoch
        self._real["_maybe_log_save_evaluate"](*given, **more)
        if trainer.state.global_step != self._session.steps_done + 1:
            return
        self.applied = False
        if ends:
            self._position.note_sums()
            self._note_callbacks()
            self._extra["trainer"] = json.dumps(dataclasses.asdict(trainer.state))
            loss, self._loss = self._loss, None
            self._session.step(loss)

    def _evaluate(self, *given: Any, **more: Any) -> Any:
        """Evaluate in a section of its own: it may take longer than many steps."""
        with self._session.section("evaluation"):
            return self._real["_evaluate"](*given, **more)

    def _save_checkpoint(self, *given: Any, **more: Any) -> None:
        """Save in a section of its own, marked as incomplete until it is done; a save that fails is reported and training continues."""
        trainer = self._trainer
        folder = checkpoints.path_of(
            Path(trainer._get_output_dir(trial=given[1] if len(given) > 1 else more["trial"])), trainer.state.global_step
        )
        marks = trainer.args.should_save
        if marks:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / checkpoints.SENTINEL).write_text(f"the save of step {trainer.state.global_step} has begun and not ended\n")
        failing = FailingSave(trainer, folder)
        with self._session.section("checkpoint of the Trainer"), failing:
            self._real["_save_checkpoint"](*given, **more)
        if failing.error is not None:
            self._reporter.report(failing.error, trainer.state.global_step, folder)
            return
        self._reporter.reset()
        if marks:
            (folder / checkpoints.SENTINEL).unlink(missing_ok=True)

    def _stateful_callbacks(self) -> dict[str, list[Any]]:
        """Return the callbacks with a state of their own, such as early stopping, and the control, by name."""
        found: dict[str, list[Any]] = {}
        for one in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one)
        return found

    def _note_callbacks(self) -> None:
        """Write the callbacks' states into the Trainer's, as its own saves do."""
        states = {name: [one.state() for one in some] for name, some in self._stateful_callbacks().items()}
        self._trainer.state.stateful_callbacks = {name: some if len(some) > 1 else some[0] for name, some in states.items()}

    def _restore_callbacks(self) -> None:
        """Give the callbacks the states that the Trainer's state has of them."""
        present = self._stateful_callbacks()
        for name, states in self._trainer.state.stateful_callbacks.items():
            for one, state in zip(present.get(name, []), states if isinstance(states, list) else [states], strict=False):
                for attribute, value in state.get("attributes", {}).items():
                    setattr(one, attribute, value)

    def _finalize_training(self, *given: Any, **more: Any) -> Any:
        """End the session before anything else is done with the model."""
        self._session.close()
        for name in PARTS:
            vars(self._trainer).pop(name, None)
        return self._real["_finalize_training"](*given, **more)
