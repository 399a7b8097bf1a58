"""`holdfast node check`: what is wrong with the nodes of a cluster, or with this machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from holdfast.cli.arguments import known_nodes
from holdfast.cli.output import clock, echo, echo_json, echo_table
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import Fault, RecommendedAction
from holdfast.detectors.codec import MalformedData, packed, unpacked
from holdfast.detectors.nodes.health import judge, unknown_signals
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.errors import BadFile, NotReadable, Problem
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.nodes.node_health import HealthAssessment, HealthChange, HealthFinding, NodeHealthState, worst_first
from holdfast.probe.health import Checkup
from holdfast.probe.readers.local import read_node
from holdfast.probe.sweep import open_sweeper
from holdfast.report.text.wording import NOTHING
from holdfast.spec import load_cluster

READING = "reading"
"""Key of the reading itself in the JSON."""


def check(  # noqa: PLR0913 (as many as the command has options)
    nodes: Sequence[str],
    cluster_file: Path | None,
    *,
    default_cluster: Path | None,
    local: bool,
    baseline: Path | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Check the nodes of a cluster, or this machine."""
    if local:
        if nodes or cluster_file is not None:
            raise click.UsageError("`--local` checks this machine: name no nodes and no cluster, or leave `--local` out")
        return check_machine(baseline, deadline=timeout, as_json=as_json)
    cluster_file = cluster_file or default_cluster
    if cluster_file is None:
        raise click.UsageError("name what to check: a cluster with `--cluster FILE`, or `--local` for this machine")
    if baseline is not None:
        raise click.UsageError("`--baseline` belongs to `--local`: a cluster is compared with its last check in the history")
    return check_cluster(cluster_file, nodes, deadline=timeout, as_json=as_json)


# -- a cluster --------------------------------------------------------------------------------------------------------


def check_cluster(cluster_file: Path, nodes: Sequence[str], *, deadline: float, as_json: bool) -> int:
    """Check each node (or each of *nodes*) once, compare with the last check, record and show it; return 1 unless all are healthy."""
    cluster = load_cluster(cluster_file)
    with closing(History.open()) as history, open_sweeper(cluster) as sweeper:
        checkup = Checkup(cluster.name, sweeper, history)
        checkup.sweep(deadline, known_nodes(nodes, cluster.name, sweeper.nodes()))
        checkup.classify()
        checkup.record()
    if as_json:
        rows = [_node_record(checkup, one) for one in checkup.assessments.values()]
        changes = [_change_record(one) for one in checkup.changes]
        echo_json({"cluster": checkup.cluster, "at": checkup.at, "seconds": checkup.seconds, "nodes": rows, "changes": changes})
    else:
        _show_cluster(checkup)
    return int(any(one.status != NodeHealthState.HEALTHY for one in checkup.assessments.values()))


def _show_cluster(checkup: Checkup) -> None:
    rows = [_row(one) for one in checkup.assessments.values()]
    echo_table(("NODE", "HEALTH", "SINCE", "EVIDENCE"), rows, coloured=1, last="wrapped")
    echo(f"\n{checkup.describe()}.")
    changed = [change for change in checkup.changes if change.before]
    if changed:
        echo("\nChanged since the last check:")
        for change in changed:
            echo(f"  {_change_line(change)}")
    if len(changed) < len(checkup.changes):
        echo(f"\nChecked for the first time: {', '.join(one.node for one in checkup.changes if not one.before)}.")
    for kind in dict.fromkeys(one.kind for health in checkup.assessments.values() for one in health.findings):
        echo(f"\n{kind}: {_action(kind)}")


def _change_line(change: HealthChange) -> str:
    """Return the change of a node's health, with the names of its faults: the table above has their evidence."""
    moved = f"{change.before} -> {change.after}" if change.before != change.after else change.after
    named = {name: ", ".join(dict.fromkeys(one.kind for one in found)) for name, found in (("new", change.new), ("over", change.over))}
    parts = [f"{name}: {kinds}" for name, kinds in named.items() if kinds]
    return f"{change.node}: {moved}, {'; '.join(parts) or change.reason}"


def _row(health: HealthAssessment) -> list[str]:
    findings = [
        one.words if one.seen >= health.at else f"{one.words} (last seen {clock(one.seen)})" for one in worst_first(health.findings)
    ]
    evidence = [health.reason, *findings] if health.reason else findings
    return [health.node, health.status, clock(health.since), "\n".join(evidence) or NOTHING]


def _node_record(checkup: Checkup, health: HealthAssessment) -> dict[str, Any]:
    return {
        "node": health.node,
        "health": health.status,
        "since": health.since,
        "reason": health.reason,
        "evidence": [_finding_record(one) for one in health.findings],
        "unknown": checkup.unseen(health.node),
        "seconds": checkup.probes[health.node].seconds,
    }


def _change_record(change: HealthChange) -> dict[str, Any]:
    findings = {"new": [_finding_record(one) for one in change.new], "over": [_finding_record(one) for one in change.over]}
    return {**dataclasses.asdict(change), **findings}


def _finding_record(finding: HealthFinding) -> dict[str, Any]:
    return {**dataclasses.asdict(finding), "recommended_action": finding.recommended_action, "action": _action(finding.kind)}


def _action(kind: str) -> str:
    return CATALOGUE[kind].action if kind in CATALOGUE else "see `holdfast faults show` of a newer version"


# -- this machine -----------------------------------------------------------------------------------------------------


def check_machine(since: Path | None, *, deadline: float, as_json: bool) -> int:
    """Check this machine, and show its faults and what could not be read; return 1 when a fault recommends more than recording it."""
    before = _earlier(since) if since is not None else None
    now = read_node(os.uname().nodename, seconds=deadline)
    faults, unknown = judge(now, before), list(unknown_signals(now))
    if as_json:
        echo_json({"node": now.node, "faults": [_fault_record(one) for one in faults], "unknown": dict(unknown), READING: packed(now)})
    else:
        if faults:
            rows = [(one.kind, one.entry.recommended_action, f"{one.quote}\n-> {one.entry.action}") for one in faults]
            echo_table(("FAULT", "RECOMMENDED", "EVIDENCE, AND WHAT TO DO"), rows, last="wrapped")
        else:
            echo(f"No fault was found on {now.node}.")
        if unknown:
            echo(f"\n{plural(len(unknown), 'part')} could not be read:")
            echo_table(("PART", "WHY"), unknown)
    return int(any(fault.entry.recommended_action is not RecommendedAction.RECORD for fault in faults))


def _fault_record(fault: Fault) -> dict[str, Any]:
    """Return a fault as JSON, with the catalogue's entry of its kind."""
    entry = fault.entry
    return {
        **{name: value for name, value in dataclasses.asdict(fault).items() if value not in (None, "")},
        "title": entry.title,
        "recommended_action": entry.recommended_action,
        "attributed_to": entry.attributed_to,
        "action": entry.action,
    }


def _earlier(path: Path) -> NodeReading:
    """Return the reading in an earlier output of this command."""
    try:
        return unpacked(NodeReading, json.loads(path.read_text(encoding="utf-8"))[READING])
    except OSError as error:
        raise NotReadable("the earlier reading", str(path), error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, MalformedData) as error:
        why = f": {error}" if isinstance(error, MalformedData) else ""
        cure = "Name a file written by `holdfast node check --local --json`"
        raise BadFile(str(path), (Problem(field=READING, reason=f"holds no reading of a node{why}", cure=cure),)) from error
