"""Fixtures that the tests of the controller's parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.history import History


@pytest.fixture
def history(holdfast_home: Path) -> Iterator[History]:
    """Return the empty history of this home."""
    opened = History.open(f"sqlite:///{holdfast_home / 'history.db'}")
    yield opened
    opened.close()
