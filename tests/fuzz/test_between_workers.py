"""The ports of workers: whatever knocks there, those who know the token are served, and nothing grows without a bound."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.authenticated_listener import BURST
from holdfast.runtime.groups import control_tree, kv_store
from holdfast.runtime.groups.control_tree import PeerAcceptor, call
from holdfast.runtime.groups.kv_store import KvServer, KvStore, Verb
from tests.fuzz.examples import ANYTHING, SOCKETS, mutated
from tests.waiting import wait_until

TOKEN: Final = "cd" * 16
LONG: Final = timedelta(seconds=30)
HELLO: Final = kv_store._frame(Verb.HELLO, 0, [TOKEN.encode()])
SAYINGS: Final = [
    HELLO,
    kv_store._frame(Verb.SET, 1, [b"key", b"value"]),
    kv_store._frame(Verb.GET, 2, [b"key"]),
    kv_store._frame(Verb.ADD, 3, [b"count", b"1"]),
    kv_store._frame(Verb.APPEND, 4, [b"list", b"x"]),
    kv_store._frame(Verb.COMPARE, 5, [b"key", b"value", b"other"]),
    kv_store._frame(Verb.COUNT, 6, []),
]


def memory() -> int:
    """Return the bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def speak(port: int, data: bytes) -> bytes:
    """Say *data* to whoever listens on *port*, and that there is no more; return what comes back until its end."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line, contextlib.suppress(OSError):
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        while more := line.recv(65536):
            heard += more
    return heard


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[KvServer, KvStore]]:
    """Give a store, and one that is connected to it all the while."""
    made = KvServer(0, TOKEN)
    mine = KvStore("127.0.0.1", made.port, TOKEN, LONG)
    yield made, mine
    mine.close()
    made.close()


def serves(mine: KvStore) -> None:
    """Tell that the store does its work."""
    stamp = str(time.monotonic())
    mine.set("mine", stamp)
    assert mine.get("mine") == stamp.encode()


@given(data=some.binary(max_size=120) | some.sampled_from(SAYINGS).flatmap(mutated))
@SOCKETS
def test_a_stranger_gets_no_word_out_of_the_store(server: tuple[KvServer, KvStore], data: bytes) -> None:
    """Unless it says the token, in which case it is none."""
    made, mine = server
    heard = speak(made.port, data)
    assert not heard or data.startswith(HELLO)
    serves(mine)


@given(said=some.lists(some.sampled_from(SAYINGS) | some.sampled_from(SAYINGS).flatmap(mutated) | some.binary(max_size=40), max_size=6))
@SOCKETS
def test_a_rank_gone_mad_ends_its_own_connection_alone(server: tuple[KvServer, KvStore], said: list[bytes]) -> None:
    """Verbs that there are none of, parts that are missing, lengths that lie."""
    made, mine = server
    speak(made.port, HELLO + b"".join(said))
    serves(mine)


def test_a_stranger_cannot_have_megabytes_kept(server: tuple[KvServer, KvStore]) -> None:
    """A frame that says how long it will be is refused before it has come."""
    made, mine = server
    before = memory()
    with socket.create_connection(("127.0.0.1", made.port), timeout=20) as line:
        line.sendall(struct.pack("!IBI", kv_store.LONGEST - 1, Verb.SET, 1))
        with contextlib.suppress(ConnectionError):  # it is hung up on
            for _ in range(64):
                line.sendall(bytes(1 << 20))
            pytest.fail("all of it was taken")
    serves(mine)
    assert memory() - before < 32 * 2**20


def test_more_strangers_than_there_is_room_for_shut_nobody_out(server: tuple[KvServer, KvStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go; who knows the token comes in among them."""
    made, mine = server
    monkeypatch.setattr(kv_store, "MAX_UNAUTHENTICATED", 20)
    with contextlib.ExitStack() as lines:
        idle = [lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=20)) for _ in range(60)]
        late = KvStore("127.0.0.1", made.port, TOKEN, LONG)
        serves(late)
        late.close()
        assert idle[0].recv(1) == b""  # hung up on
        wait_until(lambda: len(made._strangers) <= 20, seconds=20)
    serves(mine)


