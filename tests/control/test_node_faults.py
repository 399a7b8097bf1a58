"""Faults that the monitors of nodes report: accepted once, kept with an incident, remembered for decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.control.agents.events import NodeCounterIncreases, NodeFaultSeen
from holdfast.control.faults.diagnosis import without_repeats
from holdfast.control.faults.node_faults import MAX_COUNTED, MAX_PAST, FaultHistory, NodeFaultDedup, with_counter_increases
from holdfast.detectors.catalogue import Fault
from holdfast.history import History, queries
from holdfast.history.models import FaultRecord, Job
from holdfast.policies.recovery.case import PastFault

FAULT = {
    "event": "node.fault",
    "kind": "gpu-off-bus",
    "part": "GPU 0000:18:00.0",
    "quote": "Xid 79",
    "source": "kernel log on n0",
    "seen_at": 5.0,
}


def test_a_replayed_fault_is_accepted_once() -> None:
    """A controller that reattaches receives the agents' event logs again, and knows from the history what the last one has recorded."""
    news = NodeFaultDedup()
    fault = news.take("n0", NodeFaultSeen.of(FAULT))
    assert fault is not None
    assert (fault.node, fault.at, fault.signature, fault.source) == ("n0", 5.0, "gpu-off-bus GPU 0000:18:00.0", "kernel log on n0")
    assert fault.device == "GPU 0000:18:00.0"
    assert news.take("n0", NodeFaultSeen.of(FAULT)) is None
    later = NodeFaultDedup()
    later.remember([a_row(fault.kind, fault.at, node="n0", evidence={"device": fault.device})])
    assert later.take("n0", NodeFaultSeen.of(FAULT)) is None
    assert later.take("n1", NodeFaultSeen.of(FAULT)) is not None, "another node has one of its own"
    assert later.take("n0", NodeFaultSeen.of({**FAULT, "seen_at": 9.0})) is not None


def test_parts_that_have_a_fault_at_one_time_have_one_each() -> None:
    """A sample reports all that it found with the time at which it was taken."""
    news = NodeFaultDedup()
    parts = ("GPU 0000:18:00.0", "GPU 0000:3b:00.0")
    assert [fault.device for part in parts if (fault := news.take("n0", NodeFaultSeen.of({**FAULT, "part": part})))] == [*parts]


def test_a_gpu_that_no_rank_uses_is_known_as_such() -> None:
    """An agent that names ranks on it, or says nothing, leaves it in use."""
    said: tuple[dict[str, Any], ...] = ({}, {"idle": True}, {"idle": True, "on": [3]})
    faults = [NodeFaultDedup().take("n0", NodeFaultSeen.of({**FAULT, **one})) for one in said]
    assert [fault is not None and fault.idle for fault in faults] == [False, True, False]


def test_a_kind_that_only_a_newer_agent_knows_is_ignored() -> None:
    """The controller knows nothing about it."""
    assert NodeFaultDedup().take("n0", NodeFaultSeen.of({**FAULT, "kind": "of-next-year"})) is None


def increased(facts: dict[str, Any]) -> NodeCounterIncreases:
    """Return the event that counters increased while generation 1 ran."""
    return NodeCounterIncreases.of({"event": "node.counter-increases", "over": 1, **facts})


def test_counter_increases_of_several_nodes_are_added_to_the_facts_of_an_incident() -> None:
    """None is lost to the next."""
    facts = with_counter_increases({"rebuilt": 1}, "n0", increased({"seconds": 9.0, "counter_increases": {"eth0.rx_crc_errors": 4}}))
    facts = with_counter_increases(facts, "n1", increased({"seconds": 8.0, "counter_increases": {"eth1.rx_crc_errors": 5}}))
    assert facts["rebuilt"] == 1
    assert {node: one["counters"] for node, one in facts["counter_increases"].items()} == {
        "n0": {"eth0.rx_crc_errors": 4},
        "n1": {"eth1.rx_crc_errors": 5},
    }


