"""The control tree, each rank in a thread: votes, facts, rank states on backup ranks, and callers that are rejected."""

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


class Trees:
    """Control trees of all ranks of a job, in one process."""

    def __init__(self, size: int, stride: int = 1) -> None:
        self.size, self.stride = size, stride
        self.acceptors = [PeerAcceptor(TOKEN) for _ in range(size)]
        self.trees: list[ControlTree] = []
        self.made: list[int] = []

    def connect(self, generation: int = 1, changed: tuple[int, ...] = ()) -> None:
        """Connect a generation, in which the *changed* ranks are new processes."""
        old: list[ControlTree | None] = [None if rank in changed else one for rank, one in enumerate(self.trees)] or [None] * self.size
        for rank in changed:
            self.trees[rank].close()
        since = [generation if rank in changed else 1 for rank in range(self.size)]
        incarnations = dict(enumerate(since))
        new = [ControlTree(rank, generation, incarnations, self.stride) for rank in range(self.size)]
        find = lambda rank: ("127.0.0.1", self.acceptors[rank].port)  # noqa: E731 (used once)
        self.made = in_threads(lambda rank: new[rank].connect_neighbours(old[rank], self.acceptors[rank], TOKEN, find), range(self.size))
        self.trees = new

    def all(self, exchange: Callable[[ControlTree], Any], ranks: Any = None) -> list[Any]:
        """Run *exchange* on every rank, and return each result, or the exception that ended it."""
        return in_threads(lambda rank: exchange(self.trees[rank]), range(self.size) if ranks is None else ranks)

    def close(self) -> None:
        """Close everything."""
        for one in self.trees:
            one.close()
        for acceptor in self.acceptors:
            acceptor.close()


def in_threads(act: Callable[[int], Any], ranks: Any) -> list[Any]:
    """Call *act* in a thread for each rank; return the results."""
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
        one.join(60)
    assert len(found) == len(threads), f"still running: {set(ranks) - found.keys()}"
    return [found[rank] for rank in ranks]


@pytest.fixture
def trees_of() -> Iterator[Callable[..., Trees]]:
    """Give a function that connects the trees of so many ranks."""
    made: list[Trees] = []

    def make(size: int, stride: int = 1) -> Trees:
        made.append(Trees(size, stride))
        made[-1].connect()
        return made[-1]

    yield make
    for one in made:
        one.close()


def both(one: dict[str, bool], other: dict[str, bool]) -> dict[str, bool]:
    """Merge two votes."""
    return {"ok": one["ok"] and other["ok"]}


def vote(one: ControlTree, kept: dict[int, Kept], *, ok: bool = True, state: str = "state") -> dict[str, bool]:
    """Vote, and keep the states of protected ranks."""
    mine = kept.setdefault(one.rank, [])
    return one.vote({"ok": ok}, both, {"ok": False}, f"{state} of {one.rank}".encode(), lambda rank, given: mine.append((rank, given)))


@pytest.mark.parametrize("against", [None, 0, 2, 3])
def test_a_vote_is_the_same_for_all_and_one_no_decides(trees_of: Callable[..., Trees], against: int | None) -> None:
    """Whether the root votes no, or any other rank."""
    answers = trees_of(4).all(lambda one: vote(one, {}, ok=one.rank != against))
    assert answers == [{"ok": against is None}] * 4


