"""Migrate a database's tables to what this version of Holdfast needs. Alembic is imported only if something must change."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, text

from holdfast.errors import HistoryCorrupt, HistoryTooNew, HistoryTooOld

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0102"
"""The newest revision in ``migrations/versions``, written here so that an up-to-date database needs no Alembic."""

_FIRST: Final = "0102"
"""The revision that creates all tables. Databases of earlier revisions have other tables and columns, and are refused."""

VERSION_TABLE: Final = "holdfast_schema"
"""Holds the revision. Alembic's default name may be in use by another program in the same PostgreSQL database."""

_MIGRATION_LOCK: Final = 0x686F6C64_66617374
"""Key of PostgreSQL's advisory lock that serialises migrations ("holdfast")."""

_alembic_lock = threading.Lock()
"""Alembic keeps its context in module globals."""


def revision_of(connection: Connection) -> str | None:
    """Return the revision of the database; None if it has none of our tables."""
    if not connection.dialect.has_table(connection, VERSION_TABLE):
        return None
    row = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).first()  # noqa: S608 (a constant)
    return None if row is None else str(row[0])


def upgrade_to_head(engine: Engine, url: str) -> None:
    """Migrate the database behind *engine* (*url* in messages) to `HEAD` in one transaction; a second process waits.

    Raise `HistoryTooOld` or `HistoryTooNew` for a revision that cannot be migrated, and `HistoryCorrupt` for another program's file.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        revision = revision_of(connection)
        if revision == HEAD:  # another process migrated it
            return
        if revision is None:
            refuse_foreign_file(connection, url)
        elif revision < _FIRST:
            raise HistoryTooOld(url, f"its tables have revision {revision}, this version needs {_FIRST} or later")
        _upgrade(connection, url, revision)


def refuse_foreign_file(connection: Connection, url: str) -> None:
    """Raise `HistoryCorrupt` for an SQLite file that has tables but not ours; a PostgreSQL database may be shared."""
    if connection.dialect.name != "sqlite":
        return
    tables = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name LIMIT 3")).scalars().all()
    if tables:
        raise HistoryCorrupt(url, f"it is the database of another program (it has {', '.join(tables)})")


def alembic_config() -> Config:
    """Return Alembic's configuration; there is no ``alembic.ini``."""
    from alembic.config import Config  # noqa: PLC0415 (0.2 s, and rarely needed)

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(connection: Connection, url: str, revision: str | None) -> None:
    """Run the migrations from *revision* on in the connection's transaction."""
    from alembic import command  # noqa: PLC0415 (0.2 s, and rarely needed)
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = alembic_config()
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise HistoryTooNew(url, f"its tables have revision {revision}, this version knows up to {HEAD}")
    with _alembic_lock:
        command.upgrade(config, HEAD)
