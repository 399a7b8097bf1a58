"""`holdfast nodes`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.cli.output import clock, say_json, say_rows
from holdfast.cluster import NodeView, names_of, open_cluster
from holdfast.history import queries
from holdfast.history.cordons import CordonTable
from holdfast.history.cordons import nodes as held_nodes
from holdfast.history.health_samples import health_by_node
from holdfast.history.models import Job, NodeStatusChange
from holdfast.history.store import History
from holdfast.report.wording import NOTHING
from holdfast.spec import Cluster, LocalCluster, load_cluster
from policies.cordons import Cordon, CordonKind, Node
from policies.maintenance import MaintenanceWindow, PlannedOutage, planned_outage
from policies.node_health import HealthAssessment

HEAD: Final = (
    "NODE",
    "STATE",
    "SINCE",
    "BY",
    "UNTIL",
    "NOW",
    "AGENT",
    "JOB",
    "SLURM JOB",
    "HISTORY",
    "SINCE",
    "VERDICT",
    "SEEN",
    "REASON",
)
ALWAYS: Final = frozenset({0, 1, 5, len(HEAD) - 1})
"""Columns that are shown even where no node has anything to say in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """One node: as it is seen now, what is held against it, what jobs did with it, and what was thought of it from outside."""

    view: NodeView
    node: Node
    move: NodeStatusChange | None
    told: HealthAssessment | None
    due: bool
    """A burn-in should be run on it."""
    closing: PlannedOutage | None
    """The maintenance window that it is in, or its next one."""


def nodes(cluster_file: Path | None, *, now: bool, as_json: bool) -> int:
    """Show every node as it is seen now, what is held against it and by whom, and what was last thought of it from outside.

    Machines that are reached by SSH are logged in to only where *now* asks for it: that takes time and the processor, of both ends.
    """
    cluster = load_cluster(cluster_file) if cluster_file else LocalCluster()
    history = History.open(create=False)
    try:
        moves, told = queries.node_statuses(history, cluster.name), health_by_node(history, cluster.name)
        held = held_nodes(
            history, CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules), now=time.time()
        )
        views = [_with_name(history, view) for view in views_of(cluster, now=now)]
    finally:
        history.close()
    known = [_known(view, held, moves.get(view.name), told.get(view.name), cluster.windows) for view in views]
    if as_json:
        say_json({"cluster": cluster.name, "nodes": [_record(one) for one in known]})
        return 0
    rows = [_row(one) for one in known]
    shown = [place for place in range(len(HEAD)) if place in ALWAYS or any(row[place] != NOTHING for row in rows)]
    say_rows([HEAD[place] for place in shown], [[row[place] for place in shown] for row in rows], coloured=1, last="folded")
    return 0


def _known(
    view: NodeView,
    held: Mapping[str, Node],
    move: NodeStatusChange | None,
    told: HealthAssessment | None,
    windows: tuple[MaintenanceWindow, ...],
) -> KnownNode:
    node = held.get(view.name) or Node(name=view.name)
    now = time.time()
    closed = planned_outage(windows, view.name, now, soon=False)
    return KnownNode(view=view, node=node, move=move, told=told, due=node.is_due(now), closing=closed)


def views_of(cluster: Cluster, *, now: bool = False) -> list[NodeView]:
    """Return the nodes as they are seen now; those that are reached by SSH are only named, unless *now*."""
    if cluster.kind == "ssh" and not now:
        return [NodeView(name=host.name, status=NOTHING, agent=NOTHING) for host in cluster.machines]
    with contextlib.closing(open_cluster(cluster)) as source:
        return source.survey()


def _with_name(history: History, view: NodeView) -> NodeView:
    """Return the node with its job's name, where its agent told the job's id."""
    with history.session() as session:
        job = session.get(Job, view.job) if view.job else None
    return dataclasses.replace(view, job=job.name) if job else view


def _record(one: KnownNode) -> dict[str, Any]:
    move, told = one.move, one.told
    jobs = {"status": move.status, "since": move.at, "reason": move.reason} if move else None
    thought = {"verdict": told.status, "since": told.since, "seen": told.seen or None, "evidence": list(told.evidence)} if told else None
    now = {name: None if value == NOTHING else value for name, value in dataclasses.asdict(one.view).items()}
    service = {
        "state": one.node.state,
        "since": one.node.since or None,
        "burn_in_due": one.due,
        "holds": [dataclasses.asdict(hold) for hold in one.node.holds],
        "maintenance": dataclasses.asdict(one.closing) if one.closing is not None else None,
    }
    return {**now, "service": service, "history": jobs, "health": thought}


def _row(one: KnownNode) -> list[str]:
    view, move, told = one.view, one.move, one.told
    agent = f"pid {view.pid}" if view.pid else view.agent
    jobs = [move.status, clock(move.at)] if move else [NOTHING, NOTHING]
    thought = [told.status, clock(told.seen) if told.seen else NOTHING] if told else [NOTHING, NOTHING]
    reasons = [_reason(hold) for hold in reversed(one.node.holds)]
    if one.closing is not None:
        reasons.append(f"{one.closing.reason} from {clock(one.closing.begins)} to {clock(one.closing.ends)}")
    seen = [view.why, *reasons, move.reason if move else "", *(told.evidence if told else ())]
    reason = "\n".join(words for words in dict.fromkeys(seen) if words and not any(words in other for other in seen if other != words))
    return [view.name, *_service(one), view.status, agent, view.job or NOTHING, view.allocation or NOTHING, *jobs, *thought, reason]


def _service(one: KnownNode) -> list[str]:
    """Return state, since when, by whom and until when."""
    node = one.node
    if not node.holds:
        return [node.state, clock(node.since) if node.since else NOTHING, NOTHING, NOTHING]
    newest = node.holds[-1]
    until = "burn-in is due" if one.due else clock(newest.until) if newest.until is not None else NOTHING
    return [node.state, clock(node.since), newest.owner.name, until]


def _reason(hold: Cordon) -> str:
    what = "held" if hold.kind is CordonKind.PERSON else str(hold.kind)
    until = f", until {clock(hold.until)}" if hold.until is not None else ""
    if hold.drains:
        what, until = "drained", f"; jobs leave by {clock(hold.leave_by)}" if hold.leave_by is not None else "; jobs leave when they can"
    return f"hold {hold.number} ({what} by {hold.owner.name}, {clock(hold.at)}{until}): {hold.reason}"
