"""`holdfast node drain`: what it records and shows, the table of nodes, and every way in which it is refused."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.arguments import coming_time
from holdfast.history import History
from tests.cli.conftest import Command
from tests.cli.written_history import Author
from tests.mentions import mentions


def node(here: Command, name: str, *words: str) -> dict[str, Any]:
    """Return a node from the JSON output of `holdfast node ls`."""
    listed = json.loads(here("node", "ls", "--json", *words).stdout)["nodes"]
    return next(dict(one) for one in listed if one["name"] == name)


def test_a_drain_cordons_a_node_until_it_is_cancelled(here: Command, book: History) -> None:
    """A second drain changes the time and adds no cordon; the table shows owner, reason and end."""
    assert book is not None
    done = here("node", "drain", "node-1", "--in", "20m", "--reason", "new fan")
    assert (done.returncode, done.stderr) == (0, "")
    assert (node(here, "node-1")["service"]["state"], node(here, "node-1")["service"]["cordons"][0]["number"]) == ("cordoned", 1)
    assert here("node", "drain", "node-1", "--in", "2h", "--reason", "two fans").returncode == 0
    (cordon,) = node(here, "node-1")["service"]["cordons"]
    assert (cordon["drains"], cordon["reason"], cordon["owner"]["person"]) == (True, "two fans", True)
    assert cordon["leave_by"] == pytest.approx(time.time() + 7200, abs=60)
    assert "two fans" in here("node", "ls").stdout
    (output,) = json.loads(here("node", "drain", "node-1", "--cancel", "--json").stdout)["nodes"]
    assert (output["before"], output["state"], output["drains"]) == ("cordoned", "healthy", False)
    assert node(here, "node-1")["service"]["cordons"] == []


def test_cancelling_a_drain_keeps_other_cordons(here: Command, book: History) -> None:
    """A person's cordon stays, and the node is not used."""
    assert book is not None
    here("node", "cordon", "node-1", "--reason", "a look")
    here("node", "drain", "node-1")
    (output,) = json.loads(here("node", "drain", "node-1", "--cancel", "--json").stdout)["nodes"]
    assert (output["state"], output["drains"], output["by"]) == ("cordoned", False, None)


def test_a_job_names_its_cluster(here: Command, running: Author) -> None:
    """Nobody has to find the file."""
    assert running is not None
    (output,) = json.loads(here("node", "drain", "node-1", "--job", "gpt-small", "--json").stdout)["nodes"]
    assert (output["node"], output["state"], output["reason"]) == ("node-1", "cordoned", "a planned removal")


def test_the_cluster_of_a_job_precedes_the_one_of_the_environment(here: Command, running: Author, tmp_path: Path) -> None:
    """HOLDFAST_CLUSTER only stands in where nothing else names one."""
    assert running is not None
    (tmp_path / "tiny.yaml").write_text("name: tiny\nnodes: 1\n")
    output = json.loads(here("node", "drain", "node-1", "--job", "gpt-small", "--json", HOLDFAST_CLUSTER="tiny.yaml").stdout)
    assert output["cluster"] == "local"
    assert json.loads(here("node", "drain", "node-0", "--json").stdout)["cluster"] == "tiny"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["node-77"], "node-77"),
        (["node-1", "--cancel"], "healthy"),
        (["node-1", "--by", "soon"], "'soon'"),
        (["node-1", "--by", "2020-01-01 10:00"], "past"),
        (["node-1", "--in", "later"], "'later'"),
        (["node-1", "--in", "0s"], "'0s'"),
        (["node-1", "--in", "5m", "--by", "18:00"], "name the time once"),
        (["node-1", "--in", "5m", "--cancel"], "cancels the drain"),
        (["node-1", "--reason", " "], "a reason is needed"),
        (["node-1", "--job", "nobody"], "nobody"),
        (["node-1", "--cluster", "c.yaml", "--job", "a"], "name the cluster once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_drain_is_refused_with_the_cure(here: Command, book: History, words: list[str], said: str) -> None:
    """And nothing is written."""
    assert book is not None
    done = here("node", "drain", *words)
    assert done.returncode != 0
    assert mentions(done.stderr, said)
    assert all(one["service"]["state"] == "healthy" for one in json.loads(here("node", "ls", "--json").stdout)["nodes"])


def test_a_time_of_day_is_the_next_one() -> None:
    """Today, or tomorrow when it is over; with a date it is that."""
    now = datetime.now()  # noqa: DTZ005 (as a person's clock shows it)
    for minutes in (-5, 5):
        shown = (now + timedelta(minutes=minutes)).strftime("%H:%M")
        at = coming_time(shown)
        assert at is not None
        assert 0 < at - now.timestamp() <= 86_400 + 3_600  # a day may have 25 hours
        assert time.strftime("%H:%M", time.localtime(at)) == shown
    assert coming_time("2026-12-01T18:00+00:00") == 1_796_148_000.0
    assert coming_time("25:00") is None


def test_maintenance_windows_are_listed(here: Command, book: History, tmp_path: Path) -> None:
    """The next one of each node."""
    assert book is not None
    (tmp_path / "c.yaml").write_text("nodes: 2\nmaintenance: [{nodes: [node-1], start: 2099-12-01 22:00, reason: firmware}]\n")
    assert node(here, "node-1", "--cluster", str(tmp_path / "c.yaml"))["service"]["maintenance"]["reason"] == "firmware"
    assert node(here, "node-0", "--cluster", str(tmp_path / "c.yaml"))["service"]["maintenance"] is None
    assert "firmware from 2099-12-01 22:00:00 to 2099-12-02 02:00:00" in here("node", "ls", "--cluster", str(tmp_path / "c.yaml")).stdout
