"""A stream as blocks of whole lines, in bounded memory: endless input, and a line without end, are read to their end or until told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

BLOCK: Final = 1 << 20
"""Bytes that are read at once."""
LONGEST: Final = 1 << 16
"""Bytes that are kept of a line; what follows on it is dropped."""
_PAINT: Final = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,16}[@-~]|\][^\x07\n\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Escape sequences of terminals: colours, cursor movements, titles. Each with an end, and none across the next one: a line that begins many
and ends none would cost the square of its length."""
_TOO_LONG: Final = re.compile(rb"([^\n]{%d})[^\n]+" % LONGEST)


def blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield what *read* has to give, cut behind the last line that is whole; the last line needs no end.

    *read* returns what can be had at once, as ``BufferedReader.read1`` does, so that what is told line by line is judged line by line.
    """
    rest = b""
    while chunk := read(BLOCK):
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest = (rest + chunk[:LONGEST])[:LONGEST]
            continue
        first = chunk.find(b"\n")
        yield plain(_cut(rest + chunk[:first]) + _TOO_LONG.sub(rb"\1", chunk[first:end]))
        rest = chunk[end:]
    if rest:
        yield plain(_cut(rest) + b"\n")


def plain(block: bytes) -> bytes:
    """Return *block* without colours and carriage returns at the ends of lines."""
    if b"\x1b" in block:
        block = _PAINT.sub(b"", block)
    return block.replace(b"\r\n", b"\n") if b"\r\n" in block else block


def _cut(line: bytes) -> bytes:
    return line[:LONGEST]
