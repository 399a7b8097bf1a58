"""What a memory server gives, to whom, and what it takes: nothing of it is ever a broken snapshot."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.memstore.server.handler import MAX_UNAUTHENTICATED
from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.connection import DATA, FRAME, HELLO, NONCE, TAIL, MemstoreConnection, connect
from holdfast.memstore.reader import RemoteMemstore
from holdfast.memstore.shared_memory import PAGE, Snapshot, UnusableSnapshot
from tests.agent.memory_rig import SECONDS, TOKEN, MemoryNode, Writer, label_of, noise
from tests.waiting import wait_until

DATA_SIZE = 3 * 2**20 + 12345
SOURCE = store_folders.key_of("elsewhere")


@pytest.fixture
def node(make: Callable[..., MemoryNode]) -> MemoryNode:
    """Give a node."""
    return make("here")


def test_complete_snapshots_are_listed_and_sent(node: MemoryNode, tmp_path: Path) -> None:
    """A draft is neither."""
    writer = Writer(node)
    label = writer.snapshot(7, noise(DATA_SIZE))
    writer.begin(8, noise(100))
    assert RemoteMemstore(node.address, TOKEN).labels() == {"rank-00003.0.snap": label}
    RemoteMemstore(node.address, TOKEN).fetch("rank-00003.0.snap", label, tmp_path / "got.snap")
    with Snapshot(tmp_path / "got.snap") as got:
        got.verify()
        assert (got.label, bytes(got.data), got.blobs) == (label, noise(DATA_SIZE), {"rng": b"some state"})
    writer.close()


def test_an_empty_snapshot_is_sent(node: MemoryNode, tmp_path: Path) -> None:
    """A rank may hold nothing but small things."""
    writer = Writer(node)
    label = writer.snapshot(7, b"")
    RemoteMemstore(node.address, TOKEN).fetch("rank-00003.0.snap", label, tmp_path / "got.snap")
    with Snapshot(tmp_path / "got.snap") as got:
        assert (got.label, got.blobs) == (label, {"rng": b"some state"})
    writer.close()


@pytest.mark.parametrize("change", [{"step": 8}, {"lineage": 2}, {"digest": "0" * 64}, {"size": 1}, {"tail": 1}, {"rank": 4}], ids=str)
def test_only_the_requested_snapshot_is_accepted(node: MemoryNode, tmp_path: Path, change: dict[str, int]) -> None:
    """Its worker may have written the next one there since the label was read."""
    writer = Writer(node)
    label = replace(writer.snapshot(7, noise(1000)), **change)  # type: ignore[arg-type]
    with pytest.raises((OSError, UnusableSnapshot)):
        RemoteMemstore(node.address, TOKEN).fetch("rank-00003.0.snap", label, tmp_path / "got.snap")
    assert not (tmp_path / "got.snap").exists()
    writer.close()


@pytest.mark.parametrize("name", ["../../../etc/passwd", "rank-00009.0.snap", "", "bell", "..snap", "a/b.snap", "port"])
def test_no_name_leads_out_of_the_memory_store(node: MemoryNode, tmp_path: Path, name: str) -> None:
    """Nor to what is no snapshot."""
    writer = Writer(node)
    label = writer.snapshot(7, b"data")
    with pytest.raises(OSError, match=r"called|sent"):
        RemoteMemstore(node.address, TOKEN).fetch(name, label, tmp_path / "got.snap")
    writer.close()


# -- strangers ------------------------------------------------------------------------------------------------------------


def test_a_client_without_the_token_is_rejected(node: MemoryNode) -> None:
    """Neither lists nor files nor space."""
    with pytest.raises(PermissionError):
        RemoteMemstore(node.address, "another job's secret").labels()
    with pytest.raises(PermissionError):
        RemoteMemstore(node.address, "").fetch("rank-00003.0.snap", label_of(1, b""), Path("/nowhere"))


def test_a_client_rejects_a_server_without_the_token() -> None:
    """One that listens where ours was, and echoes what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(HELLO + bytes(NONCE))
                sock.sendall(sock.recv(1000)[NONCE:])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PermissionError):
            RemoteMemstore(impostor.getsockname(), TOKEN).labels()
        thread.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"x" * 100_000, HELLO * 8, b'{"do":"labels"}\n' * 20])
