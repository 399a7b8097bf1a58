"""How the elements of a tensor lie in memory: whether they fill it, and in which order."""

from __future__ import annotations

from collections.abc import Sequence


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this *shape*."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions in the order in which they lie in memory, the one with the longest stride first."""
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether a tensor fills its memory: every place belongs to exactly one element, in whatever order the dimensions lie."""
    if len(shape) != len(strides):
        return False
    if 0 in shape:
        return True
    step = 1
    for dimension in sorted((one for one, size in enumerate(shape) if size > 1), key=lambda one: strides[one]):
        if strides[dimension] != step:
            return False
        step *= shape[dimension]
    return True
