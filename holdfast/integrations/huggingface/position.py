# ruff: noqa: SLF001, ANN401 (the Trainer's own attributes have no public names)
"""What a Trainer's training is made of besides model and optimizer: sums of losses, the position in an epoch, a late scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from holdfast.runtime.state import rng


class Position:
    """The per-rank state: the generators with which the epoch began, and the sums of losses that are not logged yet."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.scheduler = DeferredScheduler()
        self.epoch: rng.State = rng.capture()
        self.drew: rng.State = self.epoch
        """The generators before the newest batch was drawn."""
        self._sums: dict[str, Any] = {}

    def forget(self) -> None:
        """Forget what was restored: the Trainer loads a newer state itself."""
        self.epoch = self.drew = rng.capture()
        self._sums = {}

    def note_sums(self) -> None:
        """Record the sums of losses that the Trainer has not logged yet."""
        trainer = self._trainer
        self._sums = {
            "losses": float(trainer._tr_loss.item()),
            "logged": float(trainer._total_loss_scalar),
            "at": int(trainer._globalstep_last_logged),
            "floating": float(trainer.current_flos),
        }

    def restore_sums(self) -> None:
        """Give the Trainer the restored sums."""
        trainer, sums = self._trainer, self._sums
        if not sums:
            return
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

    def forget(self) -> None:
        """Forget a restored state."""
        self._state = {}

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
