"""torchtitan in a Holdfast job: ``--module holdfast.integrations.torchtitan --config NAME``, or `with_holdfast` around a config."""

from __future__ import annotations

try:
    import torchtitan
except ModuleNotFoundError as error:
    if error.name != "torchtitan":
        raise
    text = "holdfast.integrations.torchtitan needs torchtitan: pip install 'torchtitan>=0.3'"
    raise ModuleNotFoundError(text, name="torchtitan") from error

try:
    from torchtitan.components.checkpointer import CheckpointManager  # noqa: F401 (named in the error below)
except ModuleNotFoundError as error:
    if not str(error.name).startswith("torchtitan"):
        raise
    raise ImportError(
        f"holdfast.integrations.torchtitan needs torchtitan 0.3 or newer, and {torchtitan.__version__} is installed: "
        "pip install --upgrade torchtitan"
    ) from error

from holdfast.integrations.torchtitan.config_registry import with_holdfast
from holdfast.integrations.torchtitan.manager import HoldfastCheckpointManager

__all__ = ["HoldfastCheckpointManager", "with_holdfast"]
