"""What Slurm's commands print, of several versions."""

from __future__ import annotations

import json

import pytest

from holdfast.cluster.slurm.parsing import allocations, names, node_states
from holdfast.cluster.slurm.transport import SlurmTransport
from holdfast.errors import SlurmUnavailable
from holdfast.spec import SlurmCluster
from tests.mentions import mentions

OLD = {
    "nodes": [
        {
            "name": "n1",
            "address": "10.0.0.1",
            "port": 6818,
            "state": "down",
            "state_flags": ["NOT_RESPONDING", "DRAIN"],
            "reason": "Not responding",
            "reason_changed_at": {"set": True, "infinite": False, "number": 1700000000},
        }
    ]
}
LATER = {
    "nodes": [
        {
            "name": "n1",
            "address": "10.0.0.1",
            "port": 6818,
            "state": ["DOWN", "NOT_RESPONDING", "DRAIN"],
            "reason": "Not responding",
            "reason_changed_at": 1700000000,
        }
    ]
}
NEW = {
    "sinfo": [
        {
            "port": 6818,
            "node": {"state": ["DOWN", "NOT_RESPONDING", "DRAIN"]},
            "nodes": {"nodes": ["n1"], "addresses": ["10.0.0.1"]},
            "reason": {"description": "Not responding", "time": {"set": True, "infinite": False, "number": 1700000000}, "user": "root"},
        }
    ]
}


@pytest.mark.parametrize("given", [OLD, LATER, NEW], ids=["22.05", "23.02", "23.11"])
def test_states_of_nodes_are_parsed_in_the_format_of_each_version(given: object) -> None:
    """A word and flags, a list, or groups of nodes."""
    (node,) = node_states(json.dumps(given)).values()
    assert (node.name, node.address, node.port, node.reason, node.since) == ("n1", "10.0.0.1", 6818, "Not responding", 1.7e9)
    assert node.states == ("DOWN", "NOT_RESPONDING", "DRAIN")
    assert (node.is_dead, node.is_leaving) == (True, True)


@pytest.mark.parametrize(
    ("given", "meant"), [("localhost", "127.0.0.1"), ("0:0:0:0:0:0:0:1", "::1"), ("no-such-name.invalid", "no-such-name.invalid")]
)
def test_the_address_of_a_node_is_ipv6_only_where_it_has_no_other(given: str, meant: str) -> None:
    """A name that only the nodes can resolve is kept."""
    (state,) = node_states(json.dumps(OLD).replace("10.0.0.1", given)).values()
    reach = SlurmTransport(SlurmCluster(kind="slurm"), lambda _node: None, {"n1": state}.get)
    assert reach.address("n1") == meant


@pytest.mark.parametrize("text", ["", "slurm_load_node error", "[]", '{"nodes": [{}]}', '{"sinfo": [{"nodes": 3}]}', '{"nodes": null}'])
def test_invalid_output_is_an_error(text: str) -> None:
    """It is never taken for a cluster without nodes."""
    with pytest.raises(SlurmUnavailable, match="cannot be read"):
        node_states(text)


def test_nodes_of_other_partitions_are_left_out() -> None:
    """Versions that print all nodes whatever is requested print the partitions of each."""
    rows = [{"name": name, "state": "idle", "partitions": [where, "all"]} for name, where in (("n1", "train"), ("n2", "debug"))]
    assert list(node_states(json.dumps({"nodes": rows}), "train,other")) == ["n1"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("(null)", []),
        ("n1", ["n1"]),
        ("n[1-3,7],gpu-a", ["n1", "n2", "n3", "n7", "gpu-a"]),
        ("r[1-2]n[08-09].x", ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]),
        ("n[1-99999999999]", None),
    ],
)
def test_a_node_list_is_expanded(text: str, found: list[str] | None) -> None:
    """As scontrol does it; an endless one is cut off."""
    spelled = names(text)
    assert spelled == found if found is not None else len(spelled) == 100_000


def test_an_allocation_in_an_unknown_state_is_pending() -> None:
    """A comment may contain anything."""
    lines = "7|REQUEUE_FED|Resources||N/A|N/A|4|holdfast:a|b\n8|RUNNING|None|n[1-2]|1795337112|1795337712|2|\nslurm_load_jobs error\n"
    coming, here = allocations(lines)
    assert (coming.is_pending, coming.is_running, coming.count, coming.comment, coming.ends) == (True, False, 4, "holdfast:a|b", None)
    assert (here.is_running, here.nodes, here.began, here.ends) == (True, ("n1", "n2"), 1795337112.0, 1795337712.0)
    assert mentions(coming.describe(), "Slurm job 7", "requeue_fed", "Resources")
