"""Bring a database's tables to what this version of Holdfast needs. Alembic is imported only when something must change."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, text

from holdfast.errors import HistoryCorrupt, HistoryTooNew, HistoryTooOld

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0100"
"""The newest revision in ``migrations/versions``: known here, so that an up-to-date database needs no Alembic."""

_FIRST: Final = "0100"
"""The revision that all tables begin with. Before it there were 16 others, with other names of tables and columns."""

VERSION_TABLE: Final = "holdfast_schema"
"""Holds the revision. A name of our own: another program's Alembic may live in the same PostgreSQL database."""

_ONE_AT_A_TIME: Final = 0x686F6C64_66617374
"""Key of PostgreSQL's advisory lock that serialises migrations ("holdfast")."""

_alembic_is_global = threading.Lock()


def revision_of(connection: Connection) -> str | None:
    """Return the revision that the database is at; empty when it has none of our tables."""
    if not connection.dialect.has_table(connection, VERSION_TABLE):
        return None
    row = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).first()  # noqa: S608 (a constant)
    return None if row is None else str(row[0])


def bring_to_head(engine: Engine, url: str) -> None:
    """Migrate the database behind *engine* (*url* in messages) to `HEAD`, in one transaction; of two processes, one waits."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ONE_AT_A_TIME})
        revision = revision_of(connection)
        if revision == HEAD:  # the other one was first
            return
        if revision is None:
            refuse_another_programs(connection, url)
        elif revision < _FIRST:
            raise HistoryTooOld(url, f"its tables are at revision {revision}, this Holdfast begins with {_FIRST}")
        _upgrade(connection, url, revision)


def refuse_another_programs(connection: Connection, url: str) -> None:
    """Raise `HistoryCorrupt` for an SQLite file without our tables that has others; a PostgreSQL database may be shared."""
    if connection.dialect.name != "sqlite":
        return
    tables = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name LIMIT 3")).scalars().all()
    if tables:
        raise HistoryCorrupt(url, f"it is the database of another program (it has {', '.join(tables)})")


def alembic_config() -> Config:
    """Return the configuration that other projects keep in ``alembic.ini``."""
    from alembic.config import Config  # noqa: PLC0415 (0.2 s, and hardly ever needed)

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(connection: Connection, url: str, revision: str | None) -> None:
    """Run the migrations from *revision* on inside the connection's transaction."""
    from alembic import command  # noqa: PLC0415 (0.2 s, and hardly ever needed)
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = alembic_config()
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise HistoryTooNew(url, f"its tables are at revision {revision}, this Holdfast knows up to {HEAD}")
    with _alembic_is_global:
        command.upgrade(config, HEAD)
