"""The file format of in-memory snapshots: files that outlive the worker that writes them, and whose completeness can be checked.

A *memory store* is a folder on a memory file system that belongs to the node's agent. A snapshot is one file in it::

    page 0   magic: DRAFT while it is written, SEALED once it is complete; bytes written so far; the label and its SHA-256
    data     the bytes of the tensors (this rank's part of them), in slices
    tail     a 64-bit checksum of every slice (`word_sum`), the index of the tensors, and small values (blobs); the label has its SHA-256

The seal is written last: a kill at any point leaves a draft, which no reader accepts.
Standard library only: agents, the command line and training processes all read it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from holdfast.tensor_layout import contiguous, is_dense

FORMAT: Final = 2
"""Raised to 2 when checksums became position-dependent; it is part of the magic, so that an older snapshot is refused by name."""
PAGE: Final = 4096
SLICE_BYTES: Final = 2**20
"""Maximum bytes of a slice: copying one takes about 0.1 ms, so waiting for its end costs next to nothing."""
SUFFIX: Final = ".snap"
LARGEST: Final = 2**62
"""Upper bound of every number in a snapshot."""

_SEALED, _DRAFT, _BLANK = f"HFSEALD{FORMAT}".encode(), f"HFDRAFT{FORMAT}".encode(), bytes(8)
_ANY_FORMAT: Final = (b"HFSEAL", b"HFDRAFT")
"""How the magic of every format begins."""
_HEAD: Final = struct.Struct("<8sQI32s")
"""Magic, bytes of data written so far, length of the label, its SHA-256."""
_PROGRESS: Final = struct.Struct("<Q")
_MASK: Final = (1 << 64) - 1
_TAIL_HEAD: Final = 128
"""Maximum bytes of a tail without its table, index, names and blobs."""
_TAIL_PER_SLICE: Final = 64
"""Maximum bytes of a tail for each slice."""
REPLACED: Final = "a newer snapshot has replaced it"
"""The reason of an `UnusableSnapshot` whose file holds another snapshot by now."""


class UnusableSnapshot(Exception):
    """A snapshot that must not be used, and *why*."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Slice(NamedTuple):
    """Some bytes of one tensor: its number, the first byte, how many."""

    tensor: int
    begin: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a snapshot contains."""

    step: int
    """The step after which the state holds."""
    lineage: int
    """The generation that last went back to an earlier step: states of the same step but different lineages must not be mixed."""
    rank: int
    world: int
    shard: str
    """Name of the shard of the training state that the rank holds; ranks that are copies of each other have the same."""
    part: int
    """Which of the `parts` of the shard this is, counted from 0."""
    parts: int
    size: int
    """Bytes of data."""
    slice_bytes: int
    """Maximum bytes of a slice."""
    time: float
    """When it was begun, in seconds since 1970."""
    tail: int = 0
    """Bytes of the tail; in a draft their maximum, so that a receiver knows whether all of it fits."""
    digest: str = ""
    """SHA-256 of the tail."""

    @property
    def moment(self) -> tuple[int, int]:
        """Return step and lineage, which must agree among snapshots that are restored together."""
        return self.step, self.lineage

    @property
    def file_size(self) -> int:
        """Return the bytes of the complete file; of a draft, their maximum."""
        return PAGE + self.size + self.tail


class Entry(NamedTuple):
    """One tensor: its key, its shape on this rank, its dtype and its size in bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    strides: tuple[int, ...] = ()
    """Its strides in memory, and so in the file; empty for a contiguous tensor."""

    @property
    def full_strides(self) -> tuple[int, ...]:
        """Return its strides, also for a contiguous tensor."""
        return self.strides or contiguous(self.shape)


GRAIN: Final = 16
"""Bytes: parts are cut at multiples of it within a tensor, so that no element of any dtype is split."""


def slices_of_part(sizes: Sequence[int], part: int, parts: int, slice_bytes: int = SLICE_BYTES) -> list[tuple[Slice, ...]]:
    """Return the slices of *part* out of *parts* of tensors of these *sizes* in bytes, in the order of the file.

    The tensors form one row of bytes. Each part is a contiguous range of it, cut into slices of at most *slice_bytes*; a slice may span
    several tensors. So copies of one state share the work, and each still has most tensors in one range, as a checkpoint on disk wants.
    """
    row = list(accumulate(sizes, initial=0))
    first, last = _part_begin(row, part, parts, slice_bytes), _part_begin(row, part + 1, parts, slice_bytes)
    slices = []
    for begin in range(first, last, slice_bytes):
        end, spanned = min(begin + slice_bytes, last), []
        tensor = bisect_right(row, begin) - 1
        while tensor < len(sizes) and row[tensor] < end:
            low, high = max(begin, row[tensor]), min(end, row[tensor + 1])
            if high > low:
                spanned.append(Slice(tensor, low - row[tensor], high - low))
            tensor += 1
        slices.append(tuple(spanned))
    return slices


