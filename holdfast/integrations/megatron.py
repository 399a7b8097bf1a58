"""Megatron-LM in a Holdfast job: the functions of its ``ft_integration``, which report steps and long sections to Holdfast.

Megatron-LM saves and restores its own state, and restarts from its own checkpoint; this reports what it does. There are two ways to use it:

* in the script, before ``megatron.training`` is imported: ``holdfast.integrations.megatron.replace_ft_integration()``;
* in a loop of your own: ``from holdfast.integrations import megatron as ft_integration``, and the calls that Megatron-LM makes.

Neither needs ``--enable-ft-package``, ``ft_launcher`` or NVRx. Outside of a Holdfast job the functions do nothing. This module imports
neither torch nor Megatron.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final, SupportsFloat

from holdfast.runtime.agent_client import link
from holdfast.runtime.telemetry.progress import Scalar, heartbeat, section

_log: Final = logging.getLogger("holdfast.runtime")

REPLACED: Final = "megatron.training.ft_integration"
"""The module of Megatron-LM that `replace_ft_integration` replaces."""
_open: dict[str, AbstractContextManager[None]] = {}
"""The sections that this process is in, by name."""
_steps: dict[str, int] = {}
"""The newest step that was reported, as ``done``."""


def replace_ft_integration() -> None:
    """Have Megatron-LM call this module in place of its own ``ft_integration``.

    Call it in the script, before or after ``megatron.training`` is imported, and before ``pretrain``.
    """
    this = sys.modules[__name__]
    real = sys.modules.get(REPLACED)
    sys.modules[REPLACED] = this
    for name, module in list(sys.modules.items()):
        if real is not None and name.startswith("megatron.") and vars(module).get("ft_integration") is real:
            module.ft_integration = this  # type: ignore[attr-defined]


def get_rank_monitor_client() -> None:
    """Return None: there is no client of NVRx."""


def setup() -> None:
    """Announce this rank; call it before Megatron is initialised.

    Until the first step ``timeouts.startup`` of the job applies.
    """
    link().hello()


def on_training_step_start() -> None:
    """Call this before each training step."""
    _end_all()


def on_training_step_end(iteration: int | None = None, loss: SupportsFloat | Scalar | None = None) -> None:
    """Report a training step; call this after it, on every rank.

    Args:
        iteration: Number of the step that is done, counted from 1 over the whole job; None: as Megatron-LM's training loop counts it.
        loss: Loss of the step, a number or a tensor with one element: as for `holdfast.heartbeat`.

    Raises:
        RuntimeError: ``iteration`` is not given, and no training loop of Megatron-LM runs.
        TypeError: As `holdfast.heartbeat` does.
        ValueError: As `holdfast.heartbeat` does.
    """
    if not link().attached:
        return
    arguments = _arguments()
    if iteration is None:
        before = getattr(arguments, "curr_iteration", None)
        if before is None:
            raise RuntimeError(
                "on_training_step_end() does not know the step: outside of Megatron-LM's training loop give iteration=..., counted from 1"
            )
        iteration = int(before) + 1
    heartbeat(iteration, loss, until=getattr(arguments, "train_iters", None))
    _steps["done"] = iteration


def on_eval_step_start() -> None:
    """Call this before each evaluation step: it is a section of its own, as it may take longer than a training step."""
    _start("evaluation step")


def on_eval_step_end() -> None:
    """Call this after each evaluation step."""
    _end("evaluation step")


def on_checkpointing_start() -> None:
    """Call this before each operation that saves, such as the end of an asynchronous save."""
    _start("checkpointing")


def on_checkpointing_end(is_async_finalization: bool) -> None:  # noqa: ARG001, FBT001 (Megatron's signature)
    """Call this after each operation that saves.

    Args:
        is_async_finalization: Whether it was the end of an asynchronous save. Not used: timeouts follow from step times.
    """
    _end("checkpointing")


def on_checkpoint_loaded(is_local_chkpt: bool) -> None:  # noqa: FBT001 (as above)
    """Call this after a checkpoint was loaded. Nothing depends on it: timeouts are not calculated from the time that loading takes.

    Args:
        is_local_chkpt: Whether it was a local checkpoint.
    """


def shutdown() -> None:
    """Report the end of the training, if all its steps are done; call this after the last save."""
    _end_all()
    if _steps and _steps["done"] >= getattr(_arguments(), "train_iters", 0):
        link().finished(_steps["done"])


def maybe_setup_simulated_fault() -> None:
    """Warn that ``FT_SIM_FAULT_DESC``, by which NVRx simulates faults, has no effect."""
    if os.environ.get("FT_SIM_FAULT_DESC") and os.environ.get("RANK", "0") == "0":
        _log.warning("FT_SIM_FAULT_DESC has no effect: Holdfast simulates no faults in training jobs")


def _arguments() -> Any:  # noqa: ANN401 (Megatron's)
    """Return the arguments of Megatron-LM's training loop; None without one."""
    module: ModuleType | None = sys.modules.get("megatron.training.global_vars")
    return None if module is None else vars(module).get("_GLOBAL_ARGS")


def _start(name: str) -> None:
    _end(name)  # an operation that failed has not ended it
    _open[name] = section(name)
    _open[name].__enter__()


def _end(name: str) -> None:
    context = _open.pop(name, None)
    if context is not None:
        context.__exit__(None, None, None)


def _end_all() -> None:
    for name in list(_open):
        _end(name)
