"""Holdfast keeps distributed PyTorch training running through faults.

The names of `__all__` are the public Python API: docs/reference/python-api.md describes them. Importing this package imports neither torch
nor Prefect; each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.runtime.data.batch_shards import MicroBatch
    from holdfast.runtime.data.loader import Loader
    from holdfast.runtime.init import join
    from holdfast.runtime.session import Session, Step, session
    from holdfast.runtime.telemetry.progress import heartbeat, section
    from holdfast.spec import Cluster, LocalCluster, SlurmCluster, SshCluster, TrainingJob

__version__: Final[str] = "0.2.0.dev0"  # pyproject.toml reads it from here: on a node, no metadata is installed
"""The installed version of Holdfast."""

_HOMES: Final = {
    "Cluster": "holdfast.spec",
    "Loader": "holdfast.runtime.data.loader",
    "LocalCluster": "holdfast.spec",
    "MicroBatch": "holdfast.runtime.data.batch_shards",
    "Session": "holdfast.runtime.session",
    "SlurmCluster": "holdfast.spec",
    "SshCluster": "holdfast.spec",
    "Step": "holdfast.runtime.session",
    "TrainingJob": "holdfast.spec",
    "heartbeat": "holdfast.runtime.telemetry.progress",
    "join": "holdfast.runtime.init",
    "section": "holdfast.runtime.telemetry.progress",
    "session": "holdfast.runtime.session",
}

__all__ = [
    "Cluster",
    "Loader",
    "LocalCluster",
    "MicroBatch",
    "Session",
    "SlurmCluster",
    "SshCluster",
    "Step",
    "TrainingJob",
    "__version__",
    "heartbeat",
    "join",
    "section",
    "session",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a name of any kind)
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}; the public names are {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
