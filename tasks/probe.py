"""Probe: look at all nodes of a cluster, judge what was seen, keep it, and show it. One task a sweep, however many nodes there are."""

from __future__ import annotations

import time

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from detectors.looks import Missed
from detectors.readings import NodeReading
from holdfast.report.wording import moment
from tasks import checkups
from tasks.events import emit_nodes


@task(task_run_name="sweep {cluster}", cache_policy=NO_CACHE)
def sweep(cluster: str, *, deadline: float, at: float = 0.0) -> dict[str, int]:
    """Look at every node once it is *at* (seconds since 1970); return how many were seen, missed, and not to be looked at."""
    time.sleep(max(0.0, at - time.time()))
    found = [look.found for look in checkups.of(cluster).sweep(deadline).values()]
    seen, missed = (sum(isinstance(one, kind) for one in found) for kind in (NodeReading, Missed))
    return {"seen": seen, "missed": missed, "blind": len(found) - seen - missed}


@task(task_run_name="classify {cluster}", cache_policy=NO_CACHE)
def classify(cluster: str) -> list[str]:
    """Judge each node by this look and the one before; return what changed, in words."""
    return [change.words for change in checkups.of(cluster).classify()]


@task(task_run_name="record {cluster}", cache_policy=NO_CACHE)
def record(cluster: str) -> None:
    """Keep looks, verdicts and changes in the history."""
    checkups.of(cluster).record()


@task(task_run_name="publish {cluster}", cache_policy=NO_CACHE)
def publish(cluster: str) -> str:
    """Show all nodes as a table, and tell of changes only by events; return the sweep in a sentence."""
    checkup = checkups.of(cluster)
    table = [
        {"node": told.node, "verdict": told.standing, "evidence": "; ".join(told.evidence), "since": moment(told.since)}
        for told in checkup.verdicts.values()
    ]
    _sent(create_table_artifact(table=table, key=artifact_key(cluster), description=f"Nodes of cluster {cluster}: {checkup.in_words}"))
    emit_nodes(cluster, [(change.node, change, {"kinds": [one.kind for one in change.new]}) for change in checkup.changes])
    return checkup.in_words


def artifact_key(cluster: str) -> str:
    """Return under which name the UI shows the newest table of *cluster*."""
    return f"{cluster}-nodes"


def _sent(_answer: object) -> None:
    """Drop the server's answer."""
