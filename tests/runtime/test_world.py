"""Ranks find each other without losing time to each other's start."""

from __future__ import annotations

import socket
import threading

import pytest

from holdfast.host.ports import free_port
from holdfast.runtime import world


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Provide a port for the store, set in the environment, on which no process listens yet."""
    number = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return number


def test_an_early_rank_continues_as_soon_as_the_store_listens(port: int) -> None:
    """It has looked in vain, and then it is there: torch's own try, which would sleep half a second, finds it at once."""
    waiting = threading.Thread(target=world._await_store)
    waiting.start()
    with socket.create_server(("127.0.0.1", port)) as store:
        store.accept()[0].close()
        waiting.join(60)
    assert not waiting.is_alive()


def test_rank_0_does_not_wait(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that listens."""
    monkeypatch.setenv("RANK", "0")
    world._await_store()
    assert port


def test_an_unreachable_store_is_left_to_torch(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message is the one that people know and search for."""
    monkeypatch.setattr(world, "STORE_SECONDS", 0.05)
    world._await_store()
    assert port


def test_an_invalid_address_is_left_to_torch(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a valid address in the environment nothing is attempted."""
    monkeypatch.setenv("MASTER_PORT", "soon")
    world._await_store()
    assert port
