"""The ranks' small talk, each rank in a thread: votes, facts, light states with buddies, and what it does not listen to."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.groups import control_tree
from holdfast.runtime.groups.backends import GenerationEnded
from holdfast.runtime.groups.control_tree import ControlTree, PeerAcceptor, PeerConnectionLost, TreePeer
from tests.waiting import wait_until

TOKEN = "cafe"
Kept = list[tuple[int, bytes]]


class Table:
    """Councils of all ranks of a job, in one process."""

    def __init__(self, size: int, stride: int = 1) -> None:
        self.size, self.stride = size, stride
        self.desks = [PeerAcceptor(TOKEN) for _ in range(size)]
        self.councils: list[ControlTree] = []
        self.made: list[int] = []

    def sit(self, generation: int = 1, changed: tuple[int, ...] = ()) -> None:
        """Convene a generation, in which the *changed* ranks are new processes."""
        old: list[ControlTree | None] = [None if rank in changed else one for rank, one in enumerate(self.councils)] or [None] * self.size
        for rank in changed:
            self.councils[rank].close()
        since = [generation if rank in changed else 1 for rank in range(self.size)]
        incarnations = dict(enumerate(since))
        new = [ControlTree(rank, generation, incarnations, self.stride) for rank in range(self.size)]
        find = lambda rank: ("127.0.0.1", self.desks[rank].port)  # noqa: E731 (said once)
        self.made = everybody(lambda rank: new[rank].connect_neighbours(old[rank], self.desks[rank], TOKEN, find), range(self.size))
        self.councils = new

    def all(self, talk: Callable[[ControlTree], Any], ranks: Any = None) -> list[Any]:
        """Have every rank talk, and return what each got, or the exception that ended it."""
        return everybody(lambda rank: talk(self.councils[rank]), range(self.size) if ranks is None else ranks)

    def close(self) -> None:
        """Let everybody go home."""
        for one in self.councils:
            one.close()
        for acceptor in self.desks:
            acceptor.close()


def everybody(act: Callable[[int], Any], ranks: Any) -> list[Any]:
    """Do something in a thread for each rank; return what came of it."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except Exception as error:  # noqa: BLE001 (handed to the test)
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for one in threads:
        one.start()
    for one in threads:
        one.join(15)
    assert len(found) == len(threads), f"still at it: {set(ranks) - found.keys()}"
    return [found[rank] for rank in ranks]


@pytest.fixture
def table() -> Iterator[Callable[..., Table]]:
    """Give what brings ranks to a table."""
    made: list[Table] = []

    def sit(size: int, stride: int = 1) -> Table:
        made.append(Table(size, stride))
        made[-1].sit()
        return made[-1]

    yield sit
    for one in made:
        one.close()


def both(one: dict[str, bool], other: dict[str, bool]) -> dict[str, bool]:
    """Merge two votes."""
    return {"ok": one["ok"] and other["ok"]}


def vote(one: ControlTree, kept: dict[int, Kept], *, ok: bool = True, rank_state: str = "rank_state") -> dict[str, bool]:
    """Vote, and keep what wards give."""
    mine = kept.setdefault(one.rank, [])
    return one.vote({"ok": ok}, both, {"ok": False}, f"{rank_state} of {one.rank}".encode(), lambda ward, given: mine.append((ward, given)))


@pytest.mark.parametrize("against", [None, 0, 2, 3])
def test_a_vote_is_the_same_for_all_and_one_no_decides(table: Callable[..., Table], against: int | None) -> None:
    """Whoever says no: the root, or any other."""
    told = table(4).all(lambda one: vote(one, {}, ok=one.rank != against))
    assert told == [{"ok": against is None}] * 4


