"""A person's request about a node: its effect, its owner, and every way in which it is refused."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import History, cordons
from holdfast.history.cordons import CordonTable
from holdfast.policies.nodes.cordons import OperatorRequest, Owner, Rules
from holdfast.policies.nodes.quarantine import quarantine
from holdfast.spec import LocalCluster
from tests.cli.conftest import Command
from tests.history.rows import service_moves

PLACE = CordonTable(cluster="local", names=LocalCluster().names, rules=Rules())


def taken_out(history: History, node: str) -> None:
    """Have a job quarantine a node."""
    now = time.time()
    word = OperatorRequest(owner=Owner(name="job gpt"), reason="gpu-off-bus: Xid 79", at=now)
    cordons.apply(history, PLACE, node, lambda one, ward: quarantine(one, word, ward), now=now)


def service(here: Command, node: str) -> dict[str, Any]:
    """Return the service state of a node from the JSON output of `holdfast node ls`."""
    listed = json.loads(here("node", "ls", "--json").stdout)["nodes"]
    return next(dict(one["service"]) for one in listed if one["name"] == node)


def test_the_table_has_state_owner_reason_and_end(here: Command, book: History) -> None:
    """Of cordons by programs and people; empty columns are left out."""
    assert "OWNER" not in here("node", "ls").stdout.splitlines()[0].split()
    taken_out(book, "node-1")
    assert here("node", "cordon", "node-2", "--reason", "new fan", "--for", "2h").returncode == 0
    done = here("node", "ls")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:5] == ["NODE", "STATUS", "SINCE", "OWNER", "EXPIRES"]
    assert rows[0].split()[1] == "healthy"
    assert rows[1].split()[1] == "quarantined"
    assert "job gpt" in rows[1]
    assert "gpu-off-bus: Xid 79" in rows[1]
    assert rows[2].split()[1] == "cordoned"
    assert f"by {getpass.getuser()}@" in rows[2]
    assert "new fan" in rows[2]
    output = service(here, "node-2")
    assert output["state"] == "cordoned"
    (cordon,) = output["cordons"]
    assert (cordon["number"], cordon["owner"]["person"]) == (1, True)
    assert cordon["until"] - cordon["at"] == pytest.approx(7200)


def test_each_command_changes_the_state_of_the_node(here: Command, book: History) -> None:
    """Over a quarantine: the program's quarantine is in force again once the person's cordon is lifted."""
    taken_out(book, "node-1")
    for words, moved in (
        (["cordon", "node-1", "--reason", "a look"], "quarantined -> cordoned (cordon 2"),
        (["uncordon", "node-1", "--reason", "done"], "cordoned -> quarantined (cordon 2"),
        (["return", "node-1", "--reason", "reseated"], "quarantined -> healthy (cordon 1"),
        (["decommission", "node-1", "--reason", "once more"], "healthy -> decommissioned (cordon 3"),
        (["return", "node-1", "--reason", "board replaced"], "decommissioned -> healthy (cordon 3"),
    ):
        done = here("node", *words)
        assert done.returncode == 0, done.stderr
        assert moved in done.stdout
    moves = service_moves(book, "local", "node-1")
    assert [one.reason for one in moves[1:]] == ["a look", "done", "reseated", "once more", "board replaced"]
    assert {one.person for one in moves[1:]} == {True}


def test_json_output_has_the_same_content(here: Command) -> None:
    """Of each node."""
    (output,) = json.loads(here("node", "cordon", "node-0", "--reason", "fan", "--json").stdout)["nodes"]
    assert (output["before"], output["state"], output["cordon"], output["until"]) == ("healthy", "cordoned", 1, None)
    assert json.loads(here("node", "uncordon", "--json", "node-0", "--reason", "done").stdout)["nodes"][0]["state"] == "healthy"


REFUSED = {
    "no such node": (["cordon", "node-9", "--reason", "x"], "cluster 'local' has no node 'node-9'. It has nodes such as node-"),
    "nobody cordoned it": (["uncordon", "node-0", "--reason", "x"], "node-0 is healthy: no person cordoned it"),
    "cordoned by a program": (["uncordon", "node-1", "--reason", "x"], "`holdfast node return node-1 --reason ...`"),
    "cordoned by a person": (["return", "node-2", "--reason", "x"], "`holdfast node uncordon node-2 --reason ...` lifts it"),
    "an old number": (["return", "node-1", "--reason", "x", "--number", "7"], "node-1 has no open cordon 7 of a program"),
    "no reason": (["cordon", "node-0", "--reason", " "], "Give one with `--reason`"),
    "no duration": (["cordon", "node-0", "--reason", "x", "--for", "soon"], "'soon' is not a duration above zero"),
    "no time at all": (["cordon", "node-0", "--reason", "x", "--for", "0s"], "'0s' is not a duration above zero"),
    "a mistyped word": (["crodon", "node-0", "--reason", "x"], "`holdfast node cordon`"),
    "no such file": (["cordon", "node-0", "--reason", "x", "--cluster", "gone.yaml"], "gone.yaml"),
    "the file of a cluster as a node": (["cordon", "gone.yaml", "--reason", "x"], "--cluster gone.yaml"),
    "a range that descends": (["cordon", "node-[2-1]", "--reason", "x"], "is not a range of nodes"),
    "one node of several": (["cordon", "node-0,node-9", "--reason", "x"], "has no node 'node-9'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_request_is_refused_with_state_and_cure(case: str, here: Command, book: History) -> None:
    """Status 2, and nothing is changed."""
    taken_out(book, "node-1")
    assert here("node", "cordon", "node-2", "--reason", "fan").returncode == 0
    words, reason = REFUSED[case]
    done = here("node", *words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert [len(service_moves(book, "local", node)) for node in ("node-0", "node-1", "node-2")] == [0, 1, 1]


def test_several_nodes_are_changed_at_once(here: Command, book: History) -> None:
    """By ranges and names; one that cannot be changed does not keep the others from it."""
    taken_out(book, "node-1")
    output = json.loads(here("node", "cordon", "node-[0-1]", "node-3", "--reason", "fans", "--json").stdout)
    assert [one["node"] for one in output["nodes"]] == ["node-0", "node-1", "node-3"]
    done = here("node", "uncordon", "node-[0-3]", "--reason", "done", "--json")
    assert done.returncode == 2
    assert [one["node"] for one in json.loads(done.stdout)["nodes"]] == ["node-0", "node-1", "node-3"]
    assert "node-2" in done.stderr


def test_the_environment_names_the_cluster_where_no_option_does(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--cluster` precedes HOLDFAST_CLUSTER."""
    (tmp_path / "small.yaml").write_text("name: small\nnodes: 2\n")
    (tmp_path / "tiny.yaml").write_text("name: tiny\nnodes: 1\n")
    assert json.loads(here("node", "ls", "--json").stdout)["cluster"] == "local"
    monkeypatch.setenv("HOLDFAST_CLUSTER", "small.yaml")
    assert json.loads(here("node", "ls", "--json").stdout)["cluster"] == "small"
    assert json.loads(here("node", "cordon", "node-1", "--reason", "fan", "--json").stdout)["cluster"] == "small"
    output = json.loads(here("node", "ls", "node-0", "--json", "--cluster", "tiny.yaml").stdout)
    assert (output["cluster"], len(output["nodes"])) == ("tiny", 1)
