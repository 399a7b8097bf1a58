"""Frozen objects are not collected by ordinary collections, and are not lost either."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast.control.config import gc_tuning


class Knot:
    """An object that only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_objects_that_die_after_the_freeze_are_freed_by_the_full_collection() -> None:
    """And by no collection before it, which would have to walk over everything."""
    knot = Knot()
    seen = weakref.ref(knot)
    gc_tuning.collect_and_freeze()
    del knot
    gc.collect()
    assert seen() is not None
    gc_tuning.collect_everything()
    assert seen() is None


def test_dead_objects_are_not_frozen() -> None:
    """They are freed at once."""
    seen = weakref.ref(Knot())
    gc_tuning.collect_and_freeze()
    assert seen() is None