def a_row(kind: str = "gpu-off-bus", at: float = 1.0, **more: Any) -> FaultRecord:
    """Return a recorded fault: the root cause of incident ``i`` of job ``j``, on node ``a``."""
    fields = {
        "job_id": "j",
        "incident_id": "i",
        "node": "a",
        "recommended_action": "evict",
        "target": "node a",
        "attributed_to": "gpu",
        "generation": 1,
    }
    return FaultRecord(kind=kind, at=at, **{**fields, "root": True, "evidence": {}, **more})


def test_the_faults_of_the_current_incident_are_not_past() -> None:
    """Nor are those that the diagnosis gets now, though training continued through them at first."""
    past = FaultHistory()
    old, ours, seen = a_row(at=3.0, incident_id="old"), a_row(incident_id="now"), a_row(at=2.0, incident_id=None, root=False)
    past.remember([old, ours, seen, a_row("worker-sigkill", incident_id="old"), a_row(node=None, incident_id="old")])
    assert [one.at for one in past.of({"gpu-off-bus"}, but=(), incident="now")] == [2.0, 3.0]
    assert [one.incident for one in past.of({"gpu-off-bus"}, but={seen.id}, incident="now")] == ["old"]


def test_a_fault_that_becomes_a_root_cause_is_updated() -> None:
    """By its row: it is one fault."""
    past, row = FaultHistory(), a_row(incident_id=None, root=False, evidence={"device": "0000:18:00"})
    past.remember([row])
    row.incident_id, row.root = "i", True
    past.remember([row])
    (one,) = past.of({"gpu-off-bus"}, but=(), incident="other")
    assert (one.root, one.incident, one.device) == (True, "i", "0000:18:00")


def test_the_number_of_past_faults_is_bounded() -> None:
    """The newest are kept."""
    past = FaultHistory()
    past.remember(a_row(at=float(number), incident_id=str(number)) for number in range(MAX_PAST + 50))
    found = past.of({"gpu-off-bus"}, but=(), incident="")
    assert len(found) == MAX_COUNTED
    assert found[-1].at == MAX_PAST + 49


def test_hardware_faults_of_other_jobs_on_the_same_cluster_are_read(tmp_path: Path) -> None:
    """Root causes only, of GPUs and nodes only, and only as old as requested."""
    history = History.open(f"sqlite:///{tmp_path / 'history.db'}")
    jobs = [
        Job(id=name, name=name, cluster={"name": where}, directory="", at=0.0) for name, where in (("us", "c"), ("they", "c"), ("far", "d"))
    ]
    wanted = [a_row(at=10.0, job_id="they"), a_row("node-lost", at=11.0, job_id="they", attributed_to="node")]
    others = [
        a_row(at=10.0, job_id="us"), a_row(at=10.0, job_id="far"), a_row(at=9.0, job_id="they"), a_row(at=10.0, job_id="they", root=False),
        a_row(at=10.0, job_id="they", attributed_to="process"), a_row(at=10.0, job_id="they", node=None),
    ]  # fmt: skip
    with history.session() as session:
        session.add_all([*jobs, *wanted, *others])
    found = queries.faults_of_hardware(history, "c", since=10.0, but="us")
    assert [(one.kind, one.at) for one in found] == [("gpu-off-bus", 10.0), ("node-lost", 11.0)]
    assert [one.kind for one in queries.faults_of_hardware(history, "c", since=0.0, but="us", limit=1)] == ["gpu-off-bus"]
    history.close()


GPU = "GPU 0000:18:00.0"


@pytest.mark.parametrize(("kind", "kept"), [("local", ["b"]), ("ssh", ["a", "b", "c"])])
def test_the_nodes_of_one_machine_do_not_make_a_fault_correlated(kind: str, kept: list[str]) -> None:
    """Nodes on machines of their own do: there the same GPU name is another GPU."""
    fault = Fault(kind="gpu-off-bus", at=5.0, node="b", rank=1, quote="Xid 79", device=GPU)
    earlier = [PastFault(kind="gpu-off-bus", at=5.0, node=node, device=GPU) for node in "abc"]
    other = PastFault(kind="gpu-off-bus", at=4.0, node="a", device="GPU 0000:3b:00.0")
    assert without_repeats([*earlier, other], [fault], kind) == (*(one for one in earlier if one.node in kept), other)
