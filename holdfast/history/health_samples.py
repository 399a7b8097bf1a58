"""The last look at each node of a cluster, and what changed from look to look. One transaction a sweep, however many nodes there are."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlmodel import col, select

from detectors.codec import MalformedData, packed, unpacked
from detectors.readings import NodeReading
from holdfast.history.models import HealthSample, NodeHealthChange
from holdfast.history.store import History
from policies.node_health import HealthAssessment, HealthChange, HealthFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHealth:
    """What is known of a node from looks before."""

    verdict: HealthAssessment | None = None
    reading: NodeReading | None = None


def latest_health(history: History, cluster: str, *, readings: bool = True) -> dict[str, KnownHealth]:
    """Return what is known of the nodes of *cluster*, by name; without *readings* only what is thought of them."""
    with history.session() as session:
        rows = session.exec(select(HealthSample).where(col(HealthSample.cluster) == cluster)).all()
    return {row.node: KnownHealth(verdict=_verdict(row), reading=_reading(row.reading) if readings else None) for row in rows}


def verdicts(history: History, cluster: str) -> dict[str, HealthAssessment]:
    """Return what is thought of the nodes of *cluster*, by name; a node that was never looked at is not there."""
    known = latest_health(history, cluster, readings=False)
    return {node: one.verdict for node, one in known.items() if one.verdict is not None}


def keep(
    history: History,
    cluster: str,
    told: Mapping[str, HealthAssessment],
    changes: Iterable[HealthChange],
    readings: Mapping[str, NodeReading],
) -> None:
    """Write what a sweep found: its *changes* as rows of their own, and of each node the verdict and the reading, where there is one."""
    with history.session(immediate=True) as session:
        rows = {row.node: row for row in session.exec(select(HealthSample).where(col(HealthSample.cluster) == cluster))}
        for node, verdict in told.items():
            row = rows.get(node) or HealthSample(cluster=cluster, node=node, at=verdict.at)
            row.at, row.verdict = verdict.at, packed(verdict)
            if node in readings:
                row.reading = base64.b64encode(zlib.compress(json.dumps(packed(readings[node])).encode(), 3)).decode()
            session.add(row)
        session.add_all(_row(cluster, change, told[change.node].at) for change in changes)


def _row(cluster: str, change: HealthChange, at: float) -> NodeHealthChange:
    facts = {name: [_fact(one) for one in found] for name, found in (("new", change.new), ("over", change.over))}
    return NodeHealthChange(
        cluster=cluster, node=change.node, at=at, before=change.before, after=change.after, reason=change.reason, facts=facts
    )


def _fact(finding: HealthFinding) -> dict[str, str]:
    return {"kind": finding.kind, "part": finding.part, "quote": finding.quote}


def _verdict(row: HealthSample) -> HealthAssessment | None:
    try:
        return unpacked(HealthAssessment, row.verdict)
    except MalformedData:  # of a newer version, or damaged: the next look begins anew
        return None


def _reading(text: str | None) -> NodeReading | None:
    if text is None:
        return None
    try:
        return unpacked(NodeReading, json.loads(zlib.decompress(base64.b64decode(text))))
    except (MalformedData, ValueError, binascii.Error, zlib.error):
        return None
