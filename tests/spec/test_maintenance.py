"""Maintenance windows and notices, as a user writes them in a cluster's file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from holdfast.errors import BadFile
from holdfast.spec import LocalCluster, SlurmCluster, cluster_of, load_cluster
from holdfast.spec.files.names import expand_names

PLAN = """
nodes: 12
failure_domains: {node-10: rack-b, node-11: rack-b}
maintenance:
  - {nodes: ["node-[0-2]", node-5], start: 2026-12-01 22:00+01:00, duration: 2h, interval: 7d, reason: firmware}
  - {failure_domains: [rack-b], start: "2026-12-02 06:00"}
  - {start: 2026-12-24T12:00}
preemption_notice: {file: "/run/{node}.leaving", signals: [SIGUSR1], lead_time: 30s}
"""


def test_windows_know_their_nodes_and_survive_the_way_to_the_flow(tmp_path: Path) -> None:
    """Ranges, failure domains, and all."""
    path = tmp_path / "c.yaml"
    path.write_text(PLAN)
    made = load_cluster(path)
    assert not isinstance(made, SlurmCluster)
    racks, rack_b, everything = made.windows
    assert racks.nodes == {"node-0", "node-1", "node-2", "node-5"}
    assert (racks.duration, racks.interval, racks.reason) == (timedelta(hours=2), timedelta(days=7), "firmware")
    assert racks.start.utcoffset() == timedelta(hours=1)
    assert rack_b.nodes == {"node-10", "node-11"}
    assert everything.nodes == set(made.names)
    assert cluster_of(made.model_dump(mode="json")) == made
    assert made.preemption_notice.for_agents()["lead_time"] == 30.0


def test_a_range_keeps_its_digits() -> None:
    """As hosts are numbered."""
    assert expand_names("gpu-[08-11].x") == ["gpu-08.x", "gpu-09.x", "gpu-10.x", "gpu-11.x"]
    assert expand_names("gpu-1") == ["gpu-1"]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("maintenance: [{nodes: [node-7], start: 2026-12-01}]", "maintenance[0].nodes", "has no node 'node-7'"),
        (
            "maintenance: [{failure_domains: [rack-z], start: 2026-12-01}]",
            "maintenance[0].failure_domains",
            "this cluster has no failure domains",
        ),
        ("maintenance: [{start: 2026-12-01, interval: 1h}]", "maintenance[0].interval", "begins before this one ends"),
        ("maintenance: [{start: tomorrow}]", "maintenance[0].start", "'tomorrow' is not a date and time"),
        ("maintenance: [{start: 7}]", "maintenance[0].start", "7 is not a date and time"),
        ("maintenance: [{duration: 2h}]", "maintenance[0].start", "missing"),
        ("maintenance: [{nodes: ['node-[3-1]'], start: 2026-12-01}]", "maintenance[0].nodes[0]", "is not a range of nodes"),
        ("maintenance: [{nodes: ['n[0-99999]'], start: 2026-12-01}]", "maintenance[0].nodes[0]", "is not a range of nodes"),
        ("preemption_notice: {url: 'file:///etc/passwd'}", "preemption_notice.url", "is not an HTTP URL"),
        ("preemption_notice: {pattern: '('}", "preemption_notice.pattern", "is not a regular expression"),
        ("preemption_notice: {signals: [SIGKILL]}", "preemption_notice.signals[0]", "SIGUSR1"),
        ("preemption_notice: {interval: 0s}", "preemption_notice.interval", ""),
    ],
)
def test_invalid_windows_are_refused_with_place_and_cure(tmp_path: Path, text: str, field: str, words: str) -> None:
    """Nothing of it reaches a flow."""
    path = tmp_path / "c.yaml"
    path.write_text(f"nodes: 3\n{text}\n")
    with pytest.raises(BadFile) as refused:
        load_cluster(path)
    message = str(refused.value)
    assert field in message
    assert words in message


def test_a_cluster_has_no_maintenance_by_default() -> None:
    """Only SIGTERM is a notice."""
    made = LocalCluster()
    assert made.windows == ()
    assert made.preemption_notice.for_agents()["file"] is None
