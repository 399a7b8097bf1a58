"""The port of a node's memory: strangers, and those who know the token and say anything, harm nobody."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.connection import ABANDON, DATA, FRAME, HELLO, TAIL, connect
from holdfast.memstore.reader import RemoteMemstore
from tests.agent.memory_rig import TOKEN, MemoryNode, Writer, label_of, noise
from tests.fuzz.examples import ANYTHING, SLOW, SOCKETS, mutated

SOURCE: Final = store_folders.key_of("elsewhere")
LABEL: Final = asdict(label_of(7, noise(100)))
ORDERS: Final = some.builds(
    lambda verb, facts: {**facts, "do": verb},
    some.sampled_from(("labels", "get", "puts")) | ANYTHING,
    some.dictionaries(some.sampled_from(("name", "step", "lineage", "digest", "source", "rank", "label")), ANYTHING),
)
LABELS: Final = some.builds(lambda facts: {**LABEL, **facts}, some.dictionaries(some.sampled_from(sorted(LABEL)), ANYTHING, min_size=1))


@pytest.fixture(scope="module")
def node() -> Iterator[MemoryNode]:
    """Give a node with one whole snapshot in its memory."""
    made = MemoryNode("fuzzed", limit=2**24).begin()
    writer = Writer(made)
    writer.snapshot(7, noise(1000))
    yield made
    writer.close()
    made.end()


def unharmed(node: MemoryNode) -> None:
    """Assert that the server lives, serves the job, and that what looks whole is whole."""
    assert node.process is not None
    assert node.process.poll() is None
    assert "rank-00003.0.snap" in RemoteMemstore(node.address, TOKEN, labels_seconds=60).labels()
    node.verify()


def packed(message: object) -> bytes:
    """Return a message as it travels."""
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


@given(data=some.binary(max_size=200))
@SOCKETS
def test_a_stranger_learns_nothing(node: MemoryNode, data: bytes) -> None:
    """But who is asked: the server's own number."""
    with socket.create_connection(node.address, timeout=60) as line, contextlib.suppress(ConnectionError):
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        received = b""
        while more := line.recv(4096):
            received += more
        assert received[: len(HELLO)] == HELLO
        assert len(received) == len(HELLO) + 32
    unharmed(node)


def say(node: MemoryNode, data: bytes) -> None:
    """Come in as one who knows the token, send *data* and read whatever comes."""
    with connect(node.address, TOKEN, seconds=60) as line, contextlib.suppress(OSError):
        line.socket.sendall(data)
        line.socket.shutdown(socket.SHUT_WR)
        while line.socket.recv(65536):
            pass


@given(orders=some.lists(ORDERS.map(packed) | ORDERS.map(packed).flatmap(mutated) | some.binary(max_size=20), min_size=1, max_size=3))
@SLOW
def test_a_node_gone_mad_is_refused(node: MemoryNode, orders: list[bytes]) -> None:
    """Orders with fields of any type, half ones, lengths that lie."""
    say(node, b"".join(orders))
    unharmed(node)


@given(label=LABELS, frames=some.lists(some.tuples(some.sampled_from((DATA, TAIL, ABANDON, b"?")), some.binary(max_size=60)), max_size=4))
@SLOW
def test_a_replica_that_is_none_is_not_kept(node: MemoryNode, label: dict[str, Any], frames: list[tuple[bytes, bytes]]) -> None:
    """Labels with numbers of any size and kind, tails that belong to nothing."""
    body = b"".join(FRAME.pack(kind, len(data)) + data for kind, data in frames)
    say(node, packed({"do": "puts", "source": SOURCE, "rank": 3}) + packed({"label": label}) + body)
    assert node.copies() == []
    unharmed(node)


def test_an_index_that_would_be_dealt_out_for_ever_is_refused(node: MemoryNode) -> None:
    """A few bytes that speak of exabytes in slices of one byte: whoever believed them would be busy, and out of memory."""
    label = replace(label_of(9, b"x"), slice_bytes=1)
    head = json.dumps({"entries": [["w", [2**60], "uint8", 2**60]], "blobs": {}}).encode()
    tail = struct.pack("<QQ", 8, len(head)) + struct.pack("<Q", 0) + head
    whole = replace(label, tail=len(tail), digest=hashlib.sha256(tail).hexdigest())
    body = FRAME.pack(DATA, 1) + b"x" + FRAME.pack(TAIL, len(tail)) + packed(asdict(whole)) + tail
    say(node, packed({"do": "puts", "source": SOURCE, "rank": 3}) + packed({"label": asdict(label)}) + body)
    assert node.copies() == []
    unharmed(node)


@given(index=ANYTHING | some.fixed_dictionaries({"entries": some.lists(some.lists(ANYTHING, max_size=5), max_size=2), "blobs": ANYTHING}))
@SOCKETS
def test_an_index_of_any_kind_is_read_or_refused(index: object) -> None:
    """Its digest may fit: who wrote it may be anybody who knows the token."""
    head = json.dumps(index).encode()
    tail = struct.pack("<QQ", 8, len(head)) + struct.pack("<Q", 0) + head
    label = replace(label_of(9, b"x"), tail=len(tail), digest=hashlib.sha256(tail).hexdigest())
    with contextlib.suppress(shared_memory.UnusableSnapshot):
        shared_memory.parse_tail(tail, label)