def test_a_vote_copies_every_rank_state_to_another_node(trees_of: Callable[..., Trees]) -> None:
    """Four ranks on two nodes: each state is kept on the other node; a change after the vote arrives before the next."""
    trees, kept = trees_of(4, stride=2), dict[int, Kept]()
    trees.all(lambda one: vote(one, kept))
    assert kept == {one.rank: [(rank, f"state of {rank}".encode()) for rank in one.protected_ranks] for one in trees.trees}
    assert all(any(recovery // 2 != rank // 2 and rank in dict(kept[recovery]) for recovery in kept) for rank in range(4))
    trees.trees[1].send_final_state(b"final of 1")
    kept.clear()
    trees.all(lambda one: vote(one, kept, state="next"))
    assert kept[3].index((1, b"final of 1")) < kept[3].index((1, b"next of 1"))


def test_the_last_state_of_a_lost_rank_is_read(trees_of: Callable[..., Trees]) -> None:
    """Its last state is in the backup rank's connection when it exits, and is read before the next rendezvous."""
    trees, kept = trees_of(3), dict[int, Kept]()
    trees.all(lambda one: vote(one, kept))
    trees.trees[0].send_final_state(b"final of 0")
    trees.trees[0].close()
    found: Kept = []
    trees.trees[1].drain(lambda rank, given: found.append((rank, given)), lambda rank, given: found.append((rank, given)))
    assert found == [(0, b"final of 0")]


def test_facts_are_gathered_by_rank(trees_of: Callable[..., Trees]) -> None:
    """Every rank gets every value, several times in a row."""
    trees = trees_of(5)
    for turn in range(3):
        answers = trees.all(lambda one, turn=turn: one.gather([one.rank, turn]))  # type: ignore[misc]
        assert answers == [{rank: [rank, turn] for rank in range(5)}] * 5


@given(st.sets(st.integers(0, 11), min_size=1), st.sampled_from([1, 2, 4]))
def test_with_vacant_places_every_rank_is_connected_and_backed_up(ranks: set[int], stride: int) -> None:
    """The tree has one root and all ranks in it; each rank has two backup ranks where there are two others, and both sides agree."""
    trees = {rank: ControlTree(rank, 1, dict.fromkeys(ranks, 1), stride) for rank in ranks}
    for one in trees.values():
        one.close()
    assert [rank for rank, one in trees.items() if one.parent is None] == [min(ranks)]
    assert sorted(child for one in trees.values() for child in one.children) == sorted(ranks - {min(ranks)})
    for rank, one in trees.items():
        assert all(trees[child].parent == rank for child in one.children)
        assert len(set(one.backup_ranks) - {rank}) == min(2, len(ranks) - 1)
        assert all(rank in trees[backup].protected_ranks for backup in one.backup_ranks)
        assert all(rank in trees[other].backup_ranks for other in one.protected_ranks)


def test_forty_ranks_form_a_deep_tree(trees_of: Callable[..., Trees], monkeypatch: pytest.MonkeyPatch) -> None:
    """With three children per rank the tree is four levels deep: votes and facts still reach all."""
    monkeypatch.setattr(control_tree, "FAN_OUT", 3)
    trees = trees_of(40, stride=8)
    assert max(len(one.children) for one in trees.trees) == 3
    assert trees.trees[39].parent == 12
    assert trees.all(lambda one: vote(one, {})) == [{"ok": True}] * 40
    assert trees.all(lambda one: vote(one, {}, ok=one.rank != 39)) == [{"ok": False}] * 40
    assert trees.all(lambda one: one.gather(one.rank)) == [{rank: rank for rank in range(40)}] * 40


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5])
def test_a_lost_rank_fails_the_vote_and_nobody_waits_for_it(trees_of: Callable[..., Trees], lost: int) -> None:
    """The others learn from the vote itself that the step does not count, whoever backs up whose state."""
    trees = trees_of(6, stride=2)
    trees.trees[lost].close()
    left = [rank for rank in range(6) if rank != lost]
    assert trees.all(lambda one: vote(one, {}), ranks=left) == [{"ok": False}] * 5


def test_a_lost_root_leaves_the_outcome_open(trees_of: Callable[..., Trees]) -> None:
    """No rank knows which result the others received: the next rendezvous finds out."""
    trees = trees_of(3)
    trees.trees[0].close()
    answers = trees.all(lambda one: vote(one, {}), ranks=[1, 2])
    assert all(isinstance(one, PeerConnectionLost) and one.rank == 0 for one in answers)


