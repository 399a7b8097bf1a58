"""All metrics at one moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast import __version__
from holdfast.history.models import LastLook, NodeMove, Question, ServiceMove
from holdfast.history.store import History
from holdfast.report.metrics import incidents, jobs
from holdfast.report.metrics.exposition import MetricFamily
from policies.node_states import NodeState
from policies.states import State


def collect(history: History, accounts: jobs.Accounts | None = None) -> list[MetricFamily]:
    """Return every family, read from *history* now; *accounts* are kept from one call to the next by who calls often."""
    begin = time.monotonic()
    shown = jobs.shown(history, now=time.time())
    found = [_build(), _by_state(shown), *jobs.progress(history, shown), *jobs.controllers(history, shown)]
    with history.session() as session:
        found += [*incidents.incidents(session, shown), *incidents.faults(session, shown), *jobs.checkpoints(history, session, shown)]
        found += [*_nodes(session), _approvals(session)]
    found += jobs.goodput(history, shown, accounts or jobs.Accounts())
    took = MetricFamily("holdfast_collect_duration_seconds", "gauge", "Seconds that it took to read these metrics from the history.")
    took.add(time.monotonic() - begin)
    return [*found, took]


def _build() -> MetricFamily:
    found = MetricFamily("holdfast_build_info", "gauge", "The version of Holdfast that serves these metrics.")
    found.add(1, version=__version__)
    return found


def _by_state(shown: Sequence[jobs.JobMetrics]) -> MetricFamily:
    """Return how many jobs are in each state; those that ended long ago are not counted."""
    found, counted = (
        MetricFamily("holdfast_jobs", "gauge", "Jobs by state: live ones, and those that ended in the last seven days."),
        Counter(one.state for one in shown),
    )
    for state in State:
        found.add(counted[state], state=state.lower())
    return found


def _nodes(session: Session) -> list[MetricFamily]:
    """Return how many nodes of each cluster are in each state and of each health, and which nodes are not healthy."""
    states = MetricFamily("holdfast_nodes", "gauge", "Nodes that the history knows, by state: whether jobs may use them.")
    apart = MetricFamily("holdfast_node_state", "gauge", "1 for the state of each node that is not healthy; a healthy node has no series.")
    health = MetricFamily("holdfast_node_health", "gauge", "Nodes by health, as the last probe found it.")
    known = _node_states(session)
    counted = Counter((cluster, state) for (cluster, _), state in known.items())
    for cluster in sorted({cluster for cluster, _ in known}):
        for state in NodeState:
            states.add(counted[cluster, state], cluster=cluster, state=state.value)
    for (cluster, node), now in sorted(known.items()):
        if now != NodeState.HEALTHY:
            apart.add(1, cluster=cluster, node=node, state=now)
    looks = Counter((row.cluster, str(row.verdict.get("standing", "unknown"))) for row in session.exec(select(LastLook)))
    for (cluster, standing), times in sorted(looks.items()):
        health.add(times, cluster=cluster, health=standing)
    return [states, apart, health]


def _node_states(session: Session) -> dict[tuple[str, str], str]:
    """Return the state of each node that the history knows, by cluster and name."""
    known: dict[tuple[str, str], str] = {}
    for model in (NodeMove, LastLook):
        for cluster, node in session.exec(select(col(model.cluster), col(model.node)).distinct()):
            known[cluster, node] = NodeState.HEALTHY.value
    same = select(col(ServiceMove.cluster), col(ServiceMove.node), func.max(col(ServiceMove.number)).label("number"))
    newest = same.group_by(col(ServiceMove.cluster), col(ServiceMove.node)).subquery()
    wanted = select(ServiceMove).join(
        newest,
        (col(ServiceMove.cluster) == newest.c.cluster)
        & (col(ServiceMove.node) == newest.c.node)
        & (col(ServiceMove.number) == newest.c.number),
    )
    for move in session.exec(wanted):
        known[move.cluster, move.node] = move.after
    return known


def _approvals(session: Session) -> MetricFamily:
    found = MetricFamily("holdfast_approvals_pending", "gauge", "Approvals that wait for a person (`holdfast approve`).")
    found.add(session.exec(select(func.count()).select_from(Question).where(col(Question.answered_at).is_(None))).one())
    return found
