"""What a controller passes to whoever shows its job: plain facts, copied where they are made."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.history import this_host

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController


def began(run: JobController) -> dict[str, Any]:
    """Return what is known of a job when a controller takes it."""
    return {
        "job": run.job,
        "cluster": run.cluster.name,
        "host": this_host().partition("/")[0],
        "state": str(run.state),
        "history": run.history,
        "reattached": run.reattached,
        "step": run.generations.best or None,
        **nodes_of(run),
    }


def nodes_of(run: JobController) -> dict[str, Any]:
    """Return which node holds which ranks, which ones are spare or out of service, and where hot spares wait."""
    return {
        "ranks": {node: tuple(ranks) for node, ranks in run.generations.state.membership.items()},
        "spares": tuple(run.nodes.spares()) if not run.ended else (),
        "hot_spares": dict(Counter(one.node for one in run.nodes.ready_hot_spares())),
        "isolated": {node: run.nodes.eligibility.isolation(node) for node in run.nodes.eligibility.isolated()},
    }
