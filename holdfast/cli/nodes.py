"""`holdfast nodes`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from holdfast.cli.output import clock, say_json, say_rows
from holdfast.cluster import NodeView, open_cluster
from holdfast.history import queries
from holdfast.history.models import Job, NodeMove
from holdfast.history.store import History
from holdfast.report.wording import NOTHING
from holdfast.spec import LocalCluster, load_cluster


def nodes(cluster_file: Path | None, *, as_json: bool) -> int:
    """Show every node as it is seen now, and what the history holds against it."""
    cluster = load_cluster(cluster_file) if cluster_file else LocalCluster()
    views = open_cluster(cluster).survey()
    history = History.open(create=False)
    try:
        moves = queries.node_standings(history, cluster.name)
        views = [_with_name(history, view) for view in views]
    finally:
        history.close()
    if as_json:
        say_json({"cluster": cluster.name, "nodes": [_record(view, moves.get(view.name)) for view in views]})
    else:
        say_rows(
            ("NODE", "NOW", "AGENT", "JOB", "HISTORY", "SINCE", "BECAUSE"), [_row(view, moves.get(view.name)) for view in views], coloured=1
        )
    return 0


def _with_name(history: History, view: NodeView) -> NodeView:
    """Return the node with its job's name, where its agent told the job's id."""
    with history.session() as session:
        job = session.get(Job, view.job) if view.job else None
    return dataclasses.replace(view, job=job.name) if job else view


def _record(view: NodeView, move: NodeMove | None) -> dict[str, Any]:
    held = {"standing": move.standing, "since": move.at, "because": move.because} if move else None
    return {**dataclasses.asdict(view), "history": held}


def _row(view: NodeView, move: NodeMove | None) -> list[str]:
    agent = f"pid {view.pid}" if view.pid else view.agent
    held = [move.standing, clock(move.at), move.because] if move else [NOTHING, NOTHING, ""]
    return [view.name, view.standing, agent, view.job or NOTHING, *held]