def test_a_vote_brings_every_light_state_to_another_node(table: Callable[..., Table]) -> None:
    """Four ranks on two nodes: each is kept on the other node; and what changed after the vote follows before the next."""
    sitting, kept = table(4, stride=2), dict[int, Kept]()
    sitting.all(lambda one: vote(one, kept))
    assert kept == {one.rank: [(ward, f"light of {ward}".encode()) for ward in one.protected_ranks] for one in sitting.councils}
    assert all(any(recovery // 2 != rank // 2 and rank in dict(kept[recovery]) for recovery in kept) for rank in range(4))
    sitting.councils[1].send_final_state(b"final of 1")
    kept.clear()
    sitting.all(lambda one: vote(one, kept, rank_state="next"))
    assert kept[3].index((1, b"final of 1")) < kept[3].index((1, b"next of 1"))


def test_what_a_lost_ward_said_last_is_not_lost(table: Callable[..., Table]) -> None:
    """Its last words lie in the buddy's connection when it dies, and the buddy finds them before the next meeting."""
    sitting, kept = table(3), dict[int, Kept]()
    sitting.all(lambda one: vote(one, kept))
    sitting.councils[0].send_final_state(b"final of 0")
    sitting.councils[0].close()
    found: Kept = []
    sitting.councils[1].leftovers(lambda ward, given: found.append((ward, given)), lambda ward, given: found.append((ward, given)))
    assert found == [(0, b"final of 0")]


def test_facts_are_gathered_by_rank(table: Callable[..., Table]) -> None:
    """Everybody learns what everybody said, several times in a row."""
    sitting = table(5)
    for turn in range(3):
        told = sitting.all(lambda one, turn=turn: one.gather([one.rank, turn]))  # type: ignore[misc]
        assert told == [{rank: [rank, turn] for rank in range(5)}] * 5


@given(st.sets(st.integers(0, 11), min_size=1), st.sampled_from([1, 2, 4]))
def test_with_vacant_places_everybody_is_reached_and_kept(ranks: set[int], stride: int) -> None:
    """The tree has one root and all ranks in it; each light state is with two others where there are two, and both sides know."""
    councils = {rank: ControlTree(rank, 1, dict.fromkeys(ranks, 1), stride) for rank in ranks}
    for one in councils.values():
        one.close()
    assert [rank for rank, one in councils.items() if one.parent is None] == [min(ranks)]
    assert sorted(child for one in councils.values() for child in one.children) == sorted(ranks - {min(ranks)})
    for rank, one in councils.items():
        assert all(councils[child].parent == rank for child in one.children)
        assert len(set(one.backup_ranks) - {rank}) == min(2, len(ranks) - 1)
        assert all(rank in councils[buddy].protected_ranks for buddy in one.backup_ranks)
        assert all(rank in councils[ward].backup_ranks for ward in one.protected_ranks)


def test_forty_ranks_talk_over_a_tree(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    """With three children a rank the tree is four levels deep: votes and facts still reach all."""
    monkeypatch.setattr(control_tree, "FAN_OUT", 3)
    sitting = table(40, stride=8)
    assert max(len(one.children) for one in sitting.councils) == 3
    assert sitting.councils[39].parent == 12
    assert sitting.all(lambda one: vote(one, {})) == [{"ok": True}] * 40
    assert sitting.all(lambda one: vote(one, {}, ok=one.rank != 39)) == [{"ok": False}] * 40
    assert sitting.all(lambda one: one.gather(one.rank)) == [{rank: rank for rank in range(40)}] * 40


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5])
def test_a_lost_rank_is_a_no_and_nobody_waits_for_it(table: Callable[..., Table], lost: int) -> None:
    """A leaf is gone: the others learn from the vote itself that the step does not count, whoever keeps whose light state."""
    sitting = table(6, stride=2)
    sitting.councils[lost].close()
    left = [rank for rank in range(6) if rank != lost]
    assert sitting.all(lambda one: vote(one, {}), ranks=left) == [{"ok": False}] * 5


def test_a_lost_root_leaves_the_outcome_open(table: Callable[..., Table]) -> None:
    """Nobody knows what the others have heard: that is for the next meeting to find out."""
    sitting = table(3)
    sitting.councils[0].close()
    told = sitting.all(lambda one: vote(one, {}), ranks=[1, 2])
    assert all(isinstance(one, PeerConnectionLost) and one.rank == 0 for one in told)


def test_who_waits_is_woken_when_the_generation_ends(table: Callable[..., Table]) -> None:
    """Rank 1 never votes; the order reaches the others in the middle of their wait."""
    sitting = table(3)
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.extend(sitting.all(lambda one: vote(one, {}), ranks=[0, 2])))
    waiting.start()
    wait_until(lambda: sitting.councils[2]._number and sitting.councils[0]._number, seconds=60)
    for one in sitting.councils:
        one.give_up()
    waiting.join(5)
    assert [type(one) for one in done] == [GenerationEnded, GenerationEnded]


