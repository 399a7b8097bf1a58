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
from holdfast.report.metrics import incidents, jobs
from policies.node_states import NodeState
from policies.states import State


class HistoryCollector:
    """Reads all metrics from the history at each scrape: no sample is kept in this process."""

    def __init__(self) -> None:
        self._accounts = jobs.Accounts()
        self._one_at_a_time = threading.Lock()
        """Scrapers that come at once wait for each other: they share the accounts, and the history is read for one of them."""

    def collect(self) -> list[Metric]:
        """Return every family, as `prometheus_client` asks for them; raise `HoldfastError` where the history cannot be read."""
        with self._one_at_a_time:
            history = History.open(create=False)  # each time: one that was away, or was put aside, is found again
            try:
                return collect(history, self._accounts)
            finally:
                history.close()


def collect(history: History, accounts: jobs.Accounts | None = None) -> list[Metric]:
    """Return every family, read from *history* now; *accounts* are kept from one call to the next by who calls often."""
    begin = time.monotonic()
    shown = jobs.shown(history, now=time.time())
    found = [_build(), _by_state(shown), *jobs.progress(history, shown), *jobs.controllers(history, shown)]
    with history.session() as session:
        found += [*incidents.incidents(session, shown), *incidents.faults(session, shown), *jobs.checkpoints(history, session, shown)]
        found += [*_nodes(session), _approvals(session)]
    found += jobs.goodput(history, shown, accounts or jobs.Accounts())
    took = GaugeMetricFamily("holdfast_collect_duration_seconds", "Seconds that it took to read these metrics from the history.")
    took.add_metric([], time.monotonic() - begin)
    return [*found, took]


def _build() -> Metric:
    found = GaugeMetricFamily("holdfast_build_info", "The version of Holdfast that serves these metrics.", labels=["version"])
    found.add_metric([__version__], 1)
    return found


def _by_state(shown: Sequence[jobs.JobMetrics]) -> Metric:
    """Return how many jobs are in each state; those that ended long ago are not counted."""
    found = GaugeMetricFamily("holdfast_jobs", "Jobs by state: live ones, and those that ended in the last seven days.", labels=["state"])
    counted = Counter(one.state for one in shown)
    for state in State:
        found.add_metric([state.lower()], counted[state])
    return found


def _nodes(session: Session) -> list[Metric]:
    """Return how many nodes of each cluster are in each state and of each health, and which nodes are not healthy."""
    states = GaugeMetricFamily(
        "holdfast_nodes", "Nodes that the history knows, by state: whether jobs may use them.", labels=["cluster", "state"]
    )
    apart = GaugeMetricFamily(
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
            apart.add_metric([cluster, node, now], 1)
    looks = Counter((row.cluster, str(row.verdict.get("status", "unknown"))) for row in session.exec(select(HealthSample)))
    for (cluster, status), times in sorted(looks.items()):
        health.add_metric([cluster, status], times)
    return [states, apart, health]


def _node_states(session: Session) -> dict[tuple[str, str], str]:
    """Return the state of each node that the history knows, by cluster and name."""
    known: dict[tuple[str, str], str] = {}
    for model in (NodeStatusChange, HealthSample):
        for cluster, node in session.exec(select(col(model.cluster), col(model.node)).distinct()):
            known[cluster, node] = NodeState.HEALTHY.value
    same = select(col(ServiceTransition.cluster), col(ServiceTransition.node), func.max(col(ServiceTransition.number)).label("number"))
    newest = same.group_by(col(ServiceTransition.cluster), col(ServiceTransition.node)).subquery()
    wanted = select(ServiceTransition).join(
        newest,
        (col(ServiceTransition.cluster) == newest.c.cluster)
        & (col(ServiceTransition.node) == newest.c.node)
        & (col(ServiceTransition.number) == newest.c.number),
    )
    for move in session.exec(wanted):
        known[move.cluster, move.node] = move.after
    return known


def _approvals(session: Session) -> Metric:
    found = GaugeMetricFamily("holdfast_approvals_pending", "Approvals that wait for a person (`holdfast approve`).")
    found.add_metric(
        [], session.exec(select(func.count()).select_from(ApprovalRequest).where(col(ApprovalRequest.answered_at).is_(None))).one()
    )
    return found
