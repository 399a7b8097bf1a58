"""Strides of tensors: contiguous strides, order of dimensions in memory, and whether a tensor is dense."""

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
    """Return the dimensions ordered by stride, the longest stride first."""
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor is dense: its elements fill a memory range without gaps or overlaps, in any order of dimensions."""
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