def test_a_new_rank_costs_its_own_connections_and_no_others(table: Callable[..., Table]) -> None:
    """Connections between those who stay are kept, and frames of the old generation that lie in them are dropped."""
    sitting = table(6, stride=2)
    kept = dict[int, Kept]()
    sitting.councils[1].send_final_state(b"of the old generation")  # to rank 3, who does not read it
    sitting.sit(2, changed=(4,))
    touched = {4} | sitting.councils[4].neighbours
    assert {rank for rank, made in enumerate(sitting.made) if made} == touched
    assert sitting.all(lambda one: vote(one, kept)) == [{"ok": True}] * 6
    assert (1, b"of the old generation") not in kept[3]
    assert (1, b"light of 1") in kept[3]


def test_a_frame_of_an_older_generation_is_dropped_unread() -> None:
    """One of the present generation waits for its turn, in whatever order frames are asked for."""
    here, there = socket.socketpair()
    here.setblocking(False)
    sender, receiver = TreePeer(0, 1, there), TreePeer(1, 1, here)
    for generation, number in ((1, 9), (2, 1), (2, 2)):
        sender.send(generation, number, 0, f"{generation}.{number}".encode())
    receiver.pump(1)
    assert len(receiver.frames) == 3
    assert receiver.take(2, 1, 1) is None
    assert [frame[:2] for frame in receiver.frames] == [(2, 1), (2, 2)]
    assert receiver.take(2, 2, 0) == b"2.2"
    assert receiver.take(2, 1, 0) == b"2.1"
    for one in (sender, receiver):
        one.close()


@pytest.mark.parametrize("hello", [b'{"token": "beef", "rank": 1, "incarnation": 1}', b'{"rank": 1}', b"[]", b"no JSON", b"\xff\xff"])
def test_a_stranger_is_not_let_in(hello: bytes) -> None:
    """A wrong token, none, or nonsense: the line is closed, and the desk goes on to serve."""
    acceptor = PeerAcceptor(TOKEN)
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=5) as line:
        line.sendall(control_tree._HEAD.pack(0, 0, control_tree._HELLO, len(hello)) + hello)
        assert line.recv(1) == b""
    assert acceptor.fetch(1, 1) is None
    friend = control_tree.call(("127.0.0.1", acceptor.port), TOKEN, 1, 1)
    let_in = wait_until(lambda: acceptor.fetch(1, 1), seconds=60)
    assert let_in is not None
    for one in (friend, let_in):
        one.close()
    acceptor.close()


def test_a_hello_that_is_too_long_is_not_read() -> None:
    """A stranger cannot have a rank set memory aside for it."""
    acceptor = PeerAcceptor(TOKEN)
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=5) as line:
        line.sendall(control_tree._HEAD.pack(0, 0, control_tree._HELLO, 2**31))
        assert line.recv(1) == b""
    acceptor.close()


@pytest.mark.parametrize("lost", range(1, 8))
def test_a_rank_known_to_be_gone_does_not_keep_light_states_from_the_other_buddy(table: Callable[..., Table], lost: int) -> None:
    """The others vote to the end, and the vote is no."""
    sitting = table(8, stride=2)
    sitting.councils[lost].close()
    left = [rank for rank in range(8) if rank != lost]

    def known() -> bool:
        peers = [sitting.councils[rank].peers.get(lost) for rank in left]
        for peer in peers:
            if peer is not None and not peer.gone:
                peer.pump(select.POLLIN)
        return all(peer is None or peer.gone for peer in peers)

    wait_until(known, seconds=60)
    assert sitting.all(lambda one: vote(one, {}), ranks=left) == [{"ok": False}] * 7


def test_a_desk_that_closes_hangs_up_on_those_that_nobody_fetched() -> None:
    """Also on one that is let in only then: its thread would be the last to know of it."""
    acceptor = PeerAcceptor(TOKEN)
    callers = [control_tree.call(("127.0.0.1", acceptor.port), TOKEN, rank, 1) for rank in (0, 1)]
    acceptor.close()
    for caller in callers:
        caller.settimeout(20)
        with suppress(ConnectionResetError):  # who was never let in is told so
            assert caller.recv(1) == b""
        caller.close()
