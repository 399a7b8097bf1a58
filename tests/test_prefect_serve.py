"""A Prefect server on SQLite that Holdfast starts keeps answering after a statement has failed."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import sys
from pathlib import Path

import aiosqlite
import pytest

from holdfast.prefect.serve import close_failed_cursors
from tests.waiting import wait_until


async def free_a_failed_cursor(database: Path, *, patience: float) -> None:
    """Free the cursor of a failed statement while its connection waits for a lock that another one holds; then release the lock.

    The connection waits for *patience* seconds.
    """
    begun: list[str] = []
    async with (
        aiosqlite.connect(database, isolation_level=None) as holder,
        aiosqlite.connect(database, isolation_level=None, timeout=patience) as waiter,
    ):
        await holder.execute("CREATE TABLE number (value UNIQUE)")
        await holder.execute("INSERT INTO number VALUES (1)")
        cursor = await waiter.cursor()
        with pytest.raises(sqlite3.IntegrityError):
            await cursor.execute("INSERT INTO number VALUES (1)")
        await waiter.set_trace_callback(begun.append)
        await holder.execute("BEGIN IMMEDIATE")
        waits = asyncio.create_task(waiter.execute("INSERT INTO number VALUES (2)"))
        await asyncio.sleep(0)  # for the task to hand it over to the connection's thread
        wait_until(lambda: begun, seconds=60)
        del cursor
        gc.collect()  # the error refers to it in a circle
        await holder.execute("ROLLBACK")
        await waits


def test_a_failed_cursor_no_longer_stops_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpatched it does, until the waiting connection gives up: once the first half of this test fails, `holdfast.prefect.serve` can go."""
    monkeypatch.setattr(aiosqlite.Cursor, "_execute", aiosqlite.Cursor._execute)  # put back after the test
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        asyncio.run(free_a_failed_cursor(tmp_path / "as-it-is.db", patience=1))
    close_failed_cursors()
    asyncio.run(free_a_failed_cursor(tmp_path / "with-ours.db", patience=60))


def test_it_takes_the_options_of_prefects_command() -> None:
    """It is that command, patched."""
    ran = subprocess.run([sys.executable, "-m", "holdfast.prefect.serve", "--help"], capture_output=True, text=True, check=True)
    assert "prefect server start" in ran.stdout
    assert "--port" in ran.stdout
