"""A stretch of a tensor's elements, as a checkpoint has to name it: in boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ChunkBox(NamedTuple):
    """A part of a tensor: where it begins and how long it is in every dimension; its elements lie one after the other."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def moved(self, by: Sequence[int]) -> ChunkBox:
        """Return the same box in a tensor in which this one's begins at *by*."""
        return ChunkBox(tuple(one + other for one, other in zip(self.offsets, by, strict=True)), self.sizes)

    def turned(self, order: Sequence[int]) -> ChunkBox:
        """Return the same box in a tensor whose dimensions, in the *order* in which they lie in memory, are this one's."""
        places = sorted(range(len(order)), key=order.__getitem__)
        return ChunkBox(tuple(self.offsets[one] for one in places), tuple(self.sizes[one] for one in places))


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[ChunkBox]:
    """Yield the boxes that elements *begin* to *end* of a contiguous tensor of this *shape* make up, in the order of the elements.

    They are at most two in each dimension but the first: a row that was begun, whole rows, a row that is not ended.
    """
    if not shape:
        if end > begin:
            yield ChunkBox((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row) if row else 0, end // row if row else 0
    if first > last:  # inside of one row
        yield from _inside(shape, last, begin, end)
        return
    if begin < first * row:
        yield from _inside(shape, first - 1, begin, first * row)
    if last > first:
        yield ChunkBox((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if end > last * row:
        yield from _inside(shape, last, last * row, end)


def _inside(shape: Sequence[int], number: int, begin: int, end: int) -> Iterator[ChunkBox]:
    row = math.prod(shape[1:])
    for box in boxes(shape[1:], begin - number * row, end - number * row):
        yield ChunkBox((number, *box.offsets), (1, *box.sizes))
