"""What is set aside is not looked at by collections, and not lost either."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast.control.config import gc_tuning


class Knot:
    """Something that only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_dies_after_it_was_set_aside_is_freed_by_the_look_at_all() -> None:
    """And by no collection before it, which would have had to look at everything."""
    knot = Knot()
    seen = weakref.ref(knot)
    gc_tuning.collect_and_freeze()
    del knot
    gc.collect()
    assert seen() is not None
    gc_tuning.collect_everything()
    assert seen() is None


def test_what_is_dead_already_is_not_set_aside() -> None:
    """It is freed at once."""
    seen = weakref.ref(Knot())
    gc_tuning.collect_and_freeze()
    assert seen() is None
