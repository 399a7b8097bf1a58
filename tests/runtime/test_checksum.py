"""Checksums of snapshots: one definition, computed in three ways, and always of what was copied."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoints.verify import fast_sum
from holdfast.memstore.shared_memory import PAGE, SLICE_BYTES, Snapshot, UnusableSnapshot, labels, word_sum
from holdfast.runtime.snapshots.checksum import device_sums, sum_of
from tests.runtime.trainer import FIRST, Trainer, opened


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close all snapshotters when a test has ended."""
    yield
    while opened:
        opened.pop().close()


def all_alike(data: bytearray, begin: int) -> None:
    """Assert that every way finds the same sum of *data* from *begin* on."""
    part = torch.frombuffer(data, dtype=torch.uint8)[begin:] if len(data) > begin else torch.empty(0, dtype=torch.uint8)
    wanted = word_sum(memoryview(data)[begin:])
    assert sum_of(part) == wanted
    assert fast_sum(memoryview(data)[begin:]) == wanted
    if len(part) <= SLICE_BYTES:
        padded = torch.zeros(2 * SLICE_BYTES, dtype=torch.uint8)
        padded[SLICE_BYTES : SLICE_BYTES + len(part)] = part
        assert [int(one) % 2**64 for one in device_sums(padded)] == [0, wanted]


@given(st.binary(max_size=200), st.integers(0, 9))
@settings(deadline=None)
def test_every_implementation_computes_the_same_sum(data: bytes, begin: int) -> None:
    """Of any length, wherever in memory it begins."""
    all_alike(bytearray(data), begin)


@pytest.mark.parametrize("size", [SLICE_BYTES - 4, SLICE_BYTES, SLICE_BYTES + 1, 2 * SLICE_BYTES + 13])
def test_every_implementation_computes_the_same_sum_of_full_slices(size: int) -> None:
    """Of about the length of a slice, and of more than one."""
    all_alike(bytearray(random.Random(size).randbytes(size)), 0)


def test_a_device_sums_whole_slices() -> None:
    """What fills up the last one must be there, and be zeros."""
    with pytest.raises(ValueError, match="not whole slices"):
        device_sums(torch.zeros(SLICE_BYTES + 1, dtype=torch.uint8))


def _swapped_words(copy: memoryview) -> None:
    copy[:8], copy[8:16] = bytes(copy[8:16]), bytes(copy[:8])


def _swapped_pages(copy: memoryview) -> None:
    copy[:PAGE], copy[PAGE : 2 * PAGE] = bytes(copy[PAGE : 2 * PAGE]), bytes(copy[:PAGE])


def _moved_on(copy: memoryview) -> None:
    copy[:] = bytes(copy[PAGE:]) + bytes(copy[:PAGE])


@pytest.mark.parametrize("damage", [_swapped_words, _swapped_pages, _moved_on])
def test_a_damaged_copy_is_not_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    """The sum is that of the state, so a copy with the right bytes in the wrong places is found."""
    trainer = Trainer(tmp_path)
    real, done = ctypes.memmove, []

    def wrong(to: int, source: int, size: int) -> int:
        result = real(to, source, size)
        if size > 2 * PAGE:
            damage(memoryview((ctypes.c_char * size).from_address(to)).cast("B"))  # type: ignore[operator]
            done.append(size)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "memmove", wrong)
        trainer.to(FIRST + 2)
    assert done
    for path in labels(tmp_path):
        with Snapshot(path) as one, pytest.raises(UnusableSnapshot, match="changed in memory"):
            one.verify()
