"""The shipped migrations make what the models say, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, create_engine, inspect, text

from holdfast.errors import HistoryCorrupt, HistoryTooOld
from holdfast.history import History, models, queries, schema
from tests.history.children import Child
from tests.history.postgres_server import PostgresServer
from tests.history.rows import a_job


def test_the_migrated_tables_are_those_of_the_models(history: History) -> None:
    """A changed model needs a revision in holdfast/history/migrations/versions."""
    with history.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, models.Job.metadata) == []
        assert {*inspect(connection).get_table_names()} == {table.name for table in models.TABLES} | {schema.VERSION_TABLE}


def test_the_newest_revision_is_the_one_that_opening_knows() -> None:
    """HEAD is written twice, so that opening needs no Alembic."""
    script = ScriptDirectory.from_config(schema.alembic_config())
    assert script.get_heads() == [schema.HEAD]


def test_the_migrations_are_shipped() -> None:
    """They lie in the package, not in the repository's root."""
    folder = files("holdfast.history") / "migrations"
    assert {"env.py", "script.py.mako", "versions"} <= {one.name for one in folder.iterdir()}


def test_a_migration_that_fails_leaves_nothing(history_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables or none, and the next start mends it."""
    from alembic import op  # noqa: PLC0415 (a proxy that is there once Alembic is)

    class Broken(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_index", refuse)
        with pytest.raises(Broken):
            History.open(history_url)
    reader = History.open(history_url, create=False)
    assert queries.jobs(reader) == []
    reader.close()
    engine = create_engine(history_url.replace("postgresql:", "postgresql+psycopg:"))
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    History.open(history_url).close()


def upgrade(connection: Connection, revision: str) -> None:
    """Bring the tables to *revision*, as a Holdfast of that time left them."""
    config = schema.alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def one_row_each(connection: Connection, mark: str) -> dict[str, dict[str, Any]]:
    """Put a row that holds *mark* into every table that there is at this revision; return them by table."""
    tables, rows = MetaData(), dict[str, dict[str, Any]]()
    tables.reflect(connection)
    for number, table in enumerate(sorted(tables.tables.values(), key=lambda one: one.name)):
        if table.name == schema.VERSION_TABLE:
            continue
        row = {column.name: _some(column, mark, number) for column in table.columns if not (column.nullable or column.server_default)}
        connection.execute(table.insert(), [row])
        rows[table.name] = row
    return rows


def _some(column: Column[Any], mark: str, number: int) -> Any:
    """Return a value for a column."""
    kind = column.type.python_type
    of: dict[type, Any] = {str: f"{mark}-{number}", int: int(mark) * 100 + number, float: float(mark), bool: True, dict: {"mark": mark}}
    return of[kind]


def test_every_revision_keeps_the_rows_of_those_before(history_url: str) -> None:
    """Rows are written at each revision as they were then; all are there, unchanged, once this Holdfast has opened the history."""
    engine = create_engine(history_url.replace("postgresql:", "postgresql+psycopg:"))
    script = ScriptDirectory.from_config(schema.alembic_config())
    revisions = [one.revision for one in reversed(list(script.walk_revisions()))]
    written: dict[str, dict[str, dict[str, Any]]] = {}
    for revision in revisions:
        with engine.begin() as connection:
            upgrade(connection, revision)
            written[revision] = one_row_each(connection, revision)
    History.open(history_url).close()
    with engine.connect() as connection:
        assert schema.revision_of(connection) == schema.HEAD
        tables = MetaData()
        tables.reflect(connection)
        assert set(written[schema.HEAD]) == {table.name for table in models.TABLES}
        for rows in written.values():
            for name, row in rows.items():
                table = tables.tables[name]
                key = [column == row[column.name] for column in table.primary_key]
                assert connection.execute(table.select().where(*key)).mappings().one().items() >= row.items()
    engine.dispose()


def test_of_two_processes_that_find_no_tables_one_makes_them(history_url: str, child: Callable[..., Child]) -> None:
    """The other one waits; both then see what is in them."""
    children = [child("open_at_the_signal", history_url) for _ in range(2)]
    assert [one.receive() for one in children] == ["ready"] * 2
    for one in children:
        one.send()
    assert [one.receive() for one in children] == ["opened 0"] * 2


@pytest.mark.parametrize("revision", ["0016", "0100", "0101"])
def test_a_history_of_an_earlier_revision_is_refused_and_unchanged(history_url: str, revision: str) -> None:
    """Tables up to revision 0101 have other names, and are not migrated."""
    engine = create_engine(history_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {schema.VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text(f"INSERT INTO {schema.VERSION_TABLE} VALUES ('{revision}')"))  # noqa: S608 (a constant)
        connection.execute(text("CREATE TABLE job (id VARCHAR NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO job VALUES ('j1')"))
    for create in (True, False):
        with pytest.raises(HistoryTooOld, match=rf"{revision}.*0102.*Nothing was changed.*HOLDFAST_HISTORY"):
            History.open(history_url, create=create)
    with engine.connect() as connection:
        assert {*inspect(connection).get_table_names()} == {schema.VERSION_TABLE, "job"}
        assert connection.scalars(text("SELECT id FROM job")).all() == ["j1"]
    engine.dispose()


def test_tables_without_a_revision_are_refused(history_url: str) -> None:
    """Nobody can know what they are: the history is named as damaged, and its rows are left alone."""
    history = History.open(history_url)
    with history.session() as session:
        session.add(a_job("kept"))
    with history.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {schema.VERSION_TABLE}"))
    history.close()
    with pytest.raises(HistoryCorrupt):
        History.open(history_url)


def test_a_postgresql_database_may_be_shared_with_another_alembic(postgres: PostgresServer) -> None:
    """Prefect keeps its own `alembic_version` there."""
    history_url = postgres.fresh_url()
    engine = create_engine(history_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num text)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    history = History.open(history_url)
    with history.session() as session:
        session.add(a_job())
    history.close()
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["theirs"]
    engine.dispose()
