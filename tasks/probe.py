"""Probe: look at all nodes of a cluster, judge what was seen, keep it, and show it. One task a sweep, however many nodes there are."""

from __future__ import annotations

import time

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from detectors.probe_result import UnansweredProbe
from detectors.readings import NodeReading
from holdfast.prefect_client.events import emit_nodes
from holdfast.probe.health import Checkup
from holdfast.probe.registry import registered
from holdfast.report.node_text import MOST_NAMED, changes_in_short, rows, summary
from holdfast.report.wording import listing, plural


@task(task_run_name="probe the nodes of {cluster}", cache_policy=NO_CACHE)
def sweep(cluster: str, *, deadline: float, at: float = 0.0) -> State[dict[str, int]]:
    """Look at every node once it is *at* (seconds since 1970); return how many were seen, missed, and not to be looked at."""
    time.sleep(max(0.0, at - time.time()))
    found = {node: look.found for node, look in registered(Checkup, cluster).sweep(deadline).items()}
    seen = sum(isinstance(one, NodeReading) for one in found.values())
    missed = [node for node, one in found.items() if isinstance(one, UnansweredProbe)]
    blind = [node for node, one in found.items() if not isinstance(one, NodeReading | UnansweredProbe)]
    parts = [f"{seen} of {plural(len(found), 'node')} answered"]
    parts += [f"no answer from {listing(missed, MOST_NAMED)}"] if missed else []
    parts += [f"could not look at {listing(blind, MOST_NAMED)}"] if blind else []
    return Completed(message="; ".join(parts), data={"seen": seen, "missed": len(missed), "blind": len(blind)})


@task(task_run_name="judge the nodes of {cluster}", cache_policy=NO_CACHE)
def classify(cluster: str) -> State[list[str]]:
    """Judge each node by this look and the one before; return what changed, in words."""
    changes = registered(Checkup, cluster).classify()
    return Completed(message=changes_in_short(changes), data=[change.words for change in changes])


@task(task_run_name="record the nodes of {cluster}", cache_policy=NO_CACHE)
def record(cluster: str) -> State[None]:
    """Keep looks, verdicts and changes in the history."""
    checkup = registered(Checkup, cluster)
    checkup.record()
    kept = f"{plural(len(checkup.assessments), 'node')} and {plural(len(checkup.changes), 'change')}"
    return Completed(message=f"{kept} are in the history", data=None)


@task(task_run_name="publish the nodes of {cluster}", cache_policy=NO_CACHE)
def publish(cluster: str) -> State[str]:
    """Show all nodes as a table, and tell of changes only by events; return the sweep in a sentence."""
    checkup = registered(Checkup, cluster)
    table = [row for verdict in checkup.assessments.values() for row in rows(verdict)]
    said = summary(checkup)
    _sent(create_table_artifact(table=table, key=artifact_key(cluster), description=f"Nodes of cluster {cluster}: {said}"))
    emit_nodes(cluster, [(change.node, change, {"kinds": [one.kind for one in change.new]}) for change in checkup.changes])
    return Completed(message=said, data=said)


def artifact_key(cluster: str) -> str:
    """Return under which name the UI shows the newest table of *cluster*."""
    return f"{cluster}-nodes"


def _sent(_answer: object) -> None:
    """Drop the server's answer."""
