"""Snapshots of ranks' state in a node's memory: files that outlive the worker that writes them, and can be told whole from torn.

A *memory store* is a folder on a memory file system that belongs to the node's agent. A snapshot is one file in it::

    page 0   magic: DRAFT while it is written, SEALED once it is whole; how far it is; the label and its SHA-256
    data     the bytes of the tensors, this rank's share of them, in slices
    tail     a 64-bit checksum of every slice (`word_sum`), the tensors' index, and what is small (blobs); its SHA-256 stands in the label

The seal is written last. A kill at any point leaves a draft, which nobody takes for a snapshot.
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
"""Bytes of a slice: at the speed of memory some tenth of a millisecond, so that who waits for the end of one waits for nothing."""
SUFFIX: Final = ".snap"
LARGEST: Final = 2**62
"""No number in a snapshot is as large."""

_SEALED, _DRAFT, _BLANK = f"HFSEALD{FORMAT}".encode(), f"HFDRAFT{FORMAT}".encode(), bytes(8)
_OTHERS: Final = (b"HFSEAL", b"HFDRAFT")
"""How the magic of every format begins."""
_HEAD: Final = struct.Struct("<8sQI32s")
"""Magic, bytes of data that are there, length of the label, its SHA-256."""
_PROGRESS: Final = struct.Struct("<Q")
_MASK: Final = (1 << 64) - 1
_TAIL_HEAD: Final = 128
"""Bytes of a tail beside its table, index, names and blobs, at most."""
_SLICE_ROOM: Final = 64
"""Bytes that a tail has for each slice, at most."""


REPLACED: Final = "another one has taken its place"
"""Why a snapshot is `UnusableSnapshot` whose file holds another one by now."""


class UnusableSnapshot(Exception):
    """A snapshot that must not be used, and *why*."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Slice(NamedTuple):
    """Some bytes of one tensor: which, from where, how many."""

    tensor: int
    begin: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a snapshot says of itself."""

    step: int
    """The step after which the state holds."""
    lineage: int
    """The generation that last went back to an earlier step: state of two lineages does not go together, be the step the same."""
    rank: int
    world: int
    shard: str
    """The piece of the training that the rank holds; ranks that are copies of each other have the same."""
    part: int
    """Which share of the piece's slices this is, counted from 0, out of `parts`."""
    parts: int
    size: int
    """Bytes of data."""
    cut: int
    """Bytes of a slice at most."""
    time: float
    """When it was begun, in seconds since 1970."""
    tail: int = 0
    """Bytes of the tail; in a draft those that it has at most, so that whoever takes a copy can tell whether all of it fits."""
    digest: str = ""
    """SHA-256 of the tail."""

    @property
    def moment(self) -> tuple[int, int]:
        """Return what must agree among snapshots that are used together."""
        return self.step, self.lineage

    @property
    def file_size(self) -> int:
        """Return the bytes of the whole file; of a draft, those that it has at most."""
        return PAGE + self.size + self.tail


class Entry(NamedTuple):
    """One tensor: its key, its shape on this rank, its type and its bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    strides: tuple[int, ...] = ()
    """How its elements lie in memory, and so in the file; empty: one after the other, the last dimension's first."""

    @property
    def laid_out(self) -> tuple[int, ...]:
        """Return its strides, those of a contiguous tensor too."""
        return self.strides or contiguous(self.shape)


GRAIN: Final = 16
"""Bytes: no element of any type is cut in two where the share of one part ends and that of the next begins."""


def slices_of_part(sizes: Sequence[int], part: int, parts: int, cut: int = SLICE_BYTES) -> list[tuple[Slice, ...]]:
    """Return the slices of *part* out of *parts* of tensors of these *sizes* in bytes, in the order in which they lie in the file.

    The tensors are taken for one long row of bytes, of which each part is a stretch, cut every *cut* bytes; a slice goes through as many
    tensors as it meets. Copies of one state share the work so, and still each has most tensors in one piece, as a checkpoint on disk wants.
    """
    row = list(accumulate(sizes, initial=0))
    first, last = _bound(row, part, parts, cut), _bound(row, part + 1, parts, cut)
    dealt = []
    for begin in range(first, last, cut):
        end, met = min(begin + cut, last), []
        tensor = bisect_right(row, begin) - 1
        while tensor < len(sizes) and row[tensor] < end:
            low, high = max(begin, row[tensor]), min(end, row[tensor + 1])
            if high > low:
                met.append(Slice(tensor, low - row[tensor], high - low))
            tensor += 1
        dealt.append(tuple(met))
    return dealt


