"""Tasks of the cluster-health flow: probe all nodes, assess their health, record and publish it. One task run each per sweep."""

from __future__ import annotations

import time

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from holdfast.detectors.nodes.probe_result import UnansweredProbe
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.plurals import plural
from holdfast.prefect_client.events import emit_nodes
from holdfast.probe.health import Checkup
from holdfast.probe.registry import registered
from holdfast.report.text.node_text import MOST_NAMED, changes_in_short, health_markdown, summary
from holdfast.report.text.wording import listing


@task(task_run_name="probe the nodes of {cluster}", cache_policy=NO_CACHE)
def sweep(cluster: str, *, deadline: float, at: float = 0.0) -> State[dict[str, int]]:
    """Probe every node at the time *at* (Unix time in seconds); return how many answered, did not answer, and could not be probed."""
    time.sleep(max(0.0, at - time.time()))
    found = {node: probe.found for node, probe in registered(Checkup, cluster).sweep(deadline).items()}
    answered = sum(isinstance(one, NodeReading) for one in found.values())
    missed = [node for node, one in found.items() if isinstance(one, UnansweredProbe)]
    unknown = [node for node, one in found.items() if not isinstance(one, NodeReading | UnansweredProbe)]
    parts = [f"{answered} of {plural(len(found), 'node')} answered"]
    parts += [f"no answer from {listing(missed, MOST_NAMED)}"] if missed else []
    parts += [f"could not probe {listing(unknown, MOST_NAMED)}"] if unknown else []
    return Completed(message="; ".join(parts), data={"answered": answered, "missed": len(missed), "unknown": len(unknown)})


@task(task_run_name="assess the nodes of {cluster}", cache_policy=NO_CACHE)
def classify(cluster: str) -> State[list[str]]:
    """Assess each node from this probe and the previous one; return what changed."""
    changes = registered(Checkup, cluster).classify()
    return Completed(message=changes_in_short(changes), data=[change.words for change in changes])


@task(task_run_name="record the nodes of {cluster}", cache_policy=NO_CACHE)
def record(cluster: str) -> State[None]:
    """Store probes, health and changes in the history."""
    checkup = registered(Checkup, cluster)
    checkup.record()
    stored = f"{plural(len(checkup.assessments), 'node')} and {plural(len(checkup.changes), 'change')}"
    return Completed(message=f"{stored} are in the history", data=None)


@task(task_run_name="publish the nodes of {cluster}", cache_policy=NO_CACHE)
def publish(cluster: str) -> State[str]:
    """Publish all nodes as a table and each change as an event; return a summary of the sweep."""
    checkup = registered(Checkup, cluster)
    text = summary(checkup)
    page = health_markdown(checkup)
    _ = create_markdown_artifact(markdown=page, key=artifact_key(cluster), description=f"Nodes of cluster {cluster}: {text}")
    emit_nodes(cluster, [(change.node, change, {"kinds": [one.kind for one in change.new]}) for change in checkup.changes])
    return Completed(message=text, data=text)


def artifact_key(cluster: str) -> str:
    """Return the key of the artifact with the nodes of *cluster*."""
    return f"{cluster}-nodes"
