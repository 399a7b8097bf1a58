"""The ports of workers: whatever callers send, those with the token are served, and nothing grows without bound."""

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

from holdfast.runtime.groups import control_tree, kv_store, token_server
from holdfast.runtime.groups.control_tree import PeerAcceptor, call
from holdfast.runtime.groups.kv_store import KvServer, KvStore, Verb
from holdfast.security.authenticated_listener import BURST
from tests.fuzz.examples import ANYTHING, SOCKETS, mutated
from tests.waiting import wait_until

TOKEN: Final = "cd" * 16
LONG: Final = timedelta(seconds=60)
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
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def speak(port: int, data: bytes) -> bytes:
    """Send *data* to *port* and shut down the sending side; return the complete answer."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line, contextlib.suppress(OSError):
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        while more := line.recv(65536):
            received += more
    return received


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[KvServer, KvStore]]:
    """Host a store, and connect a client to it."""
    made = KvServer(0, TOKEN)
    mine = KvStore("127.0.0.1", made.port, TOKEN, LONG)
    yield made, mine
    mine.close()
    made.close()


def serves(mine: KvStore) -> None:
    """Assert that the store works."""
    stamp = str(time.monotonic())
    mine.set("mine", stamp)
    assert mine.get("mine") == stamp.encode()


@given(data=some.binary(max_size=120) | some.sampled_from(SAYINGS).flatmap(mutated))
@SOCKETS
def test_a_caller_without_the_token_gets_no_answer(server: tuple[KvServer, KvStore], data: bytes) -> None:
    """Unless it sends the token after all."""
    made, mine = server
    received = speak(made.port, data)
    assert not received or data.startswith(HELLO)
    serves(mine)


@given(said=some.lists(some.sampled_from(SAYINGS) | some.sampled_from(SAYINGS).flatmap(mutated) | some.binary(max_size=40), max_size=6))
@SOCKETS
def test_a_client_that_sends_garbage_loses_only_its_own_connection(server: tuple[KvServer, KvStore], said: list[bytes]) -> None:
    """Unknown verbs, missing parts, wrong lengths."""
    made, mine = server
    speak(made.port, HELLO + b"".join(said))
    serves(mine)


def test_a_caller_without_the_token_cannot_make_the_server_store_megabytes(server: tuple[KvServer, KvStore]) -> None:
    """An announced frame that is too long is refused before it arrives."""
    made, mine = server
    before = memory()
    with socket.create_connection(("127.0.0.1", made.port), timeout=60) as line:
        line.sendall(struct.pack("!IBI", kv_store.MAX_FRAME - 1, Verb.SET, 1))
        with contextlib.suppress(ConnectionError):  # the connection is closed
            for _ in range(64):
                line.sendall(bytes(1 << 20))
            pytest.fail("all of it was received")
    serves(mine)
    assert memory() - before < 32 * 2**20


def test_too_many_unauthenticated_callers_keep_no_client_out(server: tuple[KvServer, KvStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped; a client with the token is accepted among them."""
    made, mine = server
    monkeypatch.setattr(token_server, "MAX_UNAUTHENTICATED", 20)
    with contextlib.ExitStack() as lines:
        idle = [lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=60)) for _ in range(60)]
        late = KvStore("127.0.0.1", made.port, TOKEN, LONG)
        serves(late)
        late.close()
        assert idle[0].recv(1) == b""  # closed
        wait_until(lambda: len(made._pending) <= 20, seconds=60)
    serves(mine)


def test_unauthenticated_callers_are_dropped_after_their_time(server: tuple[KvServer, KvStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no other caller comes."""
    made, mine = server
    monkeypatch.setattr(token_server, "HELLO_SECONDS", 0.3)
    with contextlib.ExitStack() as lines:
        idle = [lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=60)) for _ in range(3)]
        assert [line.recv(1) for line in idle] == [b""] * 3
    serves(mine)


@pytest.mark.parametrize("of", ["store", "acceptor"])
def test_many_unauthenticated_callers_cost_no_threads_and_few_descriptors(
    of: str, server: tuple[KvServer, KvStore], acceptor: PeerAcceptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They connect at once and stay; a moment later few are left, long before the time for a hello is over."""
    monkeypatch.setattr(token_server, "HELLO_SECONDS", 1000.0)
    made: KvServer | PeerAcceptor = server[0] if of == "store" else acceptor
    threads, seen = threading.active_count(), list[int]()

    def few() -> bool:
        seen.append(threading.active_count())
        return len(made._pending) <= token_server.MAX_UNAUTHENTICATED

    with contextlib.ExitStack() as lines:
        for _ in range(2 * BURST):
            lines.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=60))
            assert len(made._pending) <= BURST + 1
        wait_until(few, seconds=60)
        assert max(seen) <= threads
    (serves(server[1]) if of == "store" else lets_in(acceptor, 5))


# -- the desk -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def acceptor() -> Iterator[PeerAcceptor]:
    """Return an acceptor for other ranks."""
    made = PeerAcceptor(TOKEN)
    yield made
    made.close()


def lets_in(acceptor: PeerAcceptor, incarnation: int) -> None:
    """Assert that the acceptor accepts a rank."""
    with call(("127.0.0.1", acceptor.port), TOKEN, 3, incarnation) as line:
        found: list[socket.socket] = []

        def there() -> bool:
            if (one := acceptor.fetch(3, incarnation)) is not None:
                found.append(one)
            return bool(found)

        wait_until(there, seconds=60)
        found[0].close()
        assert line.fileno() >= 0


def knock(body: bytes, length: int | None = None) -> bytes:
    """Return a hello as a frame."""
    return control_tree._HEAD.pack(0, 0, control_tree._HELLO, len(body) if length is None else length) + body


HELLOS: Final = some.dictionaries(some.sampled_from(("token", "rank", "incarnation")), ANYTHING | some.just(TOKEN)).map(
    lambda message: knock(json.dumps(message).encode())
)


@given(data=some.binary(max_size=80) | HELLOS | mutated(knock(json.dumps({"token": TOKEN, "rank": 1, "incarnation": 1}).encode())))
@SOCKETS
def test_an_acceptor_accepts_the_next_rank_whatever_callers_send(acceptor: PeerAcceptor, data: bytes) -> None:
    """And no thread ends with a traceback, which pytest would report as an error."""
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=60) as line:
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
def test_an_unusual_hello_is_rejected(acceptor: PeerAcceptor, body: bytes) -> None:
    """Nesting up to the interpreter's limit, infinite numbers."""
    assert speak(acceptor.port, knock(body)) == b""
    lets_in(acceptor, 2)


def test_a_caller_that_sends_a_byte_now_and_then_is_dropped(acceptor: PeerAcceptor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for the complete hello, not for each byte; an acceptor full of such callers accepts the next rank."""
    monkeypatch.setattr(token_server, "HELLO_SECONDS", 1.0)
    monkeypatch.setattr(token_server, "MAX_UNAUTHENTICATED", 10)
    with contextlib.ExitStack() as lines:
        slow = [lines.enter_context(socket.create_connection(("127.0.0.1", acceptor.port), timeout=60)) for _ in range(30)]
        lets_in(acceptor, 3)

        def gone() -> bool:
            with contextlib.suppress(ConnectionError):
                slow[-1].sendall(b"\0")
            return not acceptor._pending

        wait_until(gone, seconds=60)
    lets_in(acceptor, 4)