def test_garbage_gets_a_greeting_and_nothing_else(node: MemoryNode, said: bytes) -> None:
    """And the next one is served."""
    with socket.create_connection(node.address, timeout=SECONDS) as sock:
        with suppress(OSError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionResetError):
            while data := sock.recv(4096):
                received += data
    assert len(received) <= len(HELLO) + NONCE
    assert RemoteMemstore(node.address, TOKEN).labels() == {}


def test_many_silent_clients_do_not_block_the_job(node: MemoryNode) -> None:
    """Far more than are borne with at once; each is hung up on, the oldest first."""
    silent = [socket.create_connection(node.address, timeout=SECONDS) for _ in range(3 * MAX_UNAUTHENTICATED)]
    assert RemoteMemstore(node.address, TOKEN).labels() == {}
    for sock in silent:
        received = b""
        with sock, suppress(ConnectionResetError):
            while data := sock.recv(4096):
                received += data
        assert len(received) <= len(HELLO) + NONCE
    assert RemoteMemstore(node.address, TOKEN).labels() == {}


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x02\0\0\0{{", b"\x02\0\0\0{}", b'\x0c\0\0\0{"do":"melt"}'])
def test_malformed_requests_of_a_member_harm_nobody(node: MemoryNode, said: bytes) -> None:
    """Another version, or a defect of ours."""
    with connect(node.address, TOKEN, seconds=SECONDS) as line:
        line.socket.sendall(said)
        line.socket.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while line.socket.recv(4096):
                pass
    assert RemoteMemstore(node.address, TOKEN).labels() == {}


def test_a_server_that_stops_sending_times_out(tmp_path: Path) -> None:
    """Whoever recovers has other places to ask."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError):
            RemoteMemstore(silent.getsockname(), TOKEN, labels_seconds=0.2).labels()
        with pytest.raises(TimeoutError):
            RemoteMemstore(silent.getsockname(), TOKEN, stall_seconds=0.2).fetch("rank-00003.0.snap", label_of(1, b""), tmp_path / "x.snap")


# -- half of it -----------------------------------------------------------------------------------------------------------


class Recorded:
    """All that is said to a server to put one replica there, to be said again up to any byte."""

    def __init__(self, node: MemoryNode, step: int = 7) -> None:
        writer = Writer(node, rank=9)
        self.bytes = noise(3 * PAGE + 77, step)
        self.label = writer.snapshot(step, self.bytes)
        with Snapshot(writer.slot.path) as snapshot:
            self.tail = os.pread(snapshot.fileno(), self.label.tail, PAGE + self.label.size)
        writer.close()
        for slot in writer.slots:
            slot.path.unlink()

    def say(self, line: MemstoreConnection, cut: int | None = None, *, draft: bool = True) -> bool:
        """Put it, up to byte *cut* of what follows the first answer; return whether the server has said that it is whole."""
        line.send({"do": "puts", "source": SOURCE, "rank": 3})
        assert line.receive()["ok"]
        line.send({"label": asdict(replace(self.label, digest="") if draft else self.label)})
        answer = line.receive()
        if not answer["ok"]:
            return bool(answer["have"])
        line.socket.sendall(self.stream()[:cut])
        return cut is None and line.receive()["ok"] is True

    def stream(self) -> bytes:
        """Return all that is said after the first answer."""
        parts = [self.bytes[begin : begin + 5000] for begin in range(0, len(self.bytes), 5000)]
        frames = [FRAME.pack(DATA, len(part)) + part for part in parts]
        label = json.dumps(asdict(self.label)).encode()
        return b"".join([*frames, FRAME.pack(TAIL, len(self.tail)), struct.pack("<I", len(label)), label, self.tail])


def cuts(recorded: Recorded) -> list[int]:
    """Return the places to cut: all around each end of a part, and some in between."""
    length, tail = len(recorded.stream()), len(recorded.tail)
    every = {*range(0, length, 997)}
    for begin in range(0, len(recorded.bytes) + 5000, 5000):
        every |= {begin + number * FRAME.size for number in range(4)}
    every |= {length - back for back in (1, 2, 50, tail - 1, tail, tail + 1)}
    return sorted(cut for cut in every if 0 <= cut < length)


def test_a_replica_is_accepted_complete_and_only_once(node: MemoryNode) -> None:
    """Once it is here, asking again costs a message."""
    recorded = Recorded(node)
    for draft in (True, False):
        with connect(node.address, TOKEN, seconds=SECONDS) as line:
            assert recorded.say(line, draft=draft)
    assert node.copies() == [recorded.label]
    node.verify()


def test_a_put_that_ends_at_any_byte_leaves_nothing(node: MemoryNode) -> None:
    """The connection ends there; the next one begins anew and is taken."""
    recorded = Recorded(node)
    points = cuts(recorded)
    assert len(points) > 20
    for cut in points:
        with connect(node.address, TOKEN, seconds=SECONDS) as line:
            assert not recorded.say(line, cut)
        assert node.copies() == [], cut
    wait_until(lambda: put_now(node, recorded), seconds=SECONDS)
    assert node.copies() == [recorded.label]
    node.verify()


def put_now(node: MemoryNode, recorded: Recorded) -> bool:
    """Put it whole; return whether it was taken: a slot may not be free yet from a connection that has ended."""
    with connect(node.address, TOKEN, seconds=SECONDS) as line:
        return recorded.say(line)


def test_a_server_that_is_killed_at_any_byte_leaves_nothing_that_looks_complete(make: Callable[..., MemoryNode]) -> None:
    """Its successor finds the same memory store, and takes the replica."""
    node = make("here")
    recorded = Recorded(node)
    for cut in cuts(recorded)[::2]:
        line = connect(node.address, TOKEN, seconds=SECONDS)
        recorded.say(line, cut)
        node.kill()
        line.close()
        assert node.copies() == [], cut
        node.begin()
    assert put_now(node, recorded)
    node.verify()


@pytest.mark.parametrize(
    "damage",
    [
        lambda recorded: setattr(recorded, "tail", recorded.tail[:-1] + b"\0"),
        lambda recorded: setattr(recorded, "bytes", recorded.bytes + b"more"),
        lambda recorded: setattr(recorded, "bytes", recorded.bytes[:-1]),
        lambda recorded: setattr(recorded, "tail", recorded.tail + b"more"),
    ],
)
def test_a_replica_that_does_not_fit_its_label_is_not_sealed(node: MemoryNode, damage: Callable[[Recorded], None]) -> None:
    """Too short, too long, another tail."""
    recorded = Recorded(node)
    damage(recorded)
    with connect(node.address, TOKEN, seconds=SECONDS) as line, suppress(OSError):
        assert not recorded.say(line)
    assert node.copies() == []


# -- no more than there is room for ---------------------------------------------------------------------------------------

ROOM = 2**20


@pytest.fixture
def small(make: Callable[..., MemoryNode]) -> MemoryNode:
    """Give a node that may keep 1 MiB."""
    return make("small", limit=ROOM)


def replica(data: int, blob: int, step: int = 7) -> tuple[shared_memory.Label, bytes, bytes]:
    """Return a sealed label, the data and the tail of a snapshot of one tensor and one small thing of these sizes."""
    whole, index = noise(data), json.dumps({"entries": [["w", [data], "uint8", data]], "blobs": {"rng": blob}}).encode()
    sums = struct.pack("<Q", shared_memory.word_sum(whole))
    tail = struct.pack("<QQ", len(sums), len(index)) + sums + index + bytes(blob)
    return replace(label_of(step, whole), tail=len(tail), digest=hashlib.sha256(tail).hexdigest()), whole, tail


def offer(line: MemstoreConnection, label: shared_memory.Label, rank: int = 3) -> dict[str, Any]:
    """Offer a replica that is not whole yet; return the answer."""
    line.send({"do": "puts", "source": SOURCE, "rank": rank})
    assert line.receive()["ok"]
    line.send({"label": asdict(replace(label, digest=""))})
    return line.receive()


def finish(line: MemstoreConnection, label: shared_memory.Label, data: bytes, tail: bytes) -> dict[str, Any]:
    """Send all of a replica; return what is said to that."""
    line.socket.sendall(FRAME.pack(DATA, len(data)) + data + FRAME.pack(TAIL, len(tail)))
    line.send(asdict(label))
    line.socket.sendall(tail)
    return line.receive()


def test_a_replica_whose_tail_has_no_room_is_rejected(small: MemoryNode) -> None:
    """What a script keeps beside its tensors lies in the tail."""
    label, _, _ = replica(4096, 8 * ROOM)
    with connect(small.address, TOKEN, seconds=SECONDS) as line:
        assert "do not fit" in offer(line, label)["why"]
    wait_until(lambda: small.events_named("memstore.full"), seconds=SECONDS)


def test_a_tail_longer_than_announced_is_rejected(small: MemoryNode) -> None:
    """Its bytes are not even waited for."""
    label, data, tail = replica(4096, 8 * ROOM)
    with connect(small.address, TOKEN, seconds=SECONDS) as line:
        assert offer(line, replace(label, tail=100))["ok"]
        with pytest.raises(OSError):
            finish(line, label, data, tail)
    assert small.copies() == []
    assert store_folders.usage(small.memstore) <= ROOM


def test_tails_that_are_still_to_come_are_counted(small: MemoryNode) -> None:
    """Many replicas that come in at once have their data there, and their tails nowhere yet."""
    label, data, tail = replica(4096, ROOM * 2 // 5)
    with ExitStack() as lines:
        begun = [lines.enter_context(connect(small.address, TOKEN, seconds=SECONDS)) for _ in range(3)]
        answers = [offer(line, label, rank) for rank, line in enumerate(begun)]
        assert [answer["ok"] for answer in answers] == [True, True, False]
        assert [finish(line, label, data, tail)["ok"] for line in begun[:2]] == [True, True]
        assert ROOM / 2 < store_folders.usage(small.memstore) <= ROOM
    small.verify()


def test_a_replica_without_room_is_not_completed(small: MemoryNode) -> None:
    """This node's own ranks come first, also those that begin meanwhile."""
    label, data, tail = replica(4096, ROOM // 2)
    own = Writer(small, rank=0)
    with connect(small.address, TOKEN, seconds=SECONDS) as line:
        assert offer(line, label)["ok"]
        own.snapshot(1, noise(ROOM // 4))
        assert "do not fit" in finish(line, label, data, tail)["why"]
        line.send({"label": asdict(replace(label, tail=100, digest=""))})  # the line goes on
        assert line.receive()["ok"] is True
    assert small.copies() == []
    own.close()


class Cutter:
    """A relay that ends both connections once so many bytes have come from the server."""

    def __init__(self, target: tuple[str, int], cut: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._target, self._left = target, cut
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listening.accept()
        far = socket.create_connection(self._target)
        back = threading.Thread(target=self._pump, args=(near, far), daemon=True)
        back.start()
        while self._left > 0 and (data := far.recv(min(self._left, 4096))):
            self._left -= len(data)
            near.sendall(data)
        for sock in (near, far):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        back.join()
        for sock in (near, far, self._listening):
            sock.close()

    @staticmethod
    def _pump(near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(4096):
                far.sendall(data)


def test_a_pull_that_ends_at_any_byte_leaves_nothing(node: MemoryNode, tmp_path: Path) -> None:
    """The other node may die while it gives."""
    writer = Writer(node)
    label = writer.snapshot(7, noise(3 * PAGE))
    whole = len(HELLO) + NONCE + 32 + PAGE + label.size + label.tail
    for cut in [*range(1, whole, 1499), whole - 1, whole]:  # and some bytes of the answer
        into = tmp_path / "got.snap"
        with pytest.raises(OSError):
            RemoteMemstore(Cutter(node.address, cut).address, TOKEN, stall_seconds=SECONDS).fetch("rank-00003.0.snap", label, into)
        assert not into.exists()
    writer.close()


def test_a_pull_writes_into_no_file_that_was_there(node: MemoryNode, tmp_path: Path) -> None:
    """Where there is no memory store it goes to a folder in which anybody may lay out links."""
    writer = Writer(node)
    label = writer.snapshot(7, noise(1000))
    victim, link = tmp_path / "victim", tmp_path / "got.snap"
    victim.write_text("precious")
    link.symlink_to(victim)
    for there in (link, victim):
        with pytest.raises(FileExistsError):
            RemoteMemstore(node.address, TOKEN).fetch("rank-00003.0.snap", label, there)
    assert (victim.read_text(), link.is_symlink()) == ("precious", True)
    writer.close()


def test_a_full_disk_ends_a_pull(node: MemoryNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All memory is taken before the first byte."""
    writer = Writer(node)
    label = writer.snapshot(7, noise(1000))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RemoteMemstore(node.address, TOKEN).fetch("rank-00003.0.snap", label, tmp_path / "got.snap")
    assert not (tmp_path / "got.snap").exists()
    writer.close()
