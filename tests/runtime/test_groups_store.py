"""The key-value store: torch's interface, waits that do not block others, and ends that release all waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.runtime.groups.control_tree import PeerAcceptor, call
from holdfast.runtime.groups.kv_store import KvServer, KvStore
from holdfast.runtime.groups.nccl import native_store
from holdfast.runtime.peer_errors import is_late_peer, is_peer_loss
from tests.waiting import wait_until

TOKEN = "ab" * 16
LONG = timedelta(seconds=60)


@pytest.fixture
def server() -> Iterator[KvServer]:
    """Host a store."""
    made = KvServer(0, TOKEN)
    yield made
    made.close()


@pytest.fixture
def connect(server: KvServer) -> Iterator[Callable[..., KvStore]]:
    """Return a function that connects to it."""
    made: list[KvStore] = []

    def make(timeout: timedelta = LONG) -> KvStore:
        made.append(KvStore("127.0.0.1", server.port, TOKEN, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prefixed(store: KvStore) -> Any:
    """Return *store* behind torch's own prefixes, whose stubs lack half of the interface."""
    return dist.PrefixStore("a", dist.PrefixStore("b", store))


def test_it_implements_the_interface_of_torch_stores(connect: Callable[..., KvStore]) -> None:
    """Through torch's own prefixes, as process groups use it, over two connections."""
    mine, theirs = (prefixed(connect()) for _ in range(2))
    mine.set("text", "words")
    mine.set("bytes", bytes(range(256)))
    assert (theirs.get("text"), theirs.get("bytes")) == (b"words", bytes(range(256)))
    assert (mine.add("count", 3), theirs.add("count", -1)) == (3, 2)
    assert (theirs.check(["text", "count"]), theirs.check(["text", "nothing"])) == (True, False)
    assert mine.compare_set("lock", "", "me") == b"me"
    assert theirs.compare_set("lock", "", "you") == b"me"
    assert theirs.compare_set("lock", "me", "you") == b"you"
    mine.append("list", "a")
    theirs.append("list", "b")
    mine.multi_set(["one", "two"], ["1", "2"])
    assert theirs.multi_get(["two", "one", "list"]) == [b"2", b"1", b"ab"]
    assert theirs.has_extended_api()
    keys = mine.num_keys()
    assert (mine.delete_key("one"), mine.delete_key("one"), mine.num_keys()) == (True, False, keys - 1)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_stores_and_acceptors_can_be_reached_by_ipv6(server: KvServer, connect: Callable[..., KvStore]) -> None:
    """A rank publishes the address that it connected from; others can call it, and so can torch's own store."""
    store, acceptor = KvStore("::1", server.port, TOKEN, LONG), PeerAcceptor(TOKEN)
    store.set("acceptor", f"{store.host} {acceptor.port}")
    host, port = connect().get("acceptor").decode().split()
    assert host == "::1"
    caller = call((host, int(port)), TOKEN, 3, 1)
    let_in = wait_until(lambda: acceptor.fetch(3, 1), seconds=60)
    assert let_in is not None
    made = native_store(store, LONG, host=host, serving=True)
    made.set("word", "said")
    assert native_store(connect(), LONG, host="", serving=False).get("word") == b"said"
    for one in (caller, let_in, acceptor, store):
        one.close()


def test_missing_values_are_waited_for(connect: Callable[..., KvStore]) -> None:
    """By many threads on one connection, each for another key, while others read and write on it."""
    mine, theirs = connect(), connect()
    with ThreadPoolExecutor(20) as pool:
        found = [pool.submit(mine.get, f"key-{number}") for number in range(19)]
        all_of_them = pool.submit(mine.wait, [f"key-{number}" for number in range(19)])
        mine.set("other", "x")
        assert mine.get("other") == b"x"
        for number in reversed(range(19)):
            assert not all_of_them.done()
            theirs.set(f"key-{number}", str(number))
        assert [one.result(60) for one in found] == [str(number).encode() for number in range(19)]
        assert all_of_them.result(60) is None


