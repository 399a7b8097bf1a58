# ruff: noqa: ANN401, ARG002 (the signatures of Lightning's hooks)
"""The callback: it checks whether this training can be resumed, and starts a session for it."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any, Final

from holdfast.integrations.lightning.fit import PARTS, Fit
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.membership import membership

OLDEST: Final = (2, 6)
"""The first version of Lightning whose loops this callback knows."""
PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""The same framework is installed under two names."""
WHOLE: Final = ("DDPStrategy", "SingleDeviceStrategy")
"""Strategies with which each rank holds the whole model."""
SHARDED: Final = ("DeepSpeedStrategy",)
"""Subclasses of these with which it does not."""
UNSUPPORTED: Final = {
    "BaseFinetuning": "adds parameter groups to the optimizer while training",
    "StochasticWeightAveraging": "keeps a second model that no checkpoint of a session contains",
    "WeightAveraging": "keeps a second model that no checkpoint of a session contains",
}
"""Callbacks of Lightning whose state a session cannot restore, by class; and why."""


def _lightning() -> Any:
    """Return Lightning under the name by which the script has imported it. Raise ``ImportError`` without one that is new enough."""
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            package = import_module(name)
        except ImportError:
            continue
        version = str(getattr(package, "__version__", "0"))
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
            raise ImportError(
                f"HoldfastCallback needs Lightning 2.6 or newer, and this is {name} {version}: pip install 'lightning>=2.6,<3'"
            )
        return package
    raise ImportError("HoldfastCallback needs Lightning, which is not installed: pip install 'lightning>=2.6,<3'")


class HoldfastCallback(_lightning().Callback):  # type: ignore[misc]  # a base class that is chosen at run time
    """Report the steps of a Lightning ``Trainer`` to Holdfast, and resume after a fault with bit-identical weights.

    Add it to the Trainer: ``Trainer(callbacks=[HoldfastCallback()])``. In a job, ``trainer.fit`` then saves and restores, with a
    `holdfast.session`: model, optimizers, schedulers, random generators, position in the training data, loop counters, logged values of the
    epoch, and the states of the other callbacks, of the ``LightningDataModule`` and of ``on_save_checkpoint``. A step is one call of the
    optimizer, with all batches that are accumulated for it. Validation and checkpoints of Lightning are declared as long sections. Outside
    of a job the callback does nothing.

    Args:
        options: ``checkpoint_dir``, ``save_every`` and ``keep``, as for `holdfast.session`.

    Raises:
        ImportError: Lightning is not installed, or older than 2.6 (when this module is imported).
        TypeError: An option is unknown; or, from ``fit``, a callback or hook has a state that cannot be saved.
        RuntimeError: From ``fit``: the strategy shards the model, a callback is not supported, this process has a session already, or
            ``holdfast.join()`` was called.
    """

    def __init__(self, **options: Any) -> None:
        unknown = sorted(options.keys() - {"checkpoint_dir", "save_every", "keep"})
        if unknown:
            raise TypeError(f"HoldfastCallback({unknown[0]}=...) is unknown: the options are checkpoint_dir, save_every and keep")
        super().__init__()
        self._options = options
        self._fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare to run ``fit`` under a session."""
        if stage != "fit" or not link().attached:
            return
        _check_support(trainer)
        _check_process(trainer)
        self._fit = Fit(trainer, pl_module, self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of a batch."""
        if self._fit is not None:
            self._fit.add_loss(outputs)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the Trainer as it was: the session does not end well."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the Trainer as it was."""
        if self._fit is not None:
            self._fit.unwrap()
            self._fit = None


def _check_support(trainer: Any) -> None:
    """Refuse a Trainer that could not be resumed. Raise ``RuntimeError``."""
    for part in PARTS:
        try:
            attrgetter(part)(trainer)
        except AttributeError:
            raise RuntimeError(f"HoldfastCallback knows Lightning 2.6, and this one's Trainer has no {part}: install 2.6") from None
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not set(WHOLE) & set(kinds) or set(SHARDED) & set(kinds):
        raise RuntimeError(
            f"HoldfastCallback needs a strategy with which each rank holds the whole model (ddp, or one device), not {kinds[0]}: remove "
            "the callback, and resume from Lightning's checkpoints"
        )
    for callback in trainer.callbacks:
        found = [name for kind in type(callback).__mro__ if (name := kind.__name__) in UNSUPPORTED]
        if found:
            raise RuntimeError(f"HoldfastCallback cannot resume with {type(callback).__name__}: it {UNSUPPORTED[found[0]]}")


def _check_process(trainer: Any) -> None:
    """Refuse a second session, `holdfast.join`, and a Trainer with another number of ranks than the job. Raise ``RuntimeError``.

    Groups that the launcher manages, asked to or not, are left as they are after a fault.
    """
    several = sum(isinstance(one, HoldfastCallback) for one in trainer.callbacks) > 1
    if several or link().has_session:
        raise RuntimeError(
            "this process has a session of Holdfast already (a HoldfastCallback of this or another framework, an earlier fit, or "
            "holdfast.session): one process can have one"
        )
    manager = membership()
    if manager is not None and manager.replaces_init:
        manager.decline("Lightning's Trainer cannot repeat a step in its process")
    elif manager is not None:
        raise RuntimeError(
            "HoldfastCallback restores a Trainer's state, and the Trainer cannot repeat a step in its process: remove holdfast.join()"
        )
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if trainer.world_size != size:
        raise RuntimeError(
            f"the job has {size} ranks and the Trainer {trainer.world_size}: use devices=int(os.environ['LOCAL_WORLD_SIZE']) and "
            "num_nodes=int(os.environ['WORLD_SIZE']) // int(os.environ['LOCAL_WORLD_SIZE'])"
        )
