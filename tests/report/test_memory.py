"""What status and report say of the snapshots in memory."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.history.models import FaultRecord, Snapshots
from holdfast.report import memory
from holdfast.report.text import wording
from holdfast.report.text.wording import duration
from tests.mentions import mentions

REPLICATED: dict[str, Any] = {"checkpoint": {"memory": {"interval": 1, "replicas": 1}}}


def a_row(**fields: Any) -> Snapshots:
    """Return what a generation reported at time 100."""
    known: dict[str, Any] = {"job_id": "j", "generation": 2, "at": 100.0, "step": 57, "age_steps": 1, "age_s": 0.038, "replica_step": 57}
    return Snapshots(**known | {"interval_steps": 1, "copied_s": 4.0, "overlapped_s": 3.9, "cost_s": 0.3, "trained_s": 100.0} | fields)


def a_fault(kind: str, generation: int = 2) -> FaultRecord:
    """Return a fault with a reason."""
    quoted = {"quote": "no room"}
    return FaultRecord(
        job_id="j",
        at=1.0,
        kind=kind,
        recommended_action="monitor",
        target="node n1",
        attributed_to="storage",
        generation=generation,
        evidence=quoted,
    )


@pytest.mark.parametrize(
    ("row", "fault", "spec", "replica"),
    [
        (a_row(), None, REPLICATED, ("replica of the same step",)),
        (a_row(replica_step=55), None, REPLICATED, ("replica of step 55",)),
        (a_row(replica_step=None), None, REPLICATED, ("no replica",)),
        (a_row(replica_step=None), a_fault("memory-limit"), REPLICATED, ("no replica", "memory-limit on n1", "no room")),
        (a_row(replica_step=None), None, {"checkpoint": {"memory": {"replicas": 0}}}, ("no replica", "checkpoint.memory.replicas")),
    ],
)
def test_the_newest_snapshot_is_shown_with_its_age_and_replicas(
    row: Snapshots, fault: FaultRecord | None, spec: dict[str, Any], replica: tuple[str, ...]
) -> None:
    """A missing replica has its reason, if that is known."""
    assert mentions(memory.newest(row, fault, spec, 100.0), "step 57", "1 step", "38 ms", *replica)


def test_a_fault_of_an_earlier_generation_is_not_why_a_replica_is_missing() -> None:
    """The nodes were others then."""
    assert not mentions(memory.newest(a_row(replica_step=None), a_fault("memory-limit", 1), REPLICATED, 100.0), "memory-limit")


def test_an_old_report_of_a_snapshot_has_its_age() -> None:
    """It may be newer by now."""
    shown = memory.newest(a_row(at=40.0, age_steps=3), None, {}, 100.0)
    assert mentions(shown, "step 57", "3 steps", duration(60.0))
    assert not mentions(memory.newest(a_row(at=100.0), None, {}, 100.0), duration(60.0))


@pytest.mark.parametrize(
    ("row", "fault", "spec", "ended", "named"),
    [
        (None, None, {"checkpoint": {"memory": {"interval": 0}}}, False, ("checkpoint.memory.interval",)),
        (a_row(step=None, reason="no optimizer"), None, REPLICATED, False, ("no optimizer",)),
        (None, a_fault("memory-none"), REPLICATED, False, ("memory-none on n1", "no room")),
        (a_row(step=None), a_fault("snapshot-no-memory"), REPLICATED, True, ("snapshot-no-memory on n1", "no room")),
        (None, a_fault("replica-lost"), REPLICATED, False, ("holdfast.session",)),
    ],
)
def test_why_there_is_no_snapshot_is_shown_if_known(
    row: Snapshots | None, fault: FaultRecord | None, spec: dict[str, Any], *, ended: bool, named: tuple[str, ...]
) -> None:
    """A setting, a reason of the runtime, a fault; or they begin later."""
    assert mentions(memory.why_none(row, fault, spec, ended=ended), *named)


@pytest.mark.parametrize(
    ("row", "spec", "ended"), [(a_row(), REPLICATED, False), (None, {"checkpoint": "what another version wrote"}, True)]
)
def test_nothing_is_said_of_snapshots_that_there_are_or_never_were(row: Snapshots | None, spec: dict[str, Any], *, ended: bool) -> None:
    """A job of the time before snapshots has none, for no reason."""
    assert memory.why_none(row, None, spec, ended=ended) == ""


def test_the_overhead_is_that_of_all_generations_together() -> None:
    """Seconds are added up before they are divided; the interval is the newest."""
    rows = [
        a_row(ages={"1": 3}),
        a_row(generation=3, interval_steps=4, copied_s=12.0, overlapped_s=0.1, trained_s=200.0, cost_s=2.7, ages={"1": 1, "6": 2}),
    ]
    assert mentions(memory.overhead(rows), "4 steps", "25.0%", "1.0%")
    assert memory.overhead([a_row(copied_s=0.0, trained_s=0.0)]) == "every step"
    assert mentions(memory.typical_age(memory.total(rows)), "1 step", "6")
    assert mentions(memory.typical_age(a_row(ages={"2": 7})), "2 steps")
    assert memory.typical_age(a_row()) == ""


def test_the_source_of_the_state_of_a_recovery_is_shown() -> None:
    """Living ranks, memory, replicas in it, or a checkpoint; nothing of what older versions did not record."""
    assert wording.source(None) == wording.source({"snapshot_age": 1}) == ""
    assert wording.source({"source": "live"}) == "surviving ranks"
    assert wording.source({"source": "memory"}) == "in-memory snapshots"
    assert mentions(wording.source({"source": "memory", "replicas": 2}), wording.source({"source": "memory"}), "2 ranks")
    assert wording.source({"source": "checkpoint", "replicas": 0}) == "a checkpoint"
    source, age = wording.recovery_details({"source": "memory", "replicas": 1, "snapshot_age": 1})
    assert mentions(source, wording.source({"source": "memory", "replicas": 1}))
    assert mentions(age, "1 step")
    (age,) = wording.recovery_details({"snapshot_age": 2})
    assert mentions(age, "2 steps")
