"""The latest probe of each node of a cluster, and how its health changes from sweep to sweep. Each sweep is written in one transaction."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlmodel import col, select

from holdfast.detectors.codec import MalformedData, packed, unpacked
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.history.models import HealthSample, NodeHealthChange
from holdfast.history.store import History
from holdfast.policies.nodes.node_health import HealthAssessment, HealthChange, HealthFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHealth:
    """What earlier sweeps recorded of a node."""

    assessment: HealthAssessment | None = None
    reading: NodeReading | None = None


def latest_health(history: History, cluster: str, *, readings: bool = True) -> dict[str, KnownHealth]:
    """Return what is recorded of the nodes of *cluster*, by name; without *readings* only their health."""
    with history.session() as session:
        rows = session.exec(select(HealthSample).where(col(HealthSample.cluster) == cluster)).all()
    return {row.node: KnownHealth(assessment=_health(row), reading=_reading(row.reading) if readings else None) for row in rows}


def health_by_node(history: History, cluster: str) -> dict[str, HealthAssessment]:
    """Return the health of the nodes of *cluster*, by name; nodes that were never probed are missing."""
    known = latest_health(history, cluster, readings=False)
    return {node: one.assessment for node, one in known.items() if one.assessment is not None}


def save_sweep(
    history: History,
    cluster: str,
    health: Mapping[str, HealthAssessment],
    changes: Iterable[HealthChange],
    readings: Mapping[str, NodeReading],
) -> None:
    """Write the results of a sweep: a row for each of *changes*, and for each node its *health* and its reading, if there is one."""
    with history.session(immediate=True) as session:
        rows = {row.node: row for row in session.exec(select(HealthSample).where(col(HealthSample.cluster) == cluster))}
        for node, assessment in health.items():
            row = rows.get(node) or HealthSample(cluster=cluster, node=node, at=assessment.at)
            row.at, row.health = assessment.at, packed(assessment)
            if node in readings:
                row.reading = base64.b64encode(zlib.compress(json.dumps(packed(readings[node])).encode(), 3)).decode()
            session.add(row)
        for change in changes:
            facts = {"new": [_fact(one) for one in change.new], "over": [_fact(one) for one in change.over]}
            session.add(
                NodeHealthChange(
                    cluster=cluster,
                    node=change.node,
                    at=health[change.node].at,
                    before=change.before,
                    after=change.after,
                    reason=change.reason,
                    facts=facts,
                )
            )


def _fact(finding: HealthFinding) -> dict[str, str]:
    return {"kind": finding.kind, "part": finding.part, "quote": finding.quote}


def _health(row: HealthSample) -> HealthAssessment | None:
    try:
        return unpacked(HealthAssessment, row.health)
    except MalformedData:  # of a newer version, or corrupt: the next sweep starts from nothing
        return None


def _reading(text: str | None) -> NodeReading | None:
    if text is None:
        return None
    try:
        return unpacked(NodeReading, json.loads(zlib.decompress(base64.b64decode(text))))
    except (MalformedData, ValueError, binascii.Error, zlib.error):
        return None
