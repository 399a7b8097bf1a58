"""Tasks of the node-repair flow: find nodes that are due for a burn-in, run it, apply and publish the results."""

from __future__ import annotations

import logging

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.log import note
from holdfast.policies.nodes.burn_in import describe, explain_still_isolated
from holdfast.policies.nodes.node_states import NodeState
from holdfast.prefect_client.events import emit_nodes
from holdfast.probe.burn_in.repair import Repair
from holdfast.probe.registry import registered
from holdfast.report.text.node_text import burn_ins_in_short, burn_ins_markdown

log = logging.getLogger("holdfast.control")


@task(task_run_name="find nodes of {cluster} that are due", cache_policy=NO_CACHE)
def find(cluster: str, named: list[str] | None) -> list[str]:
    """Return the nodes to test: those *named*, or those that are due."""
    repair = registered(Repair, cluster)
    return list(named) if named else repair.due()


@task(task_run_name="begin burn-ins on {cluster}", cache_policy=NO_CACHE)
def begin(cluster: str, nodes: list[str]) -> list[str]:
    """Start a burn-in on each of *nodes* that may have one; return those."""
    repair = registered(Repair, cluster)
    started = repair.begin(nodes, busy=repair.jobs())
    for node, why in repair.skipped.items():
        note(log, "node.burn-in-skipped", node=node, why=why)
    return started


@task(task_run_name="burn in nodes of {cluster}", cache_policy=NO_CACHE)
def burn_in(cluster: str, nodes: list[str]) -> dict[str, str]:
    """Run all checks; return the outcome of each node."""
    found = registered(Repair, cluster).try_out(nodes)
    for node, outcome in found.items():
        for check in outcome.checks:
            note(log, "node.burn-in-check", node=node, check=describe(check), seconds=round(check.seconds, 2))
    return {node: str(outcome.mark) for node, outcome in found.items()}


@task(task_run_name="conclude burn-ins on {cluster}", cache_policy=NO_CACHE)
def conclude(cluster: str) -> list[str]:
    """Apply the outcomes; return the state changes of the nodes."""
    moved = registered(Repair, cluster).conclude()
    return [f"{node}: {move.before} -> {move.after}: {move.reason}" for node, move in moved]


@task(task_run_name="publish repairs of {cluster}", cache_policy=NO_CACHE)
def publish(cluster: str) -> str:
    """Publish the results as an artifact and each state change as an event; return a summary."""
    repair = registered(Repair, cluster)
    after = repair.known()
    states = {node: one.state for node, one in after.items()}
    left = {node: why for node, why in repair.skipped.items() if node not in repair.outcomes}
    words = burn_ins_in_short(repair.outcomes, len(left))
    text = burn_ins_markdown(repair.outcomes, left, states)
    _ = create_markdown_artifact(markdown=text, key=artifact_key(cluster), description=f"Burn-ins on cluster {cluster}: {words}")
    for node, found in repair.outcomes.items():
        if found.mark is CheckMark.SKIPPED and states[node] is NodeState.QUARANTINED:
            note(log, "node.still-isolated", level=logging.WARNING, node=node, why=explain_still_isolated(found, str(states[node])))
    emit_nodes(cluster, [(node, move, {"cordon": move.cordon}) for node, move in repair.transitions])
    return words


def artifact_key(cluster: str) -> str:
    """Return the key of the artifact with the burn-ins of *cluster*."""
    return f"{cluster}-burn-ins"
