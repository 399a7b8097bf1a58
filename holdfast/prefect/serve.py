"""``python -m holdfast.prefect.serve OPTION...``: ``prefect server start OPTION...`` without a deadlock that SQLite causes.

Prefect reaches SQLite through aiosqlite, which runs each connection in a thread of its own. A cursor whose statement failed ("database is
locked", for example, after which Prefect's clients try again) keeps the statement until the cursor is freed, and the event loop frees it.
That takes the connection's mutex. If the connection is waiting for SQLite's write lock by then, it holds the mutex for up to 60 s
(Prefect's busy timeout), and the coroutine that has the write lock cannot release it, because the event loop is blocked. Until the
timeout the server answers no request. Seen with Python 3.11 and Prefect 3.8 when six flows wrote at the same time.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiosqlite


def close_failed_cursors() -> None:
    """Have each cursor of aiosqlite whose operation fails closed at once, in the thread of its connection.

    All that a cursor of aiosqlite 0.17 to 0.22 does goes through one method; a version without it is left as it is.
    """
    run: Callable[..., Awaitable[object]] | None = getattr(aiosqlite.Cursor, "_execute", None)
    if run is None:
        return

    async def run_or_close(self: aiosqlite.Cursor, fn: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return await run(self, fn, *args, **kwargs)
        except Exception:
            with suppress(Exception):  # a connection that is closed has no thread any more
                await run(self, self._cursor.close)
            raise

    aiosqlite.Cursor._execute = run_or_close  # type: ignore[method-assign] # noqa: SLF001


if __name__ == "__main__":
    close_failed_cursors()
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__")