def _bound(row: Sequence[int], part: int, parts: int, cut: int) -> int:
    """Return where in the row of bytes the stretch of *part* begins, and that of the part before ends."""
    unit = min(cut, PAGE)
    wanted = min(-(-row[-1] * part // (parts * unit)) * unit, row[-1])
    if wanted == row[-1]:
        return wanted
    tensor = bisect_right(row, wanted) - 1
    return row[tensor] + (wanted - row[tensor]) // GRAIN * GRAIN


# -- checksums ----------------------------------------------------------------------------------------------------------

SPREAD: Final = 0x9E3779B97F4A7C15
"""Odd; what is longer than `SLICE_BYTES` is summed in stretches of that length: the sum so far is multiplied by it before the next is
added."""


@cache
def weights() -> tuple[bytes, bytes]:
    """Return the weights of `word_sum`: two rows of odd little-endian 64-bit numbers, one a word of `SLICE_BYTES` bytes."""
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

    The words of 64 bits, each times a weight of its position, are added to the words that begin four bytes later, each times another
    weight. So every half word counts with an odd weight of 64 bits of its own: multilinear hashing over words of 32 bits (Lemire and Kaser,
    "Strongly universal string hashing is fast"). Every single flipped bit changes it; two flips, words or pages that change places, and
    pages that are lost, zeroed or moved pass with a chance of about 2**-33. With words of 64 bits alone, two flips of bit 63 would always
    cancel. Damage is what it detects, not malice: the weights are known.

    `holdfast.runtime.snapshots.checksum` and `holdfast.checkpoints.checksum` compute it too, with faster products.
    """
    return sum_words(memoryview(data), lambda words, row: sum(map(mul, _words(words), row)), _weights())


def sum_words(data: memoryview, dot: Callable[[memoryview, Any], int], rows: tuple[Any, Any]) -> int:
    """Return the `word_sum` of *data*, given both rows of `weights` and the *dot* product of whole words and the begin of a row."""
    total, (first, second) = 0, rows
    for begin in range(0, len(data), SLICE_BYTES):
        part = data[begin : begin + SLICE_BYTES]
        total = total * SPREAD + _row_sum(part, dot, first) + _row_sum(part[4:], dot, second)
    return total & _MASK


def _row_sum(part: memoryview, dot: Callable[[memoryview, Any], int], row: Any) -> int:  # noqa: ANN401 (a row of numbers of any kind)
    count, rest = divmod(len(part), 8)
    total = dot(part[: count * 8], row) if count else 0
    return total + (int.from_bytes(part[-rest:], "little") * int(row[count]) if rest else 0)


def tail_limit(data: int, index: int, blobs: Mapping[str, bytes], cut: int = SLICE_BYTES) -> int:
    """Return how many bytes a tail has at most: over *data* bytes in slices of *cut*, with an *index* of so many bytes of JSON."""
    names = len(json.dumps({name: len(blob) for name, blob in blobs.items()}))
    return _TAIL_HEAD + _SLICE_ROOM * -(-data // cut) + index + names + sum(map(len, blobs.values()))


# -- writing ------------------------------------------------------------------------------------------------------------


class Slot:
    """A file that takes one snapshot after the other."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Open or make the file, which must not be there yet if it is to be *fresh*; raise ``OSError`` when that cannot be.

        No link is followed: outside of a memory store somebody else may have laid one out.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if fresh else 0), 0o600)
        self._held = False
        self._map: mmap.mmap | None = None
        self.data: memoryview = memoryview(bytearray())
        """The bytes of the snapshot in work."""
        self._entries: Sequence[Entry] = ()
        self._index = "[]"
        """The JSON of `_entries`, which are mostly the same from one snapshot to the next."""

    def busy(self) -> bool:
        """Tell whether somebody reads this file now, so that it must not be written."""
        if self._held:
            return False
        try:
            self._hold()
        except BlockingIOError:
            return True
        self._let_go()
        return False

    def _hold(self) -> None:
        """Keep readers out; raise ``BlockingIOError`` when there is one. Without it one could come between a look and the first byte."""
        if not self._held:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = True

    def _let_go(self) -> None:
        if self._held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._held = False

    def begin(self, label: Label) -> None:
        """Begin a snapshot: what was here is none any more. Nobody can open the file as a snapshot until it is sealed or discarded.

        Raise ``BlockingIOError`` when somebody reads it, and ``OSError`` when there is no memory for it.
        All memory is taken now: a page that cannot be had later would end the process by SIGBUS.
        """
        self._hold()
        try:
            os.pwrite(self._file, _BLANK, 0)
            if label.size != len(self.data):
                self._map_anew(label.size)
            self._write_label(label, _DRAFT)
        except BaseException:
            self._let_go()
            raise

    def _map_anew(self, size: int) -> None:
        self.data.release()
        self.data = memoryview(bytearray())
        if self._map is not None:
            self._map.close()
            self._map = None
        os.ftruncate(self._file, PAGE)  # first, so that a smaller snapshot gives memory back and a bigger one needs it only once
        os.posix_fallocate(self._file, 0, PAGE + size)
        if size:
            self._map = mmap.mmap(self._file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=PAGE)
            self.data = memoryview(self._map)

    def progress(self, size: int) -> None:
        """Say that the first *size* bytes are there, for who reads along."""
        os.pwrite(self._file, _PROGRESS.pack(size), 8)

    def seal(self, label: Label, sums: Sequence[int], entries: Sequence[Entry], blobs: Mapping[str, bytes]) -> Label:
        """Make the snapshot whole; return its label. Raise ``OSError`` when there is no memory for its tail."""
        if entries is not self._entries:
            self._entries, self._index = entries, json.dumps(entries)
        sizes = json.dumps({name: len(blob) for name, blob in blobs.items()})
        head = f'{{"entries": {self._index}, "blobs": {sizes}}}'.encode()
        table = struct.pack(f"<{len(sums)}Q", *sums)
        tail = b"".join([struct.pack("<QQ", len(table), len(head)), table, head, *blobs.values()])
        return self._seal(replace(label, tail=len(tail), digest=hashlib.sha256(tail).hexdigest()), tail)

    def seal_copy(self, label: Label, tail: bytes | bytearray) -> None:
        """Complete a copy of a snapshot whose data are here; raise `UnusableSnapshot` unless *tail* is the one that its *label* names."""
        if label.size != len(self.data):
            raise UnusableSnapshot(f"its label speaks of {label.size} bytes of data, and {len(self.data)} are here")
        parse_tail(bytes(tail), label)
        self._seal(label, tail)

    def _seal(self, whole: Label, tail: bytes | bytearray) -> Label:
        if os.pwrite(self._file, tail, PAGE + whole.size) != len(tail):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write_label(whole, _SEALED)
        self._let_go()
        return whole

    def discard(self) -> None:
        """Give up what is in the file."""
        with suppress(OSError):
            os.pwrite(self._file, _BLANK, 0)
            self._let_go()

    def _write_label(self, label: Label, magic: bytes) -> None:
        body = json.dumps(asdict(label), separators=(",", ":")).encode()
        if len(body) > PAGE - _HEAD.size:
            raise ValueError("the label is longer than its page")
        told = label.size if magic == _SEALED else 0
        page = _HEAD.pack(_BLANK, told, len(body), hashlib.sha256(body).digest()) + body
        if os.pwrite(self._file, page, 0) != len(page):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(self._file, magic, 0)  # last: eight bytes are there or not

    def close(self) -> None:
        """Let go of the file; what is in it stays."""
        self.data.release()
        self.data = memoryview(bytearray())
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self._file)


