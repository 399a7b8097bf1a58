"""The configs of torchtitan's own models with `HoldfastCheckpointManager` as their checkpoint manager.

torchtitan looks a config up by ``--module`` and ``--config``: each function in the ``config_registry`` of one of its models is found here
too, under the same name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models import _supported_models

from holdfast.integrations.torchtitan.manager import HoldfastCheckpointManager


def with_holdfast(config: Any) -> Any:  # noqa: ANN401 (the config of any Trainer)
    """Return *config*, of a torchtitan Trainer, with checkpoints that Holdfast manages.

    The settings of torchtitan's own checkpoints (``config.checkpoint``) stay, and they are switched on.

    Raises:
        TypeError: The config has another checkpoint manager than torchtitan's default.
    """
    checkpoint = config.checkpoint
    if isinstance(checkpoint, HoldfastCheckpointManager.Config):
        return config
    if type(checkpoint) is not CheckpointManager.Config:
        raise TypeError(
            f"with_holdfast replaces torchtitan's CheckpointManager, and this config has {type(checkpoint).__qualname__}: "
            "use CheckpointManager.Config"
        )
    values = {one.name: getattr(checkpoint, one.name) for one in dataclasses.fields(checkpoint)}
    config.checkpoint = HoldfastCheckpointManager.Config(**{**values, "enable": True})
    return config


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the config function *name* of a model of torchtitan, with Holdfast's checkpoint manager."""
    if name.startswith("_"):
        raise AttributeError(name)
    for model in sorted(_supported_models, key=len, reverse=True):
        if not name.startswith(model):
            continue
        found = getattr(import_module(f"torchtitan.models.{model}.config_registry"), name, None)
        if callable(found):
            return lambda: with_holdfast(found())
    raise AttributeError(f"no model of torchtitan has a config {name!r}")
