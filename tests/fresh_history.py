"""Empty histories for tests that are about what stands in them: the tables of SQLite are made once a process, and copied from then on.

Making them takes thirty milliseconds of a core, and the import of alembic; that it works is what the tests of `holdfast.history` show.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from holdfast.history.store import History


def fresh_history(file: Path) -> History:
    """Open an empty history in *file*, which does not exist yet."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600, exist_ok=False)
    file.write_bytes(_empty())
    return History.open(f"sqlite:///{file}")


@functools.cache
def _empty() -> bytes:
    """Return what an empty history has in its file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "history.db"
        History.open(f"sqlite:///{file}").close()
        assert [one.name for one in file.parent.iterdir()] == [file.name], "what is written stands in one file once nobody has it open"
        return file.read_bytes()