def test_strangers_are_hung_up_on_though_nobody_else_comes(server: tuple[KvServer, KvStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have their time, and no more."""
    made, mine = server
    monkeypatch.setattr(kv_store, "HELLO_SECONDS", 0.3)
    with contextlib.ExitStack() as lines:
        idle = [lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=30)) for _ in range(3)]
        assert [line.recv(1) for line in idle] == [b""] * 3
    serves(mine)


@pytest.mark.parametrize("of", ["store", "acceptor"])
def test_many_strangers_cost_a_training_process_no_threads_and_few_descriptors(
    of: str, server: tuple[KvServer, KvStore], acceptor: PeerAcceptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come at once and stay; a moment later there are few of them, long before the time for a hello is over."""
    for one in (kv_store, control_tree):
        monkeypatch.setattr(one, "HELLO_SECONDS", 1000.0)
    made, most = (server[0], kv_store.MAX_UNAUTHENTICATED) if of == "store" else (acceptor, control_tree.MAX_UNAUTHENTICATED)
    threads, seen = threading.active_count(), list[int]()

    def few() -> bool:
        seen.append(threading.active_count())
        return len(made._strangers) <= most

    with contextlib.ExitStack() as lines:
        for _ in range(2 * BURST):
            lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=30))
            assert len(made._strangers) <= BURST + 1
        wait_until(few, seconds=20)
        assert max(seen) <= threads
    (serves(server[1]) if of == "store" else lets_in(acceptor, 5))


# -- the desk -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def acceptor() -> Iterator[PeerAcceptor]:
    """Give a desk at which other ranks knock."""
    made = PeerAcceptor(TOKEN)
    yield made
    made.close()


def lets_in(acceptor: PeerAcceptor, incarnation: int) -> None:
    """Tell that the desk lets a rank in."""
    with call(("127.0.0.1", acceptor.port), TOKEN, 3, incarnation) as line:
        found: list[socket.socket] = []

        def there() -> bool:
            if (one := acceptor.fetch(3, incarnation)) is not None:
                found.append(one)
            return bool(found)

        wait_until(there, seconds=30)
        found[0].close()
        assert line.fileno() >= 0


def knock(body: bytes, length: int | None = None) -> bytes:
    """Return a hello as a frame."""
    return control_tree._HEAD.pack(0, 0, control_tree._HELLO, len(body) if length is None else length) + body


HELLOS: Final = some.dictionaries(some.sampled_from(("token", "rank", "incarnation")), ANYTHING | some.just(TOKEN)).map(
    lambda told: knock(json.dumps(told).encode())
)


@given(data=some.binary(max_size=80) | HELLOS | mutated(knock(json.dumps({"token": TOKEN, "rank": 1, "incarnation": 1}).encode())))
@SOCKETS
def test_whatever_knocks_at_a_desk_the_next_rank_is_let_in(acceptor: PeerAcceptor, data: bytes) -> None:
    """And no thread ends with a traceback, which pytest would make an error of."""
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=20) as line:
        line.sendall(data)  # where it is a hello after all, the desk keeps the line
    lets_in(acceptor, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4000,
        b'{"token": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        json.dumps({"token": TOKEN, "rank": float("inf"), "incarnation": 1}).encode(),
        json.dumps([TOKEN]).encode(),
    ],
    ids=["deep", "deep token", "infinite", "list"],
)
def test_a_hello_that_nobody_thought_of_is_hung_up_on(acceptor: PeerAcceptor, body: bytes) -> None:
    """Nesting up to the interpreter's limit, numbers that are none."""
    assert speak(acceptor.port, knock(body)) == b""
    lets_in(acceptor, 2)


def test_who_says_a_byte_now_and_then_is_hung_up_on(acceptor: PeerAcceptor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hello has its time as a whole, not each byte of it; and a desk full of them lets the next rank in."""
    monkeypatch.setattr(control_tree, "HELLO_SECONDS", 1.0)
    monkeypatch.setattr(control_tree, "MAX_UNAUTHENTICATED", 10)
    with contextlib.ExitStack() as lines:
        slow = [lines.enter_context(socket.create_connection(("127.0.0.1", acceptor.port), timeout=20)) for _ in range(30)]
        lets_in(acceptor, 3)

        def gone() -> bool:
            with contextlib.suppress(ConnectionError):
                slow[-1].sendall(b"\0")
            return not acceptor._strangers

        wait_until(gone, seconds=30)
    lets_in(acceptor, 4)
