"""The format of in-memory snapshots: a file that is not exactly as it was written and sealed is rejected."""

from __future__ import annotations

import json
import os
import random
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.shared_memory import PAGE, Entry, Label, Slot, Snapshot, UnusableSnapshot, slices_of_part, word_sum

ENTRIES = [Entry("w", (5, 20), "float32", 400), Entry("b", (7,), "uint8", 7), Entry("none", (0,), "uint8", 0), Entry("c", (), "int64", 8)]
SIZES = [entry.size for entry in ENTRIES]
SLICE_BYTES = 100


def written(path: Path, *, part: int = 0, parts: int = 1, step: int = 7, seed: int = 0) -> Label:
    """Write a snapshot; return its label."""
    tensors = [random.Random(seed + at).randbytes(size) for at, size in enumerate(SIZES)]
    dealt = slices_of_part(SIZES, part, parts, SLICE_BYTES)
    slices = [b"".join(tensors[one.tensor][one.begin : one.begin + one.length] for one in met) for met in dealt]
    data = b"".join(slices)
    facts: dict[str, Any] = {
        "world": 4,
        "shard": "p",
        "part": part,
        "parts": parts,
        "size": len(data),
        "slice_bytes": SLICE_BYTES,
        "time": 1.5,
    }
    label = Label(step=step, lineage=2, rank=3, **facts)
    slot = Slot(path)
    slot.begin(label)
    slot.data[:] = data
    slot.progress(len(data))
    sums = [word_sum(one) for one in slices]
    whole = slot.seal(label, sums, ENTRIES, {"rng": b"random", "empty": b""})
    slot.close()
    return whole


