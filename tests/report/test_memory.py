"""What status and report say of the snapshots in memory."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.history.models import FaultRecord, Snapshots
from holdfast.report import memory, wording

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
    ("row", "fault", "spec", "words"),
    [
        (a_row(), None, REPLICATED, "step 57, 1 step (38 ms) old; replica of the same step"),
        (a_row(replica_step=55), None, REPLICATED, "step 57, 1 step (38 ms) old; replica of step 55"),
        (a_row(replica_step=None), None, REPLICATED, "step 57, 1 step (38 ms) old; no replica yet"),
        (
            a_row(replica_step=None),
            a_fault("memory-limit"),
            REPLICATED,
            "step 57, 1 step (38 ms) old; no replica: memory-limit on node n1 (no room)",
        ),
        (a_row(replica_step=None), a_fault("memory-limit", 1), REPLICATED, "step 57, 1 step (38 ms) old; no replica yet"),
        (
            a_row(replica_step=None),
            None,
            {"checkpoint": {"memory": {"replicas": 0}}},
            "step 57, 1 step (38 ms) old; no replica (`checkpoint.memory.replicas` is 0)",
        ),
        (a_row(at=40.0, age_steps=3), None, {}, "step 57, 3 steps (38 ms) old, as reported 1 min 00 s ago; replica of the same step"),
    ],
)
def test_the_newest_snapshot_is_shown_with_its_age_and_replicas(
    row: Snapshots, fault: FaultRecord | None, spec: dict[str, Any], words: str
) -> None:
    """A word that is old is called so."""
    assert memory.newest(row, fault, spec, 100.0) == words


@pytest.mark.parametrize(
    ("row", "fault", "spec", "ended", "words"),
    [
        (a_row(), None, REPLICATED, False, ""),
        (None, None, {"checkpoint": {"memory": {"interval": 0}}}, False, "none: `checkpoint.memory.interval` is 0"),
        (a_row(step=None, reason="no optimizer"), None, REPLICATED, False, "none: no optimizer"),
        (None, a_fault("memory-none"), REPLICATED, False, "none: memory-none on node n1 (no room)"),
        (a_row(step=None), a_fault("snapshot-no-memory"), REPLICATED, True, "none: snapshot-no-memory on node n1 (no room)"),
        (None, a_fault("replica-lost"), REPLICATED, False, "none yet: they begin a few steps after `holdfast.session` does"),
        (None, None, {"checkpoint": "what another version wrote"}, True, ""),
    ],
)
def test_why_there_is_no_snapshot_is_shown_if_known(
    row: Snapshots | None, fault: FaultRecord | None, spec: dict[str, Any], *, ended: bool, words: str
) -> None:
    """Of a job of the time before snapshots nothing is said."""
    assert memory.why_none(row, fault, spec, ended=ended) == words


def test_the_overhead_is_that_of_all_generations_together() -> None:
    """Seconds are added up before they are divided; the interval is the newest."""
    rows = [
        a_row(ages={"1": 3}),
        a_row(generation=3, interval_steps=4, copied_s=12.0, overlapped_s=0.1, trained_s=200.0, cost_s=2.7, ages={"1": 1, "6": 2}),
    ]
    assert memory.overhead(rows) == "every 4 steps, 25.0% of the copying overlapped with waits, 1.0% of the training time"
    assert memory.overhead([a_row(copied_s=0.0, trained_s=0.0)]) == "every step"
    assert memory.typical_age(memory.total(rows)) == "in the median 1 step old, at most 6"
    assert memory.typical_age(a_row(ages={"2": 7})) == "in the median 2 steps old"
    assert memory.typical_age(a_row()) == ""


def test_the_source_of_the_state_of_a_recovery_is_shown() -> None:
    """Living ranks, memory, replicas in it, or a checkpoint; nothing of what older versions did not record."""
    assert wording.source(None) == wording.source({"snapshot_age": 1}) == ""
    assert wording.source({"source": "live"}) == "surviving ranks"
    assert wording.source({"source": "memory"}) == "in-memory snapshots"
    assert wording.source({"source": "memory", "replicas": 2}) == "in-memory snapshots (replicas for 2 ranks)"
    assert wording.source({"source": "checkpoint", "replicas": 0}) == "a checkpoint"
    assert wording.recovery_details({"source": "memory", "replicas": 1, "snapshot_age": 1}) == [
        "all ranks resumed from in-memory snapshots (replicas for 1 rank)",
        "the newest in-memory snapshot was 1 step old",
    ]
    assert wording.recovery_details({"snapshot_age": 2}) == ["the newest in-memory snapshot was 2 steps old"]
