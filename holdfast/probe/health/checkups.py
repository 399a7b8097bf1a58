"""The checkups that this process does, by cluster: Prefect's tasks take names, and look the live things up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.history import History
from holdfast.probe.health import Checkup
from holdfast.probe.sweep import open_sweeper
from holdfast.spec import Cluster

_CHECKUPS: dict[str, Checkup] = {}


@contextmanager
def open_checkup(cluster: Cluster) -> Iterator[Checkup]:
    """Have *cluster* checked up while the block runs, over connections that stay; raise `OperatorError` when that cannot be."""
    history = History.open()
    try:
        with open_sweeper(cluster) as sweeper:
            _CHECKUPS[cluster.name] = checkup = Checkup(cluster.name, sweeper, history)
            yield checkup
    finally:
        _CHECKUPS.pop(cluster.name, None)
        history.close()


def of(cluster: str) -> Checkup:
    """Return the checkup of *cluster*."""
    return _CHECKUPS[cluster]
