"""Which faults of the past a decision is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.control.faults.history import COUNTED, MOST, FaultHistory
from holdfast.history import History, queries
from holdfast.history.models import FaultRecord, Job


def a_row(kind: str = "gpu-off-bus", at: float = 1.0, **more: Any) -> FaultRecord:
    """Return a fault as the history has it: the root of incident ``i`` of job ``j``, on node ``a``."""
    fields = {
        "job_id": "j",
        "incident_id": "i",
        "node": "a",
        "recommended_action": "evict",
        "subject": "node a",
        "blame": "gpu",
        "generation": 1,
    }
    return FaultRecord(kind=kind, at=at, **{**fields, "root": True, "evidence": {}, **more})


def test_the_faults_of_the_present_incident_are_no_past() -> None:
    """Nor is what the diagnosis sees now, though training went on through it when it came."""
    past = FaultHistory()
    old, ours, seen = a_row(at=3.0, incident_id="old"), a_row(incident_id="now"), a_row(at=2.0, incident_id=None, root=False)
    past.remember([old, ours, seen, a_row("worker-sigkill", incident_id="old"), a_row(node=None, incident_id="old")])
    assert [one.at for one in past.of({"gpu-off-bus"}, but=(), incident="now")] == [2.0, 3.0]
    assert [one.incident for one in past.of({"gpu-off-bus"}, but={seen.id}, incident="now")] == ["old"]


def test_a_fault_that_becomes_an_incidents_root_is_counted_as_that() -> None:
    """By its row: it is one fault."""
    past, row = FaultHistory(), a_row(incident_id=None, root=False, evidence={"device": "0000:18:00"})
    past.remember([row])
    row.incident_id, row.root = "i", True
    past.remember([row])
    (one,) = past.of({"gpu-off-bus"}, but=(), incident="other")
    assert (one.root, one.incident, one.device) == (True, "i", "0000:18:00")


def test_what_is_remembered_and_given_is_bounded() -> None:
    """The newest are kept."""
    past = FaultHistory()
    past.remember(a_row(at=float(number), incident_id=str(number)) for number in range(MOST + 50))
    found = past.of({"gpu-off-bus"}, but=(), incident="")
    assert len(found) == COUNTED
    assert found[-1].at == MOST + 49


def test_hardware_faults_of_other_jobs_on_the_same_cluster_are_read(tmp_path: Path) -> None:
    """Roots only, what speaks against GPUs and nodes only, and only as old as asked for."""
    history = History.open(f"sqlite:///{tmp_path / 'history.db'}")
    jobs = [
        Job(id=name, name=name, cluster={"name": where}, directory="", at=0.0) for name, where in (("us", "c"), ("they", "c"), ("far", "d"))
    ]
    wanted = [a_row(at=10.0, job_id="they"), a_row("node-lost", at=11.0, job_id="they", blame="node")]
    others = [
        a_row(at=10.0, job_id="us"), a_row(at=10.0, job_id="far"), a_row(at=9.0, job_id="they"), a_row(at=10.0, job_id="they", root=False),
        a_row(at=10.0, job_id="they", blame="process"), a_row(at=10.0, job_id="they", node=None),
    ]  # fmt: skip
    with history.session() as session:
        session.add_all([*jobs, *wanted, *others])
    found = queries.faults_of_hardware(history, "c", since=10.0, but="us")
    assert [(one.kind, one.at) for one in found] == [("gpu-off-bus", 10.0), ("node-lost", 11.0)]
    assert [one.kind for one in queries.faults_of_hardware(history, "c", since=0.0, but="us", limit=1)] == ["gpu-off-bus"]
    history.close()