def test_large_values_pass(connect: Callable[..., KvStore]) -> None:
    """Larger than any buffer, in both directions at once."""
    stores = [connect() for _ in range(4)]
    values = [bytes([number]) * (3_000_000 + number) for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(stores[number - 1].get, f"large-{number}") for number in range(4)]
        for number in range(4):
            pool.submit(stores[number].set, f"large-{number}", values[number])
        assert [one.result(60) for one in found] == values


def test_a_wait_ends_when_its_time_is_up(connect: Callable[..., KvStore]) -> None:
    """With torch's own error; the connection stays usable."""
    store = connect(timedelta(milliseconds=30))
    with pytest.raises(dist.DistStoreError, match=r"wait timeout.*never") as raised:
        store.get("never")
    assert is_late_peer(raised.value)
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(milliseconds=30))
    patient = store.with_timeout(LONG)
    patient.set("now", "x")
    assert patient.get("now") == b"x"


def test_a_store_with_a_longer_timeout_waits_until_it_or_until_the_generation_ends(connect: Callable[..., KvStore]) -> None:
    """Over the same connection; the end of a generation ends earlier waits, and no later ones."""
    store, other = connect(timedelta(milliseconds=30)), connect()
    prefixed = dist.PrefixStore("prefixed", store.with_timeout(timedelta(seconds=60)))
    with ThreadPoolExecutor(2) as hands:
        value, never = hands.submit(prefixed.get, "value"), hands.submit(prefixed.get, "never")
        with pytest.raises(dist.DistStoreError):
            store.get("prefixed/value")
        assert not value.done()
        other.set("prefixed/value", "x")
        assert value.result(60) == b"x"
        assert not never.done()
        store.end_long_waits("the controller ended generation 1")
        with pytest.raises(dist.DistNetworkError, match="generation 1"):
            never.result(60)
    assert store.with_timeout(timedelta(seconds=60)).get("prefixed/value") == b"x"


@pytest.mark.parametrize("end", ["ours", "the server's"])
def test_the_end_of_a_connection_ends_all_waits_in_it(server: KvServer, connect: Callable[..., KvStore], end: str) -> None:
    """With an error that counts as a lost peer."""
    store, errors = connect(), list[BaseException]()

    def wait(number: int) -> None:
        try:
            store.get(f"never-{number}")
        except dist.DistNetworkError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    store.set("asked", "")
    if end == "ours":
        store.close()
    else:
        server.close()
    for one in threads:
        one.join(60)
    assert len(errors) == len(threads)
    assert all(map(is_peer_loss, errors))
    assert store.error
    with pytest.raises(dist.DistNetworkError):
        store.set("later", "x")


def test_callers_without_the_token_are_rejected(server: KvServer, connect: Callable[..., KvStore]) -> None:
    """With another token, or with garbage; no other client notices."""
    store = connect()
    with pytest.raises(OSError, match=r"closed|reset"):
        KvStore("127.0.0.1", server.port, "cd" * 16, LONG)
    for nonsense in (b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\x05\x01\0\0\0\x01hello", b"\0" * 9):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
            line.sendall(nonsense)
            line.shutdown(socket.SHUT_WR)
            assert line.recv(100) == b""
    store.set("a", "x")
    assert store.get("a") == b"x"


def test_a_port_in_use_is_not_a_lost_peer(server: KvServer) -> None:
    """It is an error of the host itself."""
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE") as raised:
        KvServer(server.port, TOKEN)
    assert not is_peer_loss(raised.value)


def test_a_server_that_ends_frees_its_port(server: KvServer) -> None:
    """The next generation may host there."""
    server.close()
    made: list[KvServer] = []

    def again() -> bool:
        try:
            made.append(KvServer(server.port, TOKEN))
        except dist.DistNetworkError:
            return False
        return True

    wait_until(again, seconds=60)
    made[0].close()


def test_a_hundred_clients_connect_at_once(server: KvServer) -> None:
    """Each writes a value and finds those of all others."""
    count = 100

    def rank(number: int) -> int:
        store = KvStore("127.0.0.1", server.port, TOKEN, LONG)
        store.set(f"rank-{number}", "here")
        store.wait([f"rank-{other}" for other in range(count)])
        total = store.add("done", 1)
        store.close()
        return total

    with ThreadPoolExecutor(count) as pool:
        assert sorted(pool.map(rank, range(count))) == list(range(1, count + 1))