def test_waits_end_when_the_generation_ends(trees_of: Callable[..., Trees]) -> None:
    """Rank 1 never votes; the command reaches the others during their wait."""
    trees = trees_of(3)
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.extend(trees.all(lambda one: vote(one, {}), ranks=[0, 2])))
    waiting.start()
    wait_until(lambda: trees.trees[2]._number and trees.trees[0]._number, seconds=60)
    for one in trees.trees:
        one.cancel()
    waiting.join(60)
    assert [type(one) for one in done] == [GenerationEnded, GenerationEnded]


def test_a_new_rank_costs_its_own_connections_and_no_others(trees_of: Callable[..., Trees]) -> None:
    """Connections between ranks that stay are kept, and frames of the old generation in them are dropped."""
    trees = trees_of(6, stride=2)
    kept = dict[int, Kept]()
    trees.trees[1].send_final_state(b"of the old generation")  # to rank 3, which does not read it
    trees.connect(2, changed=(4,))
    touched = {4} | trees.trees[4].neighbours
    assert {rank for rank, made in enumerate(trees.made) if made} == touched
    assert trees.all(lambda one: vote(one, kept)) == [{"ok": True}] * 6
    assert (1, b"of the old generation") not in kept[3]
    assert (1, b"state of 1") in kept[3]


def test_a_frame_of_an_older_generation_is_dropped_unread() -> None:
    """Frames of the current generation wait for their turn, in whatever order they are taken."""
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
def test_a_caller_without_the_token_is_rejected(hello: bytes) -> None:
    """A wrong token, none, or garbage: the connection is closed, and the acceptor continues to serve."""
    acceptor = PeerAcceptor(TOKEN)
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=60) as line:
        line.sendall(control_tree._HEAD.pack(0, 0, control_tree._HELLO, len(hello)) + hello)
        assert line.recv(1) == b""
    assert acceptor.fetch(1, 1) is None
    caller = control_tree.call(("127.0.0.1", acceptor.port), TOKEN, 1, 1)
    accepted = wait_until(lambda: acceptor.fetch(1, 1), seconds=60)
    assert accepted is not None
    for one in (caller, accepted):
        one.close()
    acceptor.close()


def test_a_hello_that_is_too_long_is_not_read() -> None:
    """A caller without the token cannot make a rank allocate memory for it."""
    acceptor = PeerAcceptor(TOKEN)
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=60) as line:
        line.sendall(control_tree._HEAD.pack(0, 0, control_tree._HELLO, 2**31))
        assert line.recv(1) == b""
    acceptor.close()


@pytest.mark.parametrize("lost", range(1, 8))
def test_a_rank_known_to_be_lost_does_not_keep_states_from_the_other_backup_rank(trees_of: Callable[..., Trees], lost: int) -> None:
    """The others complete the vote, and its result is no."""
    trees = trees_of(8, stride=2)
    trees.trees[lost].close()
    left = [rank for rank in range(8) if rank != lost]

    def known() -> bool:
        peers = [trees.trees[rank].peers.get(lost) for rank in left]
        for peer in peers:
            if peer is not None and not peer.error:
                peer.pump(select.POLLIN)
        return all(peer is None or peer.error for peer in peers)

    wait_until(known, seconds=60)
    assert trees.all(lambda one: vote(one, {}), ranks=left) == [{"ok": False}] * 7


def test_closing_an_acceptor_closes_connections_that_nobody_fetched() -> None:
    """Also one that is accepted only then."""
    acceptor = PeerAcceptor(TOKEN)
    callers = [control_tree.call(("127.0.0.1", acceptor.port), TOKEN, rank, 1) for rank in (0, 1)]
    acceptor.close()
    for caller in callers:
        caller.settimeout(60)
        with suppress(ConnectionResetError):  # a connection that was never accepted is reset
            assert caller.recv(1) == b""
        caller.close()
