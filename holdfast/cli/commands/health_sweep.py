"""`holdfast health CLUSTER_FILE`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from detectors.all_kinds import CATALOGUE
from holdfast.cli.output import clock, say, say_json, say_rows
from holdfast.history.store import History
from holdfast.probe.health import Checkup
from holdfast.probe.sweep import open_sweeper
from holdfast.report.wording import NOTHING
from holdfast.spec import load_cluster
from policies.node_health import HealthAssessment, HealthChange, HealthFinding, NodeHealthState, worst_first


def check_up(cluster_file: Path, *, deadline: float, as_json: bool) -> int:
    """Look at every node once, compare, remember and tell; return 1 unless all are well."""
    cluster = load_cluster(cluster_file)
    history = History.open()
    try:
        with open_sweeper(cluster) as sweeper:
            checkup = Checkup(cluster.name, sweeper, history)
            checkup.sweep(deadline)
            checkup.classify()
            checkup.record()
    finally:
        history.close()
    if as_json:
        say_json(_record(checkup))
    else:
        _tell(checkup)
    return int(any(told.status != NodeHealthState.OK for told in checkup.assessments.values()))


def _tell(checkup: Checkup) -> None:
    say_rows(("NODE", "VERDICT", "SINCE", "EVIDENCE"), [_row(told) for told in checkup.assessments.values()], coloured=1, last="folded")
    say(f"\n{checkup.describe()}.")
    known = [change for change in checkup.changes if change.before]
    if known:
        say("\nNew since the look before:")
        for change in known:
            say(f"  {_news(change)}")
    if len(known) < len(checkup.changes):
        say(f"\nNever looked at before: {', '.join(one.node for one in checkup.changes if not one.before)}.")
    for kind in dict.fromkeys(one.kind for told in checkup.assessments.values() for one in told.findings):
        say(f"\n{kind}: {_action(kind)}")


def _news(change: HealthChange) -> str:
    """Say what is new about a node by the names of its faults: the table above has their evidence."""
    moved = f"{change.before} -> {change.after}" if change.before != change.after else change.after
    named = {word: ", ".join(dict.fromkeys(one.kind for one in found)) for word, found in (("new", change.new), ("over", change.over))}
    told = [f"{word}: {kinds}" for word, kinds in named.items() if kinds]
    return f"{change.node}: {moved}, {'; '.join(told) or change.reason}"


def _row(told: HealthAssessment) -> list[str]:
    findings = [one.words if one.seen >= told.at else f"{one.words} (last seen {clock(one.seen)})" for one in worst_first(told.findings)]
    evidence = [told.reason, *findings] if told.reason else findings
    return [told.node, told.status, clock(told.since), "\n".join(evidence) or NOTHING]


def _record(checkup: Checkup) -> dict[str, Any]:
    nodes = [_node(checkup, told) for told in checkup.assessments.values()]
    changes = [_change(one) for one in checkup.changes]
    return {"cluster": checkup.cluster, "at": checkup.at, "seconds": checkup.seconds, "nodes": nodes, "changes": changes}


def _node(checkup: Checkup, told: HealthAssessment) -> dict[str, Any]:
    return {
        "node": told.node,
        "verdict": told.status,
        "since": told.since,
        "reason": told.reason,
        "evidence": [_finding(one) for one in told.findings],
        "blind": checkup.unseen(told.node),
        "seconds": checkup.probes[told.node].seconds,
    }


def _change(change: HealthChange) -> dict[str, Any]:
    return {**dataclasses.asdict(change), "new": [_finding(one) for one in change.new], "over": [_finding(one) for one in change.over]}


def _finding(finding: HealthFinding) -> dict[str, Any]:
    return {**dataclasses.asdict(finding), "recommended_action": finding.recommended_action, "action": _action(finding.kind)}


def _action(kind: str) -> str:
    return CATALOGUE[kind].action if kind in CATALOGUE else "see a newer version's `holdfast faults show`"
