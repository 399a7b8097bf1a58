"""The last look at each node, and what changed: kept by sweeps, in both databases."""

from __future__ import annotations

import pytest

from holdfast.detectors.nodes.probe_result import NodeProbe, UnansweredProbe
from holdfast.detectors.nodes.readings import ClockReading, NodeReading
from holdfast.history import HealthSample, History
from holdfast.history.health_samples import KnownHealth, health_by_node, latest_health, save_sweep
from holdfast.policies.nodes.node_health import HealthAssessment, assess_health, health_change
from tests.history.rows import health_changes


def swept(history: History, node: str, at: float, reading: NodeReading | None) -> HealthAssessment:
    """Keep what a sweep found of one node."""
    before = latest_health(history, "c").get(node, KnownHealth())
    found = reading or UnansweredProbe(times=3, why="refused")
    assessment = assess_health(NodeProbe(node=node, at=at, seconds=0.1, found=found), before.assessment, before.reading)
    change = health_change(before.assessment, assessment)
    save_sweep(history, "c", {node: assessment}, [change] if change else [], {node: reading} if reading else {})
    return assessment


def test_a_sweep_is_known_to_the_next_one(history: History) -> None:
    """Health and readings come back as they were; a node that was not seen keeps its last reading. Changes stay, one row each."""
    reading = NodeReading(node="a", at=5.0, clock=ClockReading(synchronized=True, offset=0.25, worst=0.5))
    assert latest_health(history, "c") == {}
    first = swept(history, "a", 10.0, reading)
    second = swept(history, "a", 20.0, None)
    third = swept(history, "a", 30.0, None)
    known = latest_health(history, "c")["a"]
    assert known.assessment == third
    assert known.reading == reading
    assert health_by_node(history, "c") == {"a": third}
    assert (first.status, second.status, third.since) == ("healthy", "unreachable", 20.0)
    assert [(one.at, one.before, one.after) for one in health_changes(history, "c")] == [(20.0, "healthy", "unreachable")]
    assert health_changes(history, "b") == []
    assert health_by_node(history, "another") == {}


@pytest.mark.parametrize("damage", [{"health": {"status": 5}}, {"reading": "%"}, {"reading": "aGVsbG8="}])
def test_unreadable_samples_are_ignored(history: History, damage: dict[str, object]) -> None:
    """A newer version may have written it."""
    swept(history, "a", 10.0, NodeReading(node="a", at=5.0))
    with history.session() as session:
        row = session.get_one(HealthSample, ("c", "a"))
        for name, value in damage.items():
            setattr(row, name, value)
        session.add(row)
    known = latest_health(history, "c")["a"]
    assert None in {known.assessment, known.reading}
    assert swept(history, "a", 20.0, NodeReading(node="a", at=15.0)).status == "healthy"
