"""``python -m holdfast.prefect.serve OPTION...``: ``prefect server start OPTION...``, without the minute in which SQLite stops it.

Prefect reaches SQLite through aiosqlite, which has a thread for each connection. A cursor whose statement failed ("database is locked",
for example, which Prefect's clients try again) keeps its statement until it is freed, and that happens in the thread of the event loop.
To free it takes the connection's mutex. When the connection waits for SQLite's write lock meanwhile, it has that mutex for up to 60 s
(Prefect's busy timeout), and the one who has the write lock cannot give it back, as the event loop stands still: the server answers
nobody for a minute. Seen with Python 3.11 and Prefect 3.8 when six flows wrote at the same time, about once in a minute.
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
