"""The cordons of nodes on record: the same laws as for the values, and two processes that speak at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from sqlalchemy import func
from sqlmodel import select

from holdfast.history import History, NodeCordon, ServiceTransition
from holdfast.history import cordons as record
from holdfast.history.cordons import CordonTable, apply
from holdfast.policies.nodes import quarantine as acts
from holdfast.policies.nodes.cordons import (
    Answer,
    CordonChanged,
    CordonKind,
    NeedsPerson,
    Node,
    OperatorRequest,
    OutOfDate,
    Owner,
    QuarantineLimits,
    Rules,
)
from holdfast.policies.nodes.node_states import NodeState
from tests.fresh_history import fresh_history
from tests.history.children import Child
from tests.history.rows import service_moves
from tests.policies.test_quarantine_properties import NAMES, RULES, Wards

PROGRAM, ANN = Owner(name="job gpt"), Owner(name="ann@desk", person=True)
PLACE = CordonTable(cluster="c", names=[f"n{number}" for number in range(8)], rules=Rules())


def word(owner: Owner, at: float, seen: float | None = None) -> OperatorRequest:
    """Return what *owner* says at that time."""
    return OperatorRequest(owner=owner, reason="Xid 79", at=at, seen=seen, evidence=("NVRM: Xid 79",))


def out(at: float, seen: float | None = None) -> Callable[[Node, QuarantineLimits], Answer]:
    """Return a program's word that takes a node out."""
    return lambda node, ward: acts.quarantine(node, word(PROGRAM, at, seen), ward)


