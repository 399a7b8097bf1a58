"""Fixtures that the tests of the controller's parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.history import History
from tests.fresh_history import fresh_history


@pytest.fixture
def history(holdfast_home: Path) -> Iterator[History]:
    """Return the empty history of this home."""
    opened = fresh_history(holdfast_home / "history.db")
    yield opened
    opened.close()
