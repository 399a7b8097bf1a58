"""All metrics at one moment, as a collector of `prometheus_client`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast import __version__
from holdfast.history.models import ApprovalRequest, HealthSample, NodeStatusChange, ServiceTransition
from holdfast.history.store import History
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.states import State
from holdfast.report.metrics import incidents, jobs


class HistoryCollector:
    """Reads all metrics from the history at each scrape; this process keeps no samples."""

    def __init__(self) -> None:
        self._bills = jobs.Bills()
        self._lock = threading.Lock()
        """Concurrent scrapes wait for each other, because they share the bills."""

    def collect(self) -> list[Metric]:
        """Return every family; raise `HoldfastError` if the history cannot be read."""
        with self._lock:
            history = History.open(create=False)  # each time, so that one that was unreachable or replaced is found
            try:
                return collect(history, self._bills)
            finally:
                history.close()


def collect(history: History, bills: jobs.Bills | None = None) -> list[Metric]:
    """Return every family, read from *history* now; pass the same *bills* to repeated calls."""
    begin = time.monotonic()
    shown = jobs.shown(history, now=time.time())
    found = [_build(), _by_state(shown), *jobs.progress(history, shown), *jobs.controllers(history, shown)]
    with history.session() as session:
        found += [*incidents.incidents(session, shown), *incidents.faults(session, shown), *jobs.checkpoints(history, session, shown)]
        found += [*_nodes(session), _approvals(session)]
    found += jobs.goodput(history, shown, bills or jobs.Bills())
    took = GaugeMetricFamily("holdfast_collect_duration_seconds", "Seconds that it took to read these metrics from the history.")
    took.add_metric([], time.monotonic() - begin)
    return [*found, took]


def _build() -> Metric:
    found = GaugeMetricFamily("holdfast_build_info", "The version of Holdfast that serves these metrics.", labels=["version"])
    found.add_metric([__version__], 1)
    return found


def _by_state(shown: Sequence[jobs.JobMetrics]) -> Metric:
    """Return how many jobs are in each state, without those that ended long ago."""
    found = GaugeMetricFamily("holdfast_jobs", "Jobs by state: live ones, and those that ended in the last seven days.", labels=["state"])
    counted = Counter(one.state for one in shown)
    for state in State:
        found.add_metric([state.lower()], counted[state])
    return found


def _nodes(session: Session) -> list[Metric]:
    """Return the number of nodes of each cluster by state and by health, and the nodes that are not healthy."""
    states = GaugeMetricFamily(
        "holdfast_nodes", "Nodes that the history knows, by state: whether jobs may use them.", labels=["cluster", "state"]
    )
    unhealthy = GaugeMetricFamily(
        "holdfast_node_state",
        "1 for the state of each node that is not healthy; a healthy node has no series.",
        labels=["cluster", "node", "state"],
    )
    health = GaugeMetricFamily("holdfast_node_health", "Nodes by health, as the last probe found it.", labels=["cluster", "health"])
    known = _node_states(session)
    counted = Counter((cluster, state) for (cluster, _), state in known.items())
    for cluster in sorted({cluster for cluster, _ in known}):
        for state in NodeState:
            states.add_metric([cluster, state.value], counted[cluster, state])
    for (cluster, node), now in sorted(known.items()):
        if now != NodeState.HEALTHY:
            unhealthy.add_metric([cluster, node, now], 1)
    samples = Counter((row.cluster, str(row.health.get("status", "unknown"))) for row in session.exec(select(HealthSample)))
    for (cluster, found), times in sorted(samples.items()):
        health.add_metric([cluster, found], times)
    return [states, unhealthy, health]


def _node_states(session: Session) -> dict[tuple[str, str], str]:
    """Return the state of each node in the history, by cluster and name."""
    known: dict[tuple[str, str], str] = {}
    for model in (NodeStatusChange, HealthSample):
        for cluster, node in session.exec(select(col(model.cluster), col(model.node)).distinct()):
            known[cluster, node] = NodeState.HEALTHY.value
    numbers = select(col(ServiceTransition.cluster), col(ServiceTransition.node), func.max(col(ServiceTransition.number)).label("number"))
    newest = numbers.group_by(col(ServiceTransition.cluster), col(ServiceTransition.node)).subquery()
    wanted = select(ServiceTransition).join(
        newest,
        (col(ServiceTransition.cluster) == newest.c.cluster)
        & (col(ServiceTransition.node) == newest.c.node)
        & (col(ServiceTransition.number) == newest.c.number),
    )
    for transition in session.exec(wanted):
        known[transition.cluster, transition.node] = transition.after
    return known


def _approvals(session: Session) -> Metric:
    found = GaugeMetricFamily("holdfast_approvals_pending", "Approvals that wait for a person (`holdfast node approve`).")
    found.add_metric(
        [], session.exec(select(func.count()).select_from(ApprovalRequest).where(col(ApprovalRequest.answered_at).is_(None))).one()
    )
    return found