# -- reading ------------------------------------------------------------------------------------------------------------


def read_label(page: bytes, *, draft: bool = False) -> Label:
    """Return the label in the first page of a snapshot; raise `UnusableSnapshot` unless it is sealed (or a *draft*) and as it was written."""
    if len(page) < _HEAD.size:
        raise UnusableSnapshot("it is no snapshot")
    magic, told, length, digest = _HEAD.unpack_from(page)
    if magic.startswith(_OTHERS) and magic not in (_SEALED, _DRAFT):
        raise UnusableSnapshot(f"its format is not the one of this version ({FORMAT})")
    if magic != _SEALED and not (draft and magic == _DRAFT):
        raise UnusableSnapshot("it is not whole" if magic in (_DRAFT, _BLANK) else "it is no snapshot")
    body = page[_HEAD.size : _HEAD.size + length]
    if hashlib.sha256(body).digest() != digest:
        raise UnusableSnapshot("its label was changed")
    label = label_of(body)
    if magic == _SEALED and told != label.size:
        raise UnusableSnapshot("its first page was changed")
    return label


_KINDS: Final[dict[str, type | tuple[type, ...]]] = {"int": int, "str": str, "float": (int, float)}


def label_of(body: bytes | str | Mapping[str, Any]) -> Label:
    """Return the label that is written in *body* as JSON, or as its fields; raise `UnusableSnapshot` unless each is there and can be."""
    try:
        told = body if isinstance(body, Mapping) else json.loads(body)
        label = Label(**told)
        fit = all(isinstance(told[field.name], _KINDS[str(field.type)]) for field in fields(Label) if field.name in told)
        counts = (label.step, label.lineage, label.rank, label.size, label.tail, label.part)
        fit = fit and min(counts) >= 0 and label.parts > label.part and label.cut > 0
        fit = (
            fit
            and max(*counts, label.parts, label.cut, label.world) < 2**62
            and math.isfinite(label.time)
            and len(label.shard) <= PAGE // 4
        )
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnusableSnapshot(f"its label is not one of this version ({FORMAT})") from error
    if not fit:
        raise UnusableSnapshot(f"its label is not one of this version ({FORMAT})")
    return label


