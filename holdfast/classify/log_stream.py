"""Read a log as blocks of complete lines, in bounded memory: from a file or a pipe, compressed by log rotation, in UTF-16 or UTF-32.

Unread, a compressed log would look free of faults.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Final

from holdfast.errors import NotReadable

Read = Callable[[int], bytes]
"""Returns up to so many bytes that are available at once, and nothing at the end."""
Decompressor = gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile

BLOCK: Final = 1 << 20
"""Bytes that are read at once."""
MAX_LINE: Final = 1 << 16
"""Bytes that are kept of a line; the rest of it is dropped."""
_ESCAPES: Final = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,16}[@-~]|\][^\x07\n\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Escape sequences of terminals: colours, cursor movements, titles. Each has an end and does not extend across the next one: else a line
with many unfinished ones would take time quadratic in its length."""
_TOO_LONG: Final = re.compile(rb"(?m)^([^\n]{%d})[^\n]+" % MAX_LINE)
_DECOMPRESSORS: Final[dict[bytes, Callable[[IO[bytes]], Decompressor]]] = {
    b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
"""The formats that are decompressed here, by their first bytes."""
_LZ4: Final = ("it is compressed with lz4", "Decompress it: `lz4 -dc LOG | holdfast faults find`")
_OTHER_FORMATS: Final[dict[bytes, tuple[str, str]]] = {
    b"\x28\xb5\x2f\xfd": ("it is compressed with zstd", "Decompress it: `zstd -dc LOG | holdfast faults find`"),
    b"LPKSHHRH": ("it is a journal of systemd", "Print it: `journalctl --file LOG | holdfast faults find`"),
    b"PK\x03\x04": ("it is a zip archive", "Unpack it: `unzip -p LOG | holdfast faults find`"),
    b"\x04\x22\x4d\x18": _LZ4,
    b"\x02\x21\x4c\x18": _LZ4,
    b"7z\xbc\xaf\x27\x1c": ("it is a 7z archive", "Unpack it: `7z x -so LOG | holdfast faults find`"),
    b"\x1f\x9d": ("it is compressed with compress", "Decompress it: `gzip -dc LOG | holdfast faults find`"),
}
"""The formats that another program must convert first, by their first bytes: what it is, and how."""
_MARKS: Final = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The byte order marks; that of UTF-32 begins with that of UTF-16, so it comes first."""
_UNMARKED: Final = 16
"""Bytes by which UTF-16 and UTF-32 without a mark are told."""
_SIGNATURES: Final = (*_DECOMPRESSORS, *_OTHER_FORMATS, *_MARKS)
_DAMAGED: Final = (OSError, zlib.error, lzma.LZMAError, EOFError)
"""Errors of the libraries for damaged data; for an ``OSError`` only one without a number, as the system's own have one."""


def blocks(read: Read) -> Iterator[bytes]:
    """Yield what *read* returns, cut after the last complete line; the last line of all needs no end.

    What arrives line by line is yielded line by line.
    """
    rest = b""
    while chunk := read(BLOCK):
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest = (rest + chunk[:MAX_LINE])[:MAX_LINE]
            continue
        first = chunk.find(b"\n")
        yield plain((rest + chunk[:first])[:MAX_LINE] + _cut(chunk[first:end]))
        rest = chunk[end:]
    if rest:
        yield plain(rest[:MAX_LINE] + b"\n")


def _cut(lines: bytes) -> bytes:
    """Return *lines* with at most `MAX_LINE` bytes each. Looking for a line that is too long costs a step for every `MAX_LINE` bytes."""
    begin = 0
    while begin + MAX_LINE < len(lines):
        end = lines.rfind(b"\n", begin, begin + MAX_LINE)
        if end < begin:
            return _TOO_LONG.sub(rb"\1", lines)
        begin = end + 1
    return lines


def plain(block: bytes) -> bytes:
    """Return *block* without escape sequences, and without carriage returns at the ends of lines."""
    if b"\x1b" in block:
        block = _ESCAPES.sub(b"", block)
    return block.replace(b"\r\n", b"\n") if b"\r\n" in block else block


def decoded(read: Read, name: str) -> Read:
    """Return a function that reads the plain bytes of the log *name*, whose raw bytes *read* returns.

    Only the first bytes are waited for here. Raise `NotReadable` for a format that cannot be read as lines; the returned function raises
    it where compressed data is damaged.
    """
    first = b""
    while chunk := read(io.DEFAULT_BUFFER_SIZE):
        first += chunk
        if not any(len(first) < len(signature) and signature.startswith(first) for signature in _SIGNATURES) and not (
            len(first) < _UNMARKED and (len(first) == 1 or 0 in first[:2])
        ):
            break  # enough to tell the format
    for signature, (reason, cure) in _OTHER_FORMATS.items():
        if first.startswith(signature):
            raise NotReadable("the log", name, reason, cure)
    raw = _WithFirst(first, read)
    for signature, decompressor in _DECOMPRESSORS.items():
        if first.startswith(signature):
            return _decompressing(decompressor(io.BufferedReader(raw)), name)
    encoding = next((name for mark, name in _MARKS.items() if first.startswith(mark)), None) or _unmarked(first)
    return _decoding(raw.read_some, encoding) if encoding else raw.read_some


def _unmarked(first: bytes) -> str | None:
    """Return the encoding of UTF-16 or UTF-32 without a mark: of its first characters, which are of ASCII, only one byte is not zero."""
    if len(first) < _UNMARKED:
        return None
    for width in (2, 4):
        used = [all(first[place:_UNMARKED:width]) for place in range(width)]
        empty = [not any(first[place:_UNMARKED:width]) for place in range(width)]
        for order, place in (("le", 0), ("be", width - 1)):
            if used[place] and sum(empty) == width - 1:
                return f"utf-{8 * width}-{order}"
    return None


class _WithFirst(io.RawIOBase):
    """A stream that begins with bytes that were read already."""

    def __init__(self, first: bytes, read: Read) -> None:
        self._first, self._read = first, read

    def read_some(self, size: int) -> bytes:
        """Return up to *size* bytes that are available at once."""
        if not self._first:
            return self._read(size)
        taken, self._first = self._first[:size], self._first[size:]
        return taken

    def readable(self) -> bool:
        return True

    def readinto(self, into: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is newer than Python 3.11
        taken = self.read_some(len(into))
        into[: len(taken)] = taken
        return len(taken)


def _decompressing(compressed: Decompressor, name: str) -> Read:
    def read(size: int) -> bytes:
        try:
            return compressed.read1(size)
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            cure = "The part before that was classified; decompress the rest by hand, or take another copy"
            raise NotReadable("the log", name, f"its compressed data is damaged or truncated ({error})", cure) from error

    return read


def _decoding(read: Read, encoding: str) -> Read:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")

    def text(size: int) -> bytes:
        while chunk := read(size):
            if found := decoder.decode(chunk):
                return found.encode()
        return decoder.decode(b"", final=True).encode()

    return text
