"""What lookouts tell, taken in: each fault once, and counters that grew kept with an incident."""

from __future__ import annotations

from typing import Any

from holdfast.control.agents.events import NodeCounterIncreases, NodeFaultSeen
from holdfast.control.faults.node_faults import NodeFaultDedup, with_counter_increases

FAULT = {
    "event": "node.fault",
    "kind": "gpu-off-bus",
    "part": "GPU 0000:18:00.0",
    "quote": "Xid 79",
    "source": "kernel log on n0",
    "seen_at": 5.0,
}


def test_a_fault_is_taken_once_whoever_tells_it_again() -> None:
    """A flow that adopts a job hears the agents' journals again, and knows from the history what the one before has recorded."""
    news = NodeFaultDedup()
    fault = news.take("n0", NodeFaultSeen.of(FAULT))
    assert fault is not None
    assert (fault.node, fault.at, fault.signature, fault.source) == ("n0", 5.0, "gpu-off-bus GPU 0000:18:00.0", "kernel log on n0")
    assert fault.device == "GPU 0000:18:00.0"
    assert news.take("n0", NodeFaultSeen.of(FAULT)) is None
    later = NodeFaultDedup()
    later.remember([(fault.kind, fault.node, fault.at)])
    assert later.take("n0", NodeFaultSeen.of(FAULT)) is None
    assert later.take("n1", NodeFaultSeen.of(FAULT)) is not None, "another node has one of its own"
    assert later.take("n0", NodeFaultSeen.of({**FAULT, "seen_at": 9.0})) is not None


def test_a_kind_that_only_a_newer_agent_knows_is_left_alone() -> None:
    """The flow could say nothing of it."""
    assert NodeFaultDedup().take("n0", NodeFaultSeen.of({**FAULT, "kind": "of-next-year"})) is None


def grown(facts: dict[str, Any]) -> NodeCounterIncreases:
    """Return the event that counters grew while generation 1 ran."""
    return NodeCounterIncreases.of({"event": "node.counter-increases", "over": 1, **facts})


def test_growth_of_several_nodes_stands_beside_what_is_known_of_an_incident() -> None:
    """None of it is lost to the next."""
    facts = with_counter_increases({"rebuilt": 1}, "n0", grown({"seconds": 9.0, "counter_increases": {"eth0.rx_crc_errors": 4}}))
    facts = with_counter_increases(facts, "n1", grown({"seconds": 8.0, "counter_increases": {"eth1.rx_crc_errors": 5}}))
    assert facts["rebuilt"] == 1
    assert {node: one["counters"] for node, one in facts["counter_increases"].items()} == {
        "n0": {"eth0.rx_crc_errors": 4},
        "n1": {"eth1.rx_crc_errors": 5},
    }