@pytest.mark.parametrize("slice_bytes", [1, SLICE_BYTES, shared_memory.SLICE_BYTES])
@pytest.mark.parametrize("blobs", [{}, {"rng": b"random", "empty": b"", 'a name of "many" lettérs': bytes(100_000)}])
def test_no_tail_is_longer_than_its_draft_announces(tmp_path: Path, slice_bytes: int, blobs: dict[str, bytes]) -> None:
    """A receiver reserves that much memory."""
    data = bytes(sum(SIZES))
    facts: dict[str, Any] = {"rank": 3, "world": 4, "shard": "p", "part": 0, "parts": 1, "slice_bytes": slice_bytes, "time": 1.5}
    limit = shared_memory.tail_limit(len(data), len(json.dumps(ENTRIES)), blobs, slice_bytes)
    slot = Slot(tmp_path / "a.snap")
    slot.begin(Label(step=1, lineage=1, size=len(data), tail=limit, **facts))
    sealed = slot.seal(Label(step=1, lineage=1, size=len(data), tail=limit, **facts), [0] * -(-len(data) // slice_bytes), ENTRIES, blobs)
    slot.close()
    assert len(json.dumps(ENTRIES)) + sum(map(len, blobs.values())) < sealed.tail <= limit


def is_whole(path: Path) -> bool:
    """Return whether a reader accepts the file."""
    try:
        with Snapshot(path) as snapshot:
            snapshot.verify()
    except (UnusableSnapshot, OSError):
        return False
    return True


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_was_written_is_read(tmp_path: Path, parts: int) -> None:
    """Every part of it, and together all of it."""
    tensors = [bytearray(size) for size in SIZES]
    for part in range(parts):
        label = written(tmp_path / "a.snap", part=part, parts=parts)
        with Snapshot(tmp_path / "a.snap") as snapshot:
            snapshot.verify()
            assert (snapshot.label, snapshot.entries, snapshot.blobs) == (label, ENTRIES, {"rng": b"random", "empty": b""})
            for met, data, _ in snapshot.slices():
                there = 0
                for one in met:
                    tensors[one.tensor][one.begin : one.begin + one.length] = data[there : there + one.length]
                    there += one.length
            del data  # a view of a snapshot prevents its file from being written
    assert [bytes(tensor) for tensor in tensors] == [random.Random(at).randbytes(size) for at, size in enumerate(SIZES)]


def parts_that_count(path: Path, label: Label) -> Iterator[int]:
    """Yield the offsets of all bytes with a meaning: the rest of the first page has none."""
    _, _, length, _ = struct.unpack_from("<8sQI32s", path.read_bytes())
    yield from range(struct.calcsize("<8sQI32s") + length)
    yield from range(PAGE, PAGE + label.size + label.tail)


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    """Label, data, sums, index, blobs: one bit, or all of them."""
    path = tmp_path / "a.snap"
    label = written(path)
    right = path.read_bytes()
    for at in parts_that_count(path, label):
        path.write_bytes(right[:at] + bytes([right[at] ^ 1 << (at % 8)]) + right[at + 1 :])
        assert not is_whole(path), f"byte {at} of {len(right)}"
    path.write_bytes(right)
    assert is_whole(path)


def test_every_lost_range_is_detected(tmp_path: Path) -> None:
    """Zeroes where something was, and a file that ends early."""
    path = tmp_path / "a.snap"
    label = written(path)
    right = path.read_bytes()
    for begin in range(0, len(right), 64):
        path.write_bytes(right[:begin] + bytes(len(right[begin : begin + 64])) + right[begin + 64 :])
        assert is_whole(path) is (
            path.read_bytes() == right or not any(begin <= at < begin + 64 for at in parts_that_count_in(right, label))
        )
    for end in range(0, len(right), 7):
        path.write_bytes(right[:end])
        assert not is_whole(path), end


def parts_that_count_in(right: bytes, label: Label) -> list[int]:
    """Return the same offsets, from a file's bytes."""
    _, _, length, _ = struct.unpack_from("<8sQI32s", right)
    head = struct.calcsize("<8sQI32s") + length
    return [*range(head), *range(PAGE, PAGE + label.size + label.tail)]


def test_a_writer_killed_between_any_two_writes_leaves_the_old_snapshot_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All writes to the file are replayed, up to each write, and up to each byte of the short ones."""
    path = tmp_path / "a.snap"
    written(path, step=7)
    before = path.read_bytes()
    done: list[tuple[int, bytes]] = []
    real = os.pwrite

    def recorded(file: int, data: bytes, offset: int) -> int:
        if len(done) and done[-1][1] == b"":
            done.append((PAGE, path.read_bytes()[PAGE:]))  # what came through the map meanwhile
        done.append((offset, bytes(data)))
        return real(file, data, offset)

    monkeypatch.setattr("os.pwrite", recorded)
    written(path, step=8, seed=99)
    monkeypatch.undo()
    after, torn = path.read_bytes(), tmp_path / "torn.snap"
    data = after[PAGE : PAGE + sum(SIZES)]
    begun = next(at for at, (offset, written_) in enumerate(done) if offset == 0 and written_.startswith(b"HFDRAFT"))
    writes = [*done[: begun + 1], (PAGE, data), *done[begun + 1 :]]
    assert len(writes) >= 7
    for count in range(len(writes) + 1):
        image = bytearray(before)
        for offset, shard in writes[:count]:
            image[offset : offset + len(shard)] = shard.ljust(len(image[offset : offset + len(shard)]), b"\0")[: len(shard)]
        for cut in cuts(writes[count][1]) if count < len(writes) else (0,):
            bytes_now = bytearray(image)
            if count < len(writes):
                offset, shard = writes[count]
                bytes_now[offset : offset + cut] = shard[:cut]
            torn.write_bytes(bytes_now)
            assert is_whole(torn) is (count == len(writes) or (count == 0 and cut == 0)), (count, cut)
    assert bytes(image) == after


def cuts(shard: bytes) -> list[int]:
    """Return how many bytes of a write may have been done: a processor writes eight at once, if they are aligned."""
    return [0] if len(shard) <= 8 else [0, *range(8, len(shard), max(8, len(shard) // 40 // 8 * 8))]


def test_a_file_is_not_read_while_written_and_not_written_while_read(tmp_path: Path) -> None:
    """Not even between the check and the first byte."""
    path = tmp_path / "a.snap"
    label = written(path)
    slot = Slot(path)
    with Snapshot(path):
        assert slot.busy()
        with pytest.raises(BlockingIOError):
            slot.begin(label)
        assert is_whole(path)
    assert not slot.busy()
    slot.begin(label)
    assert not slot.busy()
    with pytest.raises(BlockingIOError):
        Snapshot(path)
    slot.discard()
    with pytest.raises(UnusableSnapshot):
        Snapshot(path)
    slot.close()


def test_a_copy_is_sealed_only_with_the_tail_in_its_label(tmp_path: Path) -> None:
    """Another tail, or one for other sizes, is rejected."""
    label = written(tmp_path / "a.snap")
    raw = (tmp_path / "a.snap").read_bytes()
    data, tail = raw[PAGE : PAGE + label.size], raw[PAGE + label.size :]
    slot = Slot(tmp_path / "b.snap")
    slot.begin(replace(label, tail=0, digest=""))
    slot.data[:] = data
    for wrong in (tail[:-1], tail + b"\0", b"", bytes(len(tail))):
        with pytest.raises(UnusableSnapshot):
            slot.seal_copy(label, wrong)
    assert not is_whole(tmp_path / "b.snap")
    with pytest.raises(UnusableSnapshot, match="bytes of data"):
        slot.seal_copy(replace(label, size=label.size + 1), tail)
    slot.seal_copy(label, tail)
    slot.close()
    assert is_whole(tmp_path / "b.snap")


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"size": -1},
        {"parts": 0},
        {"part": 1},
        {"slice_bytes": 0},
        {"rank": "3"},
        {"digest": 5},
        {"surprise": 1},
        {"step": None},
    ],
)
def test_an_invalid_label_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Labels arrive from other nodes, too."""
    label = written(tmp_path / "a.snap")
    assert shared_memory.label_of(asdict(label)) == label
    with pytest.raises(UnusableSnapshot):
        shared_memory.label_of({**asdict(label), **change})
    for wrong in ("[]", "3", "{}", "{", "null", b"\xff"):
        with pytest.raises(UnusableSnapshot):
            shared_memory.label_of(wrong)


@given(st.lists(st.integers(0, 2000), max_size=8), st.integers(1, 6), st.integers(50, 700))
@settings(deadline=None)
def test_shares_cover_every_byte_once(sizes: list[int], parts: int, cut: int) -> None:
    """Each part is one range of whole elements, and none is more than two units larger than another."""
    dealt = [met for part in range(parts) for met in slices_of_part(sizes, part, parts, cut)]
    slices = [one for met in dealt for one in met]
    for tensor, size in enumerate(sizes):
        mine = sorted((one.begin, one.begin + one.length) for one in slices if one.tensor == tensor)
        assert all(end == begin for (_, end), (begin, _) in pairwise(mine))
        assert (mine[0][0], mine[-1][1]) == (0, size) if size else mine == []
    assert all(0 < sum(one.length for one in met) <= cut for met in dealt)
    loads = [sum(one.length for met in slices_of_part(sizes, part, parts, cut) for one in met) for part in range(parts)]
    assert max(loads) - min(loads) <= 2 * (min(cut, shared_memory.PAGE) + shared_memory.GRAIN)  # one at either end
    for part in range(1, parts):
        for one in next(iter(slices_of_part(sizes, part, parts, cut)), ())[:1]:
            assert one.begin % shared_memory.GRAIN == 0


@given(st.binary(max_size=3000))
@settings(deadline=None)
def test_a_checksum_follows_its_definition(data: bytes) -> None:
    """Every half word of 32 bits times an odd weight of its own, modulo 2**64."""
    first, second = (struct.unpack(f"<{shared_memory.SLICE_BYTES // 8}Q", row) for row in shared_memory.weights())
    assert {weight % 2 for weight in first + second} == {1}
    filled = data.ljust(-(-len(data) // 8) * 8, b"\0")
    halves = struct.unpack(f"<{len(filled) // 4}I", filled)
    by_half = [
        second[at // 2] + (first[at // 2] << 32) if at % 2 else first[at // 2] + (second[at // 2 - 1] << 32 if at else 0)
        for at in range(len(halves))
    ]
    assert word_sum(data) == sum(half * weight for half, weight in zip(halves, by_half, strict=True)) % 2**64


def test_ranges_longer_than_a_slice_are_distinguished() -> None:
    """The same two ranges, the other way round."""
    one, other = bytes(shared_memory.SLICE_BYTES - 8) + b"one half", bytes(shared_memory.SLICE_BYTES - 8) + b"other ha"
    assert word_sum(one + other) == (word_sum(one) * shared_memory.SPREAD + word_sum(other)) % 2**64
    assert word_sum(one + other) != word_sum(other + one)


PAGES = 6


def flipped(data: bytes, *bits: int) -> bytes:
    """Flip bits of *data*, counted from its begin."""
    whole = int.from_bytes(data, "little")
    for bit in bits:
        whole ^= 1 << bit
    return whole.to_bytes(len(data), "little")


def swapped(data: bytes, unit: int, one: int, other: int) -> bytes:
    """Let two units of so many bytes change places."""
    units = [data[at : at + unit] for at in range(0, len(data), unit)]
    units[one], units[other] = units[other], units[one]
    return b"".join(units)


def opposite(data: bytes, bit: int, one: int) -> list[int]:
    """Return the same *bit* of word *one* and of another word that has it the other way: one goes up, the other down, by as much."""
    value = struct.unpack_from("<Q", data, one * 8)[0] >> bit & 1
    for other in range(len(data) // 8):
        if struct.unpack_from("<Q", data, other * 8)[0] >> bit & 1 != value:
            return [one * 64 + bit, other * 64 + bit]
    raise AssertionError("all words alike")


DAMAGE: dict[str, Callable[[bytes, Callable[[int], int]], bytes]] = {
    "one bit": lambda data, pick: flipped(data, pick(len(data) * 8)),
    "two words change places": lambda data, pick: swapped(data, 8, pick(len(data) // 8), pick(len(data) // 8)),
    "two half words change places": lambda data, pick: swapped(data, 4, pick(len(data) // 4), pick(len(data) // 4)),
    "two pages change places": lambda data, pick: swapped(data, PAGE, pick(PAGES), pick(PAGES)),
    "everything moves on by a page": lambda data, _pick: data[PAGE:] + data[:PAGE],
    "a page is lost": lambda data, pick: data[: (lost := pick(PAGES) * PAGE)] + data[lost + PAGE :] + bytes(PAGE),
    "a page is zero": lambda data, pick: data[: (at := pick(PAGES) * PAGE)] + bytes(PAGE) + data[at + PAGE :],
    "a bit up and one down": lambda data, pick: flipped(data, *opposite(data, pick(64), pick(len(data) // 8))),
    "bit 63 of two words": lambda data, pick: flipped(data, *(pick(len(data) // 8) * 64 + 63 for _ in range(2))),
    "bit 63 of four words": lambda data, pick: flipped(data, *(pick(len(data) // 8) * 64 + 63 for _ in range(4))),
    "bit 63 of words a page apart": lambda data, pick: flipped(data, *((at := pick(PAGE // 8)) * 64 + 63, (at + PAGE // 8) * 64 + 63)),
    "a stuck data line": lambda data, pick: bytes(
        byte | mask for byte, mask in zip(data, (1 << pick(8), 0, 0, 0) * (len(data) // 4), strict=True)
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=25)
def test_damage_changes_the_checksum(kind: str, seed: int) -> None:
    """Whatever a bad memory cell, a bad data line or a wrong address does to a slice."""
    order = random.Random(seed)
    data = order.randbytes(PAGES * PAGE)
    damaged = DAMAGE[kind](data, order.randrange)
    assert len(damaged) == len(data)
    assert damaged == data or word_sum(damaged) != word_sum(data)


def test_a_snapshot_of_an_older_format_is_refused_by_its_format(tmp_path: Path) -> None:
    """Its checksums have another meaning; it is not damaged."""
    written(tmp_path / "a.snap")
    with (tmp_path / "a.snap").open("r+b") as file:
        file.write(b"HFSEALED")
    with pytest.raises(UnusableSnapshot, match=r"format .*\(2\)"):
        Snapshot(tmp_path / "a.snap")


def test_memory_stores_are_separate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By node and job; a node finds its own."""
    monkeypatch.setenv("HOLDFAST_MEMSTORE_ROOT", str(tmp_path))
    places = [store_folders.memstore_of(node, job) for node in ("a", "b") for job in ("x", "y")]
    assert len(set(places)) == 4
    for place in places:
        store_folders.make(place)
    (places[0] / "file").write_bytes(bytes(8192))
    assert store_folders.usage(places[0]) >= 8192
    assert store_folders.memstores_of("a") == sorted(places[:2])
    store_folders.wipe(places[0])
    assert store_folders.memstores_of("a") == [places[1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_created_first_by_another_user_does_not_prevent_memory_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a link, nor many with similar names; all processes find the same folder, and the other user's are not touched."""
    monkeypatch.setenv("HOLDFAST_MEMSTORE_ROOT", str(tmp_path))
    tmp_path.chmod(0o1777)
    theirs = tmp_path / f"holdfast-{os.getuid()}"
    theirs.mkdir(mode=0o777)
    for like in (theirs, tmp_path / f"{theirs.name}.0", tmp_path / f"{theirs.name}.{0:020}-x"):
        like.mkdir(exist_ok=True)
        os.chown(like, 65534, 65534)
    place = store_folders.memstore_of("node", "job")
    store_folders.make(place)
    assert stat.S_IMODE(place.parent.stat().st_mode) == stat.S_IMODE(place.stat().st_mode) == 0o700
    command = "import os; from holdfast.memstore import store_folders as m; m.make(m.memstore_of('other', 'job')); print(m.root())"
    completed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert completed.stdout.strip() == str(store_folders.root()) == str(place.parent)
    assert store_folders.memstores_of("node") == [place]
    assert list(theirs.iterdir()) == []
    store_folders.wipe(place)
    assert store_folders.memstores_of("node") == []