def is_sealed(page: bytes) -> bool:
    """Tell whether the snapshot that begins with *page* is whole."""
    return page[: len(_SEALED)] == _SEALED


def progress_of(page: bytes) -> int:
    """Return how many bytes of data are there."""
    return int(_PROGRESS.unpack_from(page, 8)[0])


class Snapshot:
    """A sealed snapshot, opened to be read; it is not written anew as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise `UnusableSnapshot` when it holds no sealed snapshot, ``OSError`` when it cannot be read."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.label = read_label(os.pread(self._file, PAGE, 0))
            self.sums, self.entries, self.blobs = _tail(self._file, self.label)
            size = self.label.size
            # Private and writable, although nobody writes: torch looks only at memory that could be written.
            self._map = mmap.mmap(self._file, size, access=mmap.ACCESS_COPY, offset=PAGE) if size else None
        except BaseException:
            os.close(self._file)
            raise
        self.data = memoryview(self._map) if self._map is not None else memoryview(b"")

    def fileno(self) -> int:
        """Return the descriptor of the file, for who sends it on as it is."""
        return self._file

    def slices(self) -> Iterator[tuple[tuple[Slice, ...], memoryview, int]]:
        """Yield every slice of this file: what of which tensors it is, its bytes, and the sum that they must have."""
        dealt = slices_of_part([entry.size for entry in self.entries], self.label.part, self.label.parts, self.label.cut)
        lengths = [sum(one.length for one in met) for met in dealt]
        for met, length, end, told in zip(dealt, lengths, accumulate(lengths), self.sums, strict=True):
            yield met, self.data[end - length : end], told

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """Return what this file has of each tensor: its number, from which byte to which, and where in the data."""
        found: list[tuple[int, int, int, int]] = []
        place = 0
        for met in slices_of_part([entry.size for entry in self.entries], self.label.part, self.label.parts, self.label.cut):
            for one in met:
                if found and found[-1][0] == one.tensor:
                    tensor, begin, _, there = found.pop()
                    found.append((tensor, begin, one.begin + one.length, there))
                else:
                    found.append((one.tensor, one.begin, one.begin + one.length, place))
                place += one.length
        return found

    def checked(self, checksum: Callable[[memoryview], int] = word_sum) -> Iterator[tuple[tuple[Slice, ...], memoryview]]:
        """Yield every slice and its bytes; raise `UnusableSnapshot` at one that is not as it was written. *checksum*: a faster `word_sum`."""
        for met, data, told in self.slices():
            if checksum(data) != told:
                raise UnusableSnapshot(f"{self.named(met)} was changed in memory: its sum is not the one it had when it was copied")
            yield met, data

    def verify(self, checksum: Callable[[memoryview], int] = word_sum) -> None:
        """Read everything; raise `UnusableSnapshot` when a byte is not as it was written."""
        for _ in self.checked(checksum):
            pass

    def named(self, met: Sequence[Slice]) -> str:
        """Return the names of the tensors in a slice."""
        first = self.entries[met[0].tensor].key
        return f"'{first}'" if len(met) == 1 else f"'{first}' or one of the {len(met) - 1} tensors after it"

    def close(self) -> None:
        """Let go of the file."""
        self.data.release()
        if self._map is not None:
            with suppress(BufferError):  # somebody still looks at it: the garbage collector closes it
                self._map.close()
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tail(file: int, label: Label) -> tuple[tuple[int, ...], list[Entry], dict[str, bytes]]:
    """Return sums, entries and blobs; raise `UnusableSnapshot` when the tail is not the one that was sealed."""
    if os.fstat(file).st_size < label.file_size:
        raise UnusableSnapshot("it is cut off")
    return parse_tail(os.pread(file, label.tail, PAGE + label.size), label)


def parse_tail(tail: bytes, label: Label) -> tuple[tuple[int, ...], list[Entry], dict[str, bytes]]:
    """Return the sums, entries and blobs in *tail*; raise `UnusableSnapshot` when it is not the one that *label* names."""
    if len(tail) != label.tail or hashlib.sha256(tail).hexdigest() != label.digest:
        raise UnusableSnapshot("its index was changed")
    try:
        table, head = struct.unpack_from("<QQ", tail)
        sums = struct.unpack_from(f"<{table // 8}Q", tail, 16)
        told = json.loads(tail[16 + table : 16 + table + head])
        entries = [_entry(*one) for one in told["entries"]]
        sizes = {str(name): _count(size) for name, size in told["blobs"].items()}
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise UnusableSnapshot(f"its index is not one of this version ({FORMAT})") from error  # whole, and not what we write
    if 16 + table + head + sum(sizes.values()) != len(tail):
        raise UnusableSnapshot("its index does not fit its length")
    row = list(accumulate((one.size for one in entries), initial=0))
    size = _bound(row, label.part + 1, label.parts, label.cut) - _bound(row, label.part, label.parts, label.cut)
    if size != label.size or len(sums) != -(-size // label.cut):  # before anybody deals them out: their number may be any
        raise UnusableSnapshot("it has not a sum for every slice")
    blobs: dict[str, bytes] = {}
    begin = 16 + table + head
    for name, length in sizes.items():
        blobs[name] = tail[begin : begin + length]
        begin += length
    return sums, entries, blobs


_DTYPE: Final = re.compile(r"(bool|u?int\d+|b?float\d+\w*|complex\d+|q?u?int\d+(x\d+)?|bits\w+)")


def _entry(key: object, shape: Sequence[object], dtype: object, size: object, strides: Sequence[object] = ()) -> Entry:
    """Return a tensor's entry; raise ``ValueError`` or ``TypeError`` for what is none."""
    if not isinstance(key, str) or not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError("neither a key nor a type")
    whole = Entry(key, tuple(_count(one) for one in shape), dtype, _count(size), tuple(_count(one) for one in strides))
    if math.prod(whole.shape) > 8 * whole.size:  # no type has elements of less than a bit; whoever believes it takes that much memory
        raise ValueError("more elements than bits")
    if whole.strides and not is_dense(whole.shape, whole.strides):
        raise ValueError("strides that do not fill the tensor's memory")
    return whole


def _count(value: object) -> int:
    """Return *value* if it is a number of something."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise ValueError("no number of anything")
    return value


def labels(memstore: Path) -> dict[Path, Label]:
    """Return the sealed snapshots in *memstore*, by file; what is none, or cannot be read, is passed over."""
    found: dict[Path, Label] = {}
    with suppress(OSError):
        for path in sorted(memstore.glob(f"*{SUFFIX}")):
            with suppress(OSError, UnusableSnapshot), path.open("rb") as file:
                found[path] = read_label(file.read(PAGE))
    return found
