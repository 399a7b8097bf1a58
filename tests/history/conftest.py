"""Histories on both databases, and child processes that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.history import History
from tests.history.children import Child
from tests.history.postgres_server import MISSING, PostgresServer, programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Give a running PostgreSQL server; without the package the test fails, so that half of the claims is not dropped in silence."""
    found = programs()
    if found is None:
        pytest.fail(MISSING)
    server = PostgresServer(found)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def history_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of a fresh database: the claim must hold on both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'history.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.fresh_url()


@pytest.fixture
def history(history_url: str) -> Iterator[History]:
    """Give an open, empty history."""
    opened = History.open(history_url)
    yield opened
    opened.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Give a starter of child processes (functions of children.py); none outlives the test."""
    started: list[Child] = []

    def start(name: str, *arguments: str) -> Child:
        started.append(Child(name, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.end()
