"""The repairs that this process does, by cluster: Prefect's tasks take names, and look the live things up here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.history import History
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.repair import Repair
from holdfast.spec import Cluster
from policies.cordons import Owner

_REPAIRS: dict[str, Repair] = {}


@contextmanager
def open_repair(cluster: Cluster, seconds: float | None = None, nodes: Sequence[str] = ()) -> Iterator[Repair]:
    """Have *nodes* of *cluster* repaired while the block runs; raise `OperatorError` when that cannot be."""
    history = History.open()
    try:
        owner, plan = Owner(name="node-repair"), BurnInPlan.of(cluster.burn_in, seconds=seconds)
        with Repair(cluster, history, owner, plan) as repair:
            repair.check_names(nodes)
            _REPAIRS[cluster.name] = repair
            yield repair
    finally:
        _REPAIRS.pop(cluster.name, None)
        history.close()


def of(cluster: str) -> Repair:
    """Return the repair of *cluster*."""
    return _REPAIRS[cluster]
