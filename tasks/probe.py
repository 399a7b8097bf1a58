"""Probe: look at all nodes of a cluster, judge what was seen, keep it, and show it. One task a sweep, however many nodes there are."""

from __future__ import annotations

import textwrap
import time
from datetime import UTC, datetime
from typing import Final

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from detectors.probe_result import Missed
from detectors.readings import NodeReading
from holdfast.prefect_client.events import emit_nodes
from holdfast.probe.health import Checkup, checkups
from holdfast.report.wording import plural, some
from policies.node_health import HealthChange, HealthVerdict, worst_first

HEALTH: Final = {"ok": "healthy", "unhealthy": "unhealthy"}
"""The words of the table for standings that the history calls otherwise."""
CELL: Final = 38
"""Characters of what was seen in one row: the UI wraps no cell, and cuts a table at its right edge."""
LINES: Final = 4
"""Rows that one finding may take; `holdfast nodes` has all of it."""
MOST_NAMED: Final = 3
"""Changes that a state's message tells."""


@task(task_run_name="probe the nodes of {cluster}", cache_policy=NO_CACHE)
def sweep(cluster: str, *, deadline: float, at: float = 0.0) -> State[dict[str, int]]:
    """Look at every node once it is *at* (seconds since 1970); return how many were seen, missed, and not to be looked at."""
    time.sleep(max(0.0, at - time.time()))
    found = {node: look.found for node, look in checkups.of(cluster).sweep(deadline).items()}
    seen = sum(isinstance(one, NodeReading) for one in found.values())
    missed = [node for node, one in found.items() if isinstance(one, Missed)]
    blind = [node for node, one in found.items() if not isinstance(one, NodeReading | Missed)]
    parts = [f"{seen} of {plural(len(found), 'node')} answered"]
    parts += [f"no answer from {some(missed, MOST_NAMED)}"] if missed else []
    parts += [f"could not look at {some(blind, MOST_NAMED)}"] if blind else []
    return Completed(message="; ".join(parts), data={"seen": seen, "missed": len(missed), "blind": len(blind)})


@task(task_run_name="judge the nodes of {cluster}", cache_policy=NO_CACHE)
def classify(cluster: str) -> State[list[str]]:
    """Judge each node by this look and the one before; return what changed, in words."""
    changes = checkups.of(cluster).classify()
    more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    said = "; ".join(map(_in_short, changes[:MOST_NAMED])) + more
    return Completed(message=said or "no node changed", data=[change.words for change in changes])


@task(task_run_name="record the nodes of {cluster}", cache_policy=NO_CACHE)
def record(cluster: str) -> State[None]:
    """Keep looks, verdicts and changes in the history."""
    checkup = checkups.of(cluster)
    checkup.record()
    kept = f"{plural(len(checkup.verdicts), 'node')} and {plural(len(checkup.changes), 'change')}"
    return Completed(message=f"{kept} are in the history", data=None)


@task(task_run_name="publish the nodes of {cluster}", cache_policy=NO_CACHE)
def publish(cluster: str) -> State[str]:
    """Show all nodes as a table, and tell of changes only by events; return the sweep in a sentence."""
    checkup = checkups.of(cluster)
    table = [row for verdict in checkup.verdicts.values() for row in rows(verdict)]
    said = summary(checkup)
    _sent(create_table_artifact(table=table, key=artifact_key(cluster), description=f"Nodes of cluster {cluster}: {said}"))
    emit_nodes(cluster, [(change.node, change, {"kinds": [one.kind for one in change.new]}) for change in checkup.changes])
    return Completed(message=said, data=said)


def summary(checkup: Checkup) -> str:
    """Return the last sweep in a sentence: how many nodes, how long it took, and how they are."""
    counted = ", ".join(f"{count} {HEALTH.get(name, name)}" for name, count in checkup.counts().items())
    return f"{plural(len(checkup.verdicts), 'node')} in {checkup.seconds:.1f} s: {counted}"


def rows(verdict: HealthVerdict) -> list[dict[str, str]]:
    """Return a node's rows: one a finding, the worst first; what is longer than a cell goes on in the row below."""
    told = {"node": verdict.node, "health": HEALTH.get(verdict.standing, verdict.standing)}
    since = datetime.fromtimestamp(verdict.since, tz=UTC).strftime("%m-%d %H:%M")
    found = [("", verdict.reason)] if verdict.reason else []
    found += [(one.kind, one.quote) for one in worst_first(verdict.findings)]
    made = []
    for kind, quote in found or [("", "")]:
        first, *more = textwrap.wrap(quote, CELL, max_lines=LINES, placeholder=" …") or [""]
        made.append({**told, "finding": kind, "seen": first, "since (UTC)": since})
        made += [{"node": "", "health": "", "finding": "", "seen": line, "since (UTC)": ""} for line in more]
    return made


def _in_short(change: HealthChange) -> str:
    """Say what changed about a node without the evidence, which stands in the table."""
    before, after = (HEALTH.get(name, name) for name in (change.before or "new", change.after))
    kinds = ", ".join(dict.fromkeys(one.kind for one in change.new))
    return f"{change.node}: {f'{before} -> {after}' if before != after else after}" + (f" ({kinds})" if kinds else "")


def artifact_key(cluster: str) -> str:
    """Return under which name the UI shows the newest table of *cluster*."""
    return f"{cluster}-nodes"


def _sent(_answer: object) -> None:
    """Drop the server's answer."""