def _part_begin(row: Sequence[int], part: int, parts: int, slice_bytes: int) -> int:
    """Return where in the row of bytes *part* begins, and the part before it ends."""
    unit = min(slice_bytes, PAGE)
    target = min(-(-row[-1] * part // (parts * unit)) * unit, row[-1])
    if target == row[-1]:
        return target
    tensor = bisect_right(row, target) - 1
    return row[tensor] + (target - row[tensor]) // GRAIN * GRAIN


# -- checksums ----------------------------------------------------------------------------------------------------------

SPREAD: Final = 0x9E3779B97F4A7C15
"""An odd factor for data longer than `SLICE_BYTES`: the sum so far is multiplied by it before that of the next range is added."""


@cache
def weights() -> tuple[bytes, bytes]:
    """Return the weights of `word_sum`: two rows of odd little-endian 64-bit numbers, one for each word of `SLICE_BYTES` bytes."""
    drawn = bytearray(hashlib.shake_128(b"holdfast: weights of snapshot checksums").digest(2 * SLICE_BYTES))
    drawn[::8] = bytes(byte | 1 for byte in drawn[::8])
    return bytes(drawn[:SLICE_BYTES]), bytes(drawn[SLICE_BYTES:])


@cache
def _weights() -> tuple[tuple[int, ...], tuple[int, ...]]:
    first, second = weights()
    return _words(first), _words(second)


def _words(data: bytes | memoryview) -> tuple[int, ...]:
    """Return *data* as little-endian 64-bit words."""
    return struct.unpack(f"<{len(data) // 8}Q", data)


def word_sum(data: bytes | bytearray | memoryview) -> int:
    """Return the position-dependent checksum of *data*, modulo 2**64.

    It is the weighted sum of the 64-bit words plus that of the words that begin four bytes later, with other weights. So every 32-bit half
    word has an odd 64-bit weight of its own: multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"). Every
    single flipped bit changes it; two flips, swapped words or pages, and lost, zeroed or moved pages go undetected with a probability of
    about 2**-33. With 64-bit words alone, two flips of bit 63 would always cancel. It detects damage, not malice: the weights are public.

    `holdfast.runtime.snapshots.checksum` and `holdfast.checkpoints.verify` compute it with faster dot products.
    """
    return sum_words(memoryview(data), lambda words, row: sum(map(mul, _words(words), row)), _weights())


def sum_words(data: memoryview, dot: Callable[[memoryview, Any], int], rows: tuple[Any, Any]) -> int:
    """Return the `word_sum` of *data* from both rows of `weights` and a function for the *dot* product of words with the start of a row."""
    total, (first, second) = 0, rows
    for begin in range(0, len(data), SLICE_BYTES):
        part = data[begin : begin + SLICE_BYTES]
        total = total * SPREAD + _row_sum(part, dot, first) + _row_sum(part[4:], dot, second)
    return total & _MASK


def _row_sum(part: memoryview, dot: Callable[[memoryview, Any], int], row: Any) -> int:  # noqa: ANN401 (a row of numbers of any kind)
    count, rest = divmod(len(part), 8)
    total = dot(part[: count * 8], row) if count else 0
    return total + (int.from_bytes(part[-rest:], "little") * int(row[count]) if rest else 0)


def tail_limit(data: int, index: int, blobs: Mapping[str, bytes], slice_bytes: int = SLICE_BYTES) -> int:
    """Return the maximum bytes of a tail over *data* bytes, with an *index* of so many bytes of JSON."""
    names = len(json.dumps({name: len(blob) for name, blob in blobs.items()}))
    return _TAIL_HEAD + _TAIL_PER_SLICE * -(-data // slice_bytes) + index + names + sum(map(len, blobs.values()))


# -- writing ------------------------------------------------------------------------------------------------------------


class Slot:
    """A file that holds one snapshot after the other."""

    def __init__(
        self,
        path: Path,
        *,
        fresh: bool = False,
        on_map: Callable[[memoryview], None] = lambda _data: None,
        on_unmap: Callable[[memoryview], None] = lambda _data: None,
    ) -> None:
        """Open or create the file; raise ``OSError`` when that fails, or when it exists although it must be *fresh*.

        *on_map* is called with the data after it was mapped, and *on_unmap* before it is unmapped: a device's driver must know.
        Links are not followed: outside of a memory store another user may have placed one.
        """
        self.path, self._on_map, self._on_unmap = path, on_map, on_unmap
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if fresh else 0), 0o600)
        self._locked = False
        self._map: mmap.mmap | None = None
        self.data: memoryview = memoryview(bytearray())
        """The data of the snapshot being written."""
        self._entries: Sequence[Entry] = ()
        self._index = "[]"
        """The JSON of `_entries`, which rarely change from one snapshot to the next."""

    def busy(self) -> bool:
        """Return whether a process reads this file now, so that it must not be written."""
        if self._locked:
            return False
        try:
            self._lock()
        except BlockingIOError:
            return True
        self._unlock()
        return False

    def _lock(self) -> None:
        """Keep readers out until the seal; raise ``BlockingIOError`` when there is one."""
        if not self._locked:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locked = True

    def _unlock(self) -> None:
        if self._locked:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._locked = False

    def begin(self, label: Label) -> None:
        """Begin a snapshot and invalidate the one before; readers refuse the file until it is sealed.

        Raise ``BlockingIOError`` when a process reads it, and ``OSError`` when there is not enough memory.
        All memory is allocated now: a page that is missing later would end the process by SIGBUS.
        """
        self._lock()
        try:
            os.pwrite(self._file, _BLANK, 0)
            if label.size != len(self.data):
                self._resize(label.size)
            self._write_label(label, _DRAFT)
        except BaseException:
            self._unlock()
            raise

    def _resize(self, size: int) -> None:
        self._unmap()
        os.ftruncate(self._file, PAGE)  # first, so that a smaller snapshot frees memory and a larger one needs it only once
        os.posix_fallocate(self._file, 0, PAGE + size)
        if size:
            self._map = mmap.mmap(self._file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=PAGE)
            self.data = memoryview(self._map)
            self._on_map(self.data)

    def _unmap(self) -> None:
        if self._map is not None:
            self._on_unmap(self.data)
        self.data.release()
        self.data = memoryview(bytearray())
        if self._map is not None:
            self._map.close()
            self._map = None

    def progress(self, size: int) -> None:
        """Record that the first *size* bytes are written, for a reader that follows."""
        os.pwrite(self._file, _PROGRESS.pack(size), 8)

    def seal(self, label: Label, sums: Sequence[int], entries: Sequence[Entry], blobs: Mapping[str, bytes]) -> Label:
        """Complete the snapshot and return its label; raise ``OSError`` when there is no memory for its tail."""
        if entries is not self._entries:
            self._entries, self._index = entries, json.dumps(entries)
        sizes = json.dumps({name: len(blob) for name, blob in blobs.items()})
        head = f'{{"entries": {self._index}, "blobs": {sizes}}}'.encode()
        table = struct.pack(f"<{len(sums)}Q", *sums)
        tail = b"".join([struct.pack("<QQ", len(table), len(head)), table, head, *blobs.values()])
        return self._seal(replace(label, tail=len(tail), digest=hashlib.sha256(tail).hexdigest()), tail)

    def seal_copy(self, label: Label, tail: bytes | bytearray) -> None:
        """Complete a copy whose data is written; raise `UnusableSnapshot` unless *tail* is the one that *label* describes."""
        if label.size != len(self.data):
            raise UnusableSnapshot(f"its label says {label.size} bytes of data, the copy has {len(self.data)}")
        parse_tail(bytes(tail), label)
        self._seal(label, tail)

    def _seal(self, label: Label, tail: bytes | bytearray) -> Label:
        if os.pwrite(self._file, tail, PAGE + label.size) != len(tail):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write_label(label, _SEALED)
        self._unlock()
        return label

    def discard(self) -> None:
        """Invalidate the content of the file."""
        with suppress(OSError):
            os.pwrite(self._file, _BLANK, 0)
            self._unlock()

    def _write_label(self, label: Label, magic: bytes) -> None:
        body = json.dumps(asdict(label), separators=(",", ":")).encode()
        if len(body) > PAGE - _HEAD.size:
            raise ValueError(f"the label has {len(body)} bytes, more than fit into its page")
        written = label.size if magic == _SEALED else 0
        page = _HEAD.pack(_BLANK, written, len(body), hashlib.sha256(body).digest()) + body
        if os.pwrite(self._file, page, 0) != len(page):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(self._file, magic, 0)  # last: eight bytes are written at once or not at all

    def close(self) -> None:
        """Close the file; its content stays."""
        self._unmap()
        os.close(self._file)


# -- reading ------------------------------------------------------------------------------------------------------------


def read_label(page: bytes, *, draft: bool = False) -> Label:
    """Return the label in the first page of a snapshot; raise `UnusableSnapshot` unless it is sealed (or a *draft*) and unchanged."""
    if len(page) < _HEAD.size:
        raise UnusableSnapshot("it is not a snapshot")
    magic, written, length, digest = _HEAD.unpack_from(page)
    if magic.startswith(_ANY_FORMAT) and magic not in (_SEALED, _DRAFT):
        raise UnusableSnapshot(f"its format is not the one of this version ({FORMAT})")
    if magic != _SEALED and not (draft and magic == _DRAFT):
        raise UnusableSnapshot("it is not complete" if magic in (_DRAFT, _BLANK) else "it is not a snapshot")
    body = page[_HEAD.size : _HEAD.size + length]
    if hashlib.sha256(body).digest() != digest:
        raise UnusableSnapshot("its label was changed")
    label = label_of(body)
    if magic == _SEALED and written != label.size:
        raise UnusableSnapshot("its first page was changed")
    return label


_FIELD_TYPES: Final[dict[str, type | tuple[type, ...]]] = {"int": int, "str": str, "float": (int, float)}


def label_of(body: bytes | str | Mapping[str, Any]) -> Label:
    """Return the label in *body*, JSON or its fields; raise `UnusableSnapshot` unless every field is there and valid."""
    try:
        values = body if isinstance(body, Mapping) else json.loads(body)
        label = Label(**values)
        counts = (label.step, label.lineage, label.rank, label.size, label.tail, label.part)
        valid = (
            all(isinstance(values[field.name], _FIELD_TYPES[str(field.type)]) for field in fields(Label) if field.name in values)
            and min(counts) >= 0
            and label.parts > label.part
            and label.slice_bytes > 0
            and max(*counts, label.parts, label.slice_bytes, label.world) < LARGEST
            and math.isfinite(label.time)
            and len(label.shard) <= PAGE // 4
        )
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnusableSnapshot(f"its label is not one of this version ({FORMAT})") from error
    if not valid:
        raise UnusableSnapshot(f"its label is not one of this version ({FORMAT})")
    return label


def is_sealed(page: bytes) -> bool:
    """Return whether the snapshot that begins with *page* is complete."""
    return page[: len(_SEALED)] == _SEALED


def progress_of(page: bytes) -> int:
    """Return how many bytes of data are written."""
    return int(_PROGRESS.unpack_from(page, 8)[0])


class Snapshot:
    """A sealed snapshot, opened for reading; while it is open no writer reuses its file."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise `UnusableSnapshot` when it holds no sealed snapshot, ``OSError`` when it cannot be read."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.label = read_label(os.pread(self._file, PAGE, 0))
            self.sums, self.entries, self.blobs = _tail(self._file, self.label)
            size = self.label.size
            # Private and writable although nothing is written: torch accepts only writable memory.
            self._map = mmap.mmap(self._file, size, access=mmap.ACCESS_COPY, offset=PAGE) if size else None
        except BaseException:
            os.close(self._file)
            raise
        self.data = memoryview(self._map) if self._map is not None else memoryview(b"")

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def slices(self) -> Iterator[tuple[tuple[Slice, ...], memoryview, int]]:
        """Yield every slice of this file: which bytes of which tensors it holds, its data, and its expected checksum."""
        label, end = self.label, 0
        sizes = [entry.size for entry in self.entries]
        for spanned, expected in zip(slices_of_part(sizes, label.part, label.parts, label.slice_bytes), self.sums, strict=True):
            begin, end = end, end + sum(one.length for one in spanned)
            yield spanned, self.data[begin:end], expected

    def tensor_ranges(self) -> list[tuple[int, int, int, int]]:
        """Return what this file holds of each tensor: its number, first byte, end, and offset in the data."""
        found: list[tuple[int, int, int, int]] = []
        offset = 0
        for spanned, _, _ in self.slices():
            for one in spanned:
                if found and found[-1][0] == one.tensor:
                    tensor, begin, _, at = found.pop()
                    found.append((tensor, begin, one.begin + one.length, at))
                else:
                    found.append((one.tensor, one.begin, one.begin + one.length, offset))
                offset += one.length
        return found

    def checked(self, checksum: Callable[[memoryview], int] = word_sum) -> Iterator[tuple[tuple[Slice, ...], memoryview]]:
        """Yield every slice and its data; raise `UnusableSnapshot` at a wrong checksum. *checksum*: a faster `word_sum`."""
        for spanned, data, expected in self.slices():
            if checksum(data) != expected:
                first, others = self.entries[spanned[0].tensor].key, len(spanned) - 1
                where = f"'{first}' or one of the {others} tensors after it" if others else f"'{first}'"
                raise UnusableSnapshot(f"{where} was changed in memory: its checksum is not that of the copy")
            yield spanned, data

    def verify(self, checksum: Callable[[memoryview], int] = word_sum) -> None:
        """Read everything; raise `UnusableSnapshot` when a byte was changed."""
        for _ in self.checked(checksum):
            pass

    def close(self) -> None:
        """Close the file."""
        self.data.release()
        if self._map is not None:
            with suppress(BufferError):  # a view of it is still in use: the garbage collector closes it
                self._map.close()
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tail(file: int, label: Label) -> tuple[tuple[int, ...], list[Entry], dict[str, bytes]]:
    """Return checksums, entries and blobs; raise `UnusableSnapshot` when the tail is not the sealed one."""
    if os.fstat(file).st_size < label.file_size:
        raise UnusableSnapshot("its file is truncated")
    return parse_tail(os.pread(file, label.tail, PAGE + label.size), label)


def parse_tail(tail: bytes, label: Label) -> tuple[tuple[int, ...], list[Entry], dict[str, bytes]]:
    """Return the checksums, entries and blobs in *tail*; raise `UnusableSnapshot` when it is not the one that *label* describes."""
    if len(tail) != label.tail or hashlib.sha256(tail).hexdigest() != label.digest:
        raise UnusableSnapshot("its index was changed")
    try:
        table, head = struct.unpack_from("<QQ", tail)
        sums = struct.unpack_from(f"<{table // 8}Q", tail, 16)
        index = json.loads(tail[16 + table : 16 + table + head])
        entries = [_entry(*one) for one in index["entries"]]
        sizes = {str(name): _count(size) for name, size in index["blobs"].items()}
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise UnusableSnapshot(f"its index is not one of this version ({FORMAT})") from error  # complete, but not what we write
    if 16 + table + head + sum(sizes.values()) != len(tail):
        raise UnusableSnapshot("its index does not match its length")
    row = list(accumulate((one.size for one in entries), initial=0))
    first, last = (_part_begin(row, part, label.parts, label.slice_bytes) for part in (label.part, label.part + 1))
    if last - first != label.size or len(sums) != -(-label.size // label.slice_bytes):  # before slices are made: their number may be any
        raise UnusableSnapshot("it does not have one checksum for each slice")
    blobs: dict[str, bytes] = {}
    begin = 16 + table + head
    for name, length in sizes.items():
        blobs[name] = tail[begin : begin + length]
        begin += length
    return sums, entries, blobs


_DTYPE: Final = re.compile(r"(bool|u?int\d+|b?float\d+\w*|complex\d+|q?u?int\d+(x\d+)?|bits\w+)")


def _entry(key: object, shape: Sequence[object], dtype: object, size: object, strides: Sequence[object] = ()) -> Entry:
    """Return a tensor's entry; raise ``ValueError`` or ``TypeError`` when it is not valid."""
    if not isinstance(key, str) or not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError("no key or no dtype")
    entry = Entry(key, tuple(_count(one) for one in shape), dtype, _count(size), tuple(_count(one) for one in strides))
    if math.prod(entry.shape) > 8 * entry.size:  # no dtype has elements below one bit; a reader would allocate memory for them
        raise ValueError("more elements than bits")
    if entry.strides and not is_dense(entry.shape, entry.strides):
        raise ValueError("strides that leave gaps in the tensor's memory")
    return entry


def _count(value: object) -> int:
    """Return *value* if it is a valid count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise ValueError("not a count")
    return value


def labels(memstore: Path) -> dict[Path, Label]:
    """Return the sealed snapshots in *memstore* by file; files that are none, or cannot be read, are skipped."""
    found: dict[Path, Label] = {}
    with suppress(OSError):
        for path in sorted(memstore.glob(f"*{SUFFIX}")):
            with suppress(OSError, UnusableSnapshot), path.open("rb") as file:
                found[path] = read_label(file.read(PAGE))
    return found
