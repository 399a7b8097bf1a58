"""Hosts for tests: skipped, with the reason, where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.hosts.rack import NoHosts, Rack


@contextmanager
def rack_of(count: int, places: pytest.TempPathFactory, **fields: Any) -> Iterator[Rack]:
    """Give so many hosts; skip the test where there can be none."""
    try:
        rack = Rack(places.mktemp("rack"), count, **fields)
    except NoHosts as why:
        pytest.skip(str(why))
    with rack, pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)  # who runs the tests has keys of the rack alone
        yield rack
