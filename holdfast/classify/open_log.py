"""Logs as they lie about: packed when they were rotated, or in UTF-16 as Windows writes them. Unread, they would look free of faults."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Final

from holdfast.errors import NotReadable

Read = Callable[[int], bytes]

Unpacking = gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile

_UNPACKED: Final[dict[bytes, Callable[[IO[bytes]], Unpacking]]] = {
    b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
"""What can be unpacked here, by its first bytes."""
_ELSEWHERE: Final[dict[bytes, tuple[str, str]]] = {
    b"\x28\xb5\x2f\xfd": ("it is packed with zstd", "Unpack it on the way: `zstd -dc LOG | holdfast classify`"),
    b"LPKSHHRH": ("it is a journal of systemd", "Have it printed: `journalctl --file LOG | holdfast classify`"),
    b"PK\x03\x04": ("it is a zip archive", "Unpack it on the way: `unzip -p LOG | holdfast classify`"),
}
"""What another program has to make lines of first, by its first bytes: what it is, and how."""
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MARKS: Final = (*_UNPACKED, *_ELSEWHERE, *_UTF_16)
_DAMAGED: Final = (OSError, zlib.error, lzma.LZMAError, EOFError)
"""What the libraries say of bytes that they cannot unpack; of an `OSError` only one without a number: the system's own have one."""


def opened(read: Read, name: str) -> Read:
    """Return what gives the plain bytes of a log called *name*, whose bytes as they are *read* gives.

    *read* returns what can be had at once, and nothing at the end; what is returned does the same. No more is waited for than the first
    bytes. Raises `NotReadable` here for what cannot be read as lines, and from the returned function where packed bytes are damaged.
    """
    first = _beginning(read)
    for mark, (reason, cure) in _ELSEWHERE.items():
        if first.startswith(mark):
            raise NotReadable("the log", name, reason, cure)
    whole = _Again(first, read)
    for mark, unpacked in _UNPACKED.items():
        if first.startswith(mark):
            return _unpacking(unpacked(io.BufferedReader(whole)), name)
    return _decoding(whole.some) if first.startswith(_UTF_16) else whole.some


def _beginning(read: Read) -> bytes:
    """Read until it is clear whether the log begins with a mark."""
    first = b""
    while chunk := read(io.DEFAULT_BUFFER_SIZE):
        first += chunk
        if not any(len(first) < len(mark) and mark.startswith(first) for mark in _MARKS):
            break
    return first


class _Again(io.RawIOBase):
    """A stream that gives its beginning once more."""

    def __init__(self, first: bytes, read: Read) -> None:
        self._first, self._read = first, read

    def some(self, most: int) -> bytes:
        """Return up to *most* bytes that can be had at once."""
        if not self._first:
            return self._read(most)
        given, self._first = self._first[:most], self._first[most:]
        return given

    def readable(self) -> bool:
        return True

    def readinto(self, into: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is newer than Python 3.11
        given = self.some(len(into))
        into[: len(given)] = given
        return len(given)


def _unpacking(packed: Unpacking, name: str) -> Read:
    def read(most: int) -> bytes:
        try:
            return packed.read1(most)
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            cure = "What stands before that was judged; unpack the rest by hand, or take another copy"
            raise NotReadable("the log", name, f"its packed bytes are damaged or cut off ({error})", cure) from error

    return read


def _decoding(read: Read) -> Read:
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")

    def text(most: int) -> bytes:
        while chunk := read(most):
            if told := decoder.decode(chunk):
                return told.encode()
        return decoder.decode(b"", final=True).encode()

    return text
