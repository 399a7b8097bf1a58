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
from holdfast.spec import LocalCluster
from policies.cordons import OperatorRequest, Owner, Rules
from policies.quarantine import quarantine
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
    assert "BY" not in here("node", "ls").stdout.splitlines()[0].split()
    taken_out(book, "node-1")
    assert here("node", "cordon", "node-2", "--reason", "new fan", "--for", "2h").returncode == 0
    done = here("node", "ls")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:5] == ["NODE", "STATE", "SINCE", "BY", "UNTIL"]
    assert rows[0].split()[1] == "healthy"
    assert rows[1].split()[1] == "quarantined"
    assert "job gpt" in rows[1]
    assert "gpu-off-bus: Xid 79" in rows[1]
    assert rows[2].split()[1] == "held"
    assert f"by {getpass.getuser()}@" in rows[2]
    assert "new fan" in rows[2]
    told = service(here, "node-2")
    assert told["state"] == "held"
    (hold,) = told["holds"]
    assert (hold["number"], hold["owner"]["person"]) == (1, True)
    assert hold["until"] - hold["at"] == pytest.approx(7200)


def test_each_command_changes_the_state_of_the_node(here: Command, book: History) -> None:
    """Over a quarantine: the program's quarantine is in force again once the person's hold is lifted."""
    taken_out(book, "node-1")
    for words, moved in (
        (["hold", "node-1", "--reason", "a look"], "quarantined -> held (hold 2"),
        (["release", "node-1", "--reason", "done"], "held -> quarantined (hold 2"),
        (["readmit", "node-1", "--reason", "reseated"], "quarantined -> healthy (hold 1"),
        (["retire", "node-1", "--reason", "once more"], "healthy -> retired (hold 3"),
        (["readmit", "node-1", "--reason", "board replaced"], "retired -> healthy (hold 3"),
    ):
        done = here("node", *words)
        assert done.returncode == 0, done.stderr
        assert moved in done.stdout
    moves = service_moves(book, "local", "node-1")
    assert [one.reason for one in moves[1:]] == ["a look", "done", "reseated", "once more", "board replaced"]
    assert {one.person for one in moves[1:]} == {True}


def test_json_output_has_the_same_content(here: Command) -> None:
    """`--json` may precede or follow the command."""
    told = json.loads(here("node", "cordon", "node-0", "--reason", "fan", "--json").stdout)
    assert (told["before"], told["state"], told["hold"], told["until"]) == ("healthy", "held", 1, None)
    assert json.loads(here("node", "uncordon", "--json", "node-0", "--reason", "done").stdout)["state"] == "healthy"


REFUSED = {
    "no such node": (["hold", "node-9", "--reason", "x"], "cluster 'local' has no node 'node-9'. It has node-"),
    "nobody holds it": (["release", "node-0", "--reason", "x"], "node-0 is healthy: no person cordoned it"),
    "held by a program": (["release", "node-1", "--reason", "x"], "`holdfast node return node-1 --reason ...`"),
    "held by a person": (["readmit", "node-2", "--reason", "x"], "`holdfast node uncordon node-2 --reason ...` lifts it"),
    "an old number": (["readmit", "node-1", "--reason", "x", "--number", "7"], "node-1 has no open cordon 7 of a program"),
    "no reason": (["hold", "node-0", "--reason", " "], "Give one with `--reason`"),
    "no duration": (["hold", "node-0", "--reason", "x", "--for", "soon"], "'soon' is not a duration above zero"),
    "no time at all": (["hold", "node-0", "--reason", "x", "--for", "0s"], "'0s' is not a duration above zero"),
    "a mistyped word": (["hodl", "node-0", "--reason", "x"], "Did you mean 'hold'?"),
    "no such file": (["hold", "node-0", "--reason", "x", "--cluster", "gone.yaml"], "gone.yaml"),
    "a list of nothing": (["gone.yaml"], "gone.yaml"),
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


def test_a_file_of_a_cluster_is_still_listed(here: Command, tmp_path: Path) -> None:
    """With or without `list`; `--cluster` selects the cluster of a node."""
    (tmp_path / "hold.yaml").write_text("name: small\nnodes: 2\n")
    assert here("node", "ls", "--cluster", "hold.yaml").stdout == here("node", "ls", "--cluster", "hold.yaml").stdout
    assert here("node", "cordon", "node-1", "--reason", "fan", "--cluster", "hold.yaml").returncode == 0
    assert "held" in here("node", "ls", "--cluster", "hold.yaml").stdout
    assert "held" not in here("node", "ls").stdout
