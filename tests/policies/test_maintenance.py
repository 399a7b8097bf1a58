"""Maintenance windows: which one counts now, however often they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.nodes.maintenance import MaintenanceWindow, planned_outage

BEGINS = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
AT = BEGINS.timestamp()
HOUR = 3600.0
ONCE = MaintenanceWindow(
    nodes=frozenset({"a"}), start=BEGINS, duration=timedelta(hours=4), lead_time=timedelta(minutes=30), reason="firmware"
)
WEEKLY = MaintenanceWindow(nodes=frozenset({"a", "b"}), start=BEGINS, duration=timedelta(hours=2), interval=timedelta(days=7))


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this machine stand where clocks change."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("now", "is_closed"), [(AT - HOUR, False), (AT - HOUR / 2, True), (AT, True), (AT + 4 * HOUR - 1, True), (AT + 4 * HOUR, False)]
)
def test_a_node_is_closed_from_some_time_before_its_window_until_its_end(now: float, is_closed: bool) -> None:  # noqa: FBT001 (a table)
    """And no other node is."""
    found = planned_outage([ONCE], "a", now)
    assert (found is not None) == is_closed
    assert found is None or (found.start, found.ends, found.reason) == (AT, AT + 4 * HOUR, "firmware")
    assert planned_outage([ONCE], "b", now) is None


def test_the_next_one_is_known_long_before() -> None:
    """For those who look; of two the one that begins first."""
    assert planned_outage([ONCE], "a", AT - 1e6) is None
    outage = planned_outage([WEEKLY, ONCE], "b", AT + 86_400, soon=False)
    assert outage is not None
    assert outage.start == AT + 7 * 86_400
    both = planned_outage([WEEKLY, ONCE], "a", AT + 3 * HOUR, soon=False)
    assert both is not None
    assert both.reason == "firmware"
    assert planned_outage([ONCE], "a", AT + 5 * HOUR, soon=False) is None


@given(st.integers(-10, 5000), st.floats(0.0, 7 * 86_400 - 1))
def test_of_those_that_come_again_the_right_one_counts(week: int, into: float) -> None:
    """Also before the first, and a century later."""
    now = AT + week * 7 * 86_400 + into
    found = WEEKLY.around(now)
    assert found is not None
    begins, ends = found
    assert ends == begins + 2 * HOUR
    assert now < ends
    assert begins == AT or (begins - AT) % (7 * 86_400) == pytest.approx(0.0)
    assert begins == AT or begins - 7 * 86_400 + 2 * HOUR <= now, "the one before is over"


@pytest.mark.usefixtures("berlin")
def test_one_without_a_zone_stays_at_its_hour_when_the_clocks_change() -> None:
    """A week of the last Sunday in March has an hour less."""
    nightly = MaintenanceWindow(
        nodes=frozenset({"a"}),
        start=datetime(2026, 3, 26, 22, 0),  # noqa: DTZ001 (that is the point)
        duration=timedelta(hours=1),
        interval=timedelta(days=1),
    )
    winter, summer = (datetime(2026, 3, day, 12, 0).timestamp() for day in (27, 30))  # noqa: DTZ001
    for now in (winter, summer):
        found = nightly.around(now)
        assert found is not None
        assert time.localtime(found[0]).tm_hour == 22
