"""Tests of training frameworks that are too large for the usual environment: `make frameworks` makes one that has them."""

from __future__ import annotations

import pytest


def needs(library: str) -> None:
    """Skip the module that calls this where *library* is not installed."""
    pytest.importorskip(library, reason=f"{library} is not installed: `make frameworks` runs these tests")