class RecordedCordons(Wards):
    """The same words, kept in a real history."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.history = fresh_history(Path(self.folder.name) / "history.db")
        self.place = CordonTable(cluster="c", names=NAMES, rules=RULES)

    def teardown(self) -> None:
        """Leave nothing."""
        self.history.close()
        self.folder.cleanup()

    def read(self, name: str) -> Node:
        """Return the node as the history has it."""
        with self.history.session() as session:
            return record._read(session, self.place, name, self.now)

    def say(self, name: str, act: Callable[[Node, QuarantineLimits], Answer]) -> Answer:
        """Say it to the history."""
        return apply(self.history, self.place, name, act, now=self.now)

    def run_out(self, name: str) -> int:
        """Let any word, one that comes to nothing, settle what has run out."""
        before = self.read(name).transitions
        self.say(name, lambda _, __: OutOfDate("nothing"))
        return self.read(name).transitions - before

    def counters_never_fall(self, before: Node, after: Node, moves: int | None = None) -> None:
        """See that no row goes: they are the counters."""
        assert after.number >= before.number
        assert after.transitions >= before.transitions
        with self.history.session() as session:
            rows = (
                session.exec(select(func.count()).select_from(NodeCordon)).one()
                + session.exec(select(func.count()).select_from(ServiceTransition)).one()
            )
        assert rows >= getattr(self, "rows", 0)
        self.rows = rows


RecordedCordons.TestCase.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)
TestRecordedCordons = pytest.mark.timeout(300)(RecordedCordons.TestCase)  # a fresh database for each example


def test_a_cordon_is_stored_with_all_its_fields(history: History) -> None:
    """Owner, reason, evidence, number, begin and end outlive the process; so does what lifted it."""
    done = apply(history, PLACE, "n1", out(100.0), now=100.0)
    assert isinstance(done, CordonChanged)
    node = record.nodes(history, PLACE, now=101.0)["n1"]
    assert (node.state, node.since, node.cordons) == (NodeState.QUARANTINED, 100.0, done.node.cordons)
    (cordon,) = node.cordons
    assert (cordon.number, cordon.owner, cordon.evidence, cordon.until) == (1, PROGRAM, ("NVRM: Xid 79",), 100.0 + Rules().cool)

    assert isinstance(apply(history, PLACE, "n1", lambda node, _: acts.return_to_service(node, word(ANN, 200.0)), now=200.0), CordonChanged)
    assert record.nodes(history, PLACE, now=201.0)["n1"].state is NodeState.HEALTHY
    (row,) = record.history_of(history, "c", "n1")
    assert (row.ended_at, row.ended_by, row.ended_reason) == (200.0, "ann@desk", "Xid 79")
    assert [(one.before, one.event, one.after, one.person) for one in service_moves(history, "c", "n1")] == [
        ("healthy", "quarantined", "quarantined", False),
        ("quarantined", "returned-to-service", "healthy", True),
    ]
    assert isinstance(apply(history, PLACE, "n1", out(210.0, seen=199.0), now=210.0), OutOfDate), "what was seen before it came back"
    again = apply(history, PLACE, "n1", out(220.0), now=220.0)
    assert isinstance(again, CordonChanged)
    assert again.node.cordons[0].until == 220.0 + 2 * Rules().cool, "it is counted, and stays out for longer"


def test_an_expired_burn_in_is_not_the_running_one(history: History) -> None:
    """Its number is not given again, whatever was forgotten in between."""
    apply(history, PLACE, "n1", out(100.0), now=100.0)
    first = apply(history, PLACE, "n1", lambda node, _: acts.begin_burn_in(node, word(PROGRAM, 110.0), 1, seconds=10.0), now=110.0)
    second = apply(history, PLACE, "n1", lambda node, _: acts.begin_burn_in(node, word(PROGRAM, 130.0), 1, seconds=10.0), now=130.0)
    assert isinstance(first, CordonChanged)
    assert isinstance(second, CordonChanged)
    assert second.test == first.test + 1
    late = apply(
        history,
        PLACE,
        "n1",
        lambda node, _: acts.end_burn_in(node, word(PROGRAM, 135.0), first.burn_in, passed=True, rules=Rules()),
        now=135.0,
    )
    assert isinstance(late, OutOfDate)
    passed = apply(
        history,
        PLACE,
        "n1",
        lambda node, _: acts.end_burn_in(node, word(PROGRAM, 136.0), second.burn_in, passed=True, rules=Rules()),
        now=136.0,
    )
    assert isinstance(passed, CordonChanged)
    assert [one.event for one in service_moves(history, "c", "n1")] == ["quarantined", "tested", "untried", "tested", "passed"]


def test_a_persons_cordon_that_expired_needs_a_burn_in(history: History) -> None:
    """A reader sees it at once; it is written with the next word."""
    apply(history, PLACE, "n1", lambda node, _: acts.cordon(node, word(ANN, 100.0), until=150.0), now=100.0)
    assert record.nodes(history, PLACE, now=149.0)["n1"].state is NodeState.CORDONED
    due = record.nodes(history, PLACE, now=151.0)["n1"]
    assert (due.state, due.is_due(151.0)) == (NodeState.QUARANTINED, True)
    assert len(service_moves(history, "c", "n1")) == 1
    apply(history, PLACE, "n1", lambda node, _: acts.cordon(node, word(ANN, 160.0)), now=160.0)
    assert [one.event for one in service_moves(history, "c", "n1")] == ["cordoned", "burn-in-due", "cordoned"]
    assert [one.kind for one in record.history_of(history, "c", "n1")] == [CordonKind.PERSON, CordonKind.UNTESTED, CordonKind.PERSON]


def test_only_nodes_of_the_cluster_count_for_the_limit(history: History) -> None:
    """One that is no longer in its file isolates nothing; another cluster's are not looked at."""
    apply(history, CordonTable(cluster="c", names=["gone"], rules=Rules()), "gone", out(100.0), now=100.0)
    apply(history, CordonTable(cluster="d", names=["n0"], rules=Rules()), "n0", out(100.0), now=100.0)
    assert isinstance(apply(history, PLACE, "n0", out(101.0), now=101.0), CordonChanged)
    assert isinstance(apply(history, PLACE, "n1", out(102.0), now=102.0), CordonChanged)
    assert isinstance(apply(history, PLACE, "n2", out(103.0), now=103.0), NeedsPerson)
    assert record.nodes(history, PLACE, now=104.0).keys() == {"gone", "n0", "n1"}


def test_concurrent_processes_use_no_number_twice_and_keep_the_limit(
    history_url: str, history: History, child: Callable[..., Child]
) -> None:
    """Each takes out, takes back and cordons as fast as it can; the record is as if they had taken turns."""
    children = [child("speak_of_nodes", history_url, name, "12") for name in ("one", "two")]
    for one in children:
        assert one.receive() == "ready"
    for one in children:
        one.send()
    lines = [one.receive() for one in children]
    assert all(line.startswith("most ") for line in lines), lines
    assert max(int(line.split()[1]) for line in lines) in {1, 2}, "programs take out a quarter of eight at most"
    now = time.time()
    for name in PLACE.names:
        rows, moved = record.history_of(history, "c", name), service_moves(history, "c", name)
        numbers = [row.number for row in rows]
        assert len(numbers) == len(set(numbers))
        assert [one.number for one in moved] == list(range(1, len(moved) + 1))
        assert all(before.after == after.before for before, after in pairwise(moved))
    present = record.nodes(history, PLACE, now=now)
    assert all(node.state == service_moves(history, "c", name)[-1].after for name, node in present.items())
