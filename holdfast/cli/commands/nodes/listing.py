"""`holdfast node ls`: list the nodes of a cluster."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlmodel import col, select

from holdfast.cli.arguments import cluster_in, known_nodes
from holdfast.cli.output import clock, echo_json, echo_table
from holdfast.cluster import NodeView, names_of, open_cluster
from holdfast.history import queries
from holdfast.history.cordons import CordonTable
from holdfast.history.cordons import nodes as cordoned_nodes
from holdfast.history.health_samples import health_by_node
from holdfast.history.models import Job, NodeStatusChange
from holdfast.history.store import History
from holdfast.policies.nodes.cordons import Cordon, CordonKind, Node
from holdfast.policies.nodes.maintenance import PlannedOutage, planned_outage
from holdfast.policies.nodes.node_health import HealthAssessment
from holdfast.report.text.wording import NOTHING
from holdfast.spec import Cluster

HEAD: Final = (
    "NODE",
    "STATUS",
    "SINCE",
    "OWNER",
    "EXPIRES",
    "REACHABLE",
    "AGENT",
    "JOB",
    "SLURM JOB",
    "LAST JOB STATUS",
    "CHANGED",
    "HEALTH",
    "LAST CHECK",
    "REASON",
)
ALWAYS: Final = frozenset({0, 1, 5, len(HEAD) - 1})
"""Columns that are shown even where they are empty for all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """What is known of one node."""

    view: NodeView
    """As it is now."""
    node: Node
    """Its cordons."""
    move: NodeStatusChange | None
    """Its last change by a job."""
    health: HealthAssessment | None
    """The result of its last health check."""
    due: bool
    """It is due for a burn-in."""
    window: PlannedOutage | None
    """The maintenance window that it is in, or its next one."""


def list_nodes(nodes: Sequence[str], cluster_file: Path | None, *, now: bool, as_json: bool) -> int:
    """List every node, or only *nodes*, with its present state, its cordons and the result of its last health check.

    Machines that are reached by SSH are contacted only if *now* is set: that takes time on both ends.
    """
    cluster = cluster_in(cluster_file)
    at = time.time()
    with closing(History.open(create=False)) as history:
        moves, health = queries.node_statuses(history, cluster.name), health_by_node(history, cluster.name)
        table = CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules)
        cordoned = cordoned_nodes(history, table, now=at)
        all_views = view_nodes(cluster, now=now)
        wanted = set(known_nodes(nodes, cluster.name, [view.name for view in all_views]))
        names = {job.id: job.name for job in jobs_on(history, all_views).values()}
        views = [dataclasses.replace(view, job=names.get(view.job or "", view.job)) for view in all_views if view.name in wanted]
    known = []
    for view in views:
        node = cordoned.get(view.name) or Node(name=view.name)
        window = planned_outage(cluster.windows, view.name, at, soon=False)
        known.append(
            KnownNode(view=view, node=node, move=moves.get(view.name), health=health.get(view.name), due=node.is_due(at), window=window)
        )
    if as_json:
        echo_json({"cluster": cluster.name, "nodes": [_record(one) for one in known]})
        return 0
    rows = [_row(one) for one in known]
    shown = [place for place in range(len(HEAD)) if place in ALWAYS or any(row[place] != NOTHING for row in rows)]
    echo_table([HEAD[place] for place in shown], [[row[place] for place in shown] for row in rows], coloured=1, last="wrapped")
    return 0


def view_nodes(cluster: Cluster, *, now: bool = False) -> list[NodeView]:
    """Return the nodes as they are now; those that are reached by SSH only with their names, unless *now* is set."""
    if cluster.kind == "ssh" and not now:
        return [NodeView(name=host.name, status=NOTHING, agent=NOTHING) for host in cluster.machines]
    with closing(open_cluster(cluster)) as source:
        return source.survey()


def jobs_on(history: History, views: Sequence[NodeView]) -> dict[str, Job]:
    """Return the job on each node, by node, where its agent reported the id of one that the history has."""
    with history.session() as session:
        jobs = {job.id: job for job in session.exec(select(Job).where(col(Job.id).in_({view.job for view in views if view.job})))}
    return {view.name: jobs[view.job] for view in views if view.job in jobs}


def _record(one: KnownNode) -> dict[str, Any]:
    move, health = one.move, one.health
    now = {name: None if value == NOTHING else value for name, value in dataclasses.asdict(one.view).items()}
    service = {
        "state": one.node.state,
        "since": one.node.since or None,
        "burn_in_due": one.due,
        "cordons": [dataclasses.asdict(cordon) for cordon in one.node.cordons],
        "maintenance": dataclasses.asdict(one.window) if one.window is not None else None,
    }
    jobs = {"status": move.status, "since": move.at, "reason": move.reason} if move else None
    checked = (
        {"status": health.status, "since": health.since, "seen": health.seen or None, "evidence": list(health.evidence)} if health else None
    )
    return {**now, "service": service, "history": jobs, "health": checked}


def _row(one: KnownNode) -> list[str]:
    view, move, health = one.view, one.move, one.health
    agent = f"pid {view.pid}" if view.pid else view.agent
    jobs = [move.status, clock(move.at)] if move else [NOTHING, NOTHING]
    checked = [health.status, clock(health.seen) if health.seen else NOTHING] if health else [NOTHING, NOTHING]
    reasons = [_reason(cordon) for cordon in reversed(one.node.cordons)]
    if one.window is not None:
        reasons.append(f"{one.window.reason} from {clock(one.window.start)} to {clock(one.window.ends)}")
    parts = [view.why, *reasons, move.reason if move else "", *(health.evidence if health else ())]
    reason = "\n".join(part for part in dict.fromkeys(parts) if part and not any(part in other for other in parts if other != part))
    return [view.name, *_service(one), view.status, agent, view.job or NOTHING, view.allocation or NOTHING, *jobs, *checked, reason]


def _service(one: KnownNode) -> list[str]:
    """Return state, since when, by whom and until when."""
    node = one.node
    if not node.cordons:
        return [node.state, clock(node.since) if node.since else NOTHING, NOTHING, NOTHING]
    newest = node.cordons[-1]
    until = "burn-in is due" if one.due else clock(newest.until) if newest.until is not None else NOTHING
    return [node.state, clock(node.since), newest.owner.name, until]


def _reason(one: Cordon) -> str:
    what = "cordoned" if one.kind is CordonKind.PERSON else str(one.kind)
    until = f", until {clock(one.until)}" if one.until is not None else ""
    if one.drains:
        what, until = "drained", f"; jobs leave by {clock(one.leave_by)}" if one.leave_by is not None else "; jobs leave when they can"
    return f"cordon {one.number} ({what} by {one.owner.name}, {clock(one.at)}{until}): {one.reason}"
