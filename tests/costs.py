"""How the cost of reading a text grows with its length, in processor time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T", str, bytes)

SMALL: Final = 0.003
"""Seconds below which a text costs nothing worth a look: a square would have shown at these sizes."""
MOST: Final = 3.0
"""A text of twice the length may cost so many times as much: twice is a straight line, four times the square."""

RUNS: Final = (
    "0123456789abcdef",
    "-",
    "7",
    "a",
    " ",
    "a:",
    "token",
    "Error ",
    "\x1b]",
    "AB",
    "1/",
    "9%",
    "a=",
    "_",
    "rx_discards",
    "( ",
    '\\"',
)
"""What fills a line: runs without a blank, and words that signatures begin with."""


def filled(piece: T, length: int) -> T:
    """Return *piece*, again and again, so long."""
    return (piece * (length // len(piece) + 1))[:length]


def seconds(read: Callable[[T], object], text: T) -> float:
    """Return what it costs to *read* a text once: the least of three times, as a busy machine adds and never takes away."""

    def once() -> float:
        begin = time.process_time()
        read(text)
        return time.process_time() - begin

    return min(once() for _ in range(3))


def growth(read: Callable[[T], object], piece: T, length: int = 8192) -> float:
    """Return how many times as much a text of *piece* costs that is twice as long as *length*; 0 where it costs next to nothing."""
    if seconds(read, filled(piece, length)) < SMALL:
        return 0.0
    return min(seconds(read, filled(piece, 2 * length)) / seconds(read, filled(piece, length)) for _ in range(2))
