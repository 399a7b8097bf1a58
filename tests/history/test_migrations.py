"""The shipped migrations make what the models say, on both databases."""

from __future__ import annotations

from importlib.resources import files

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from holdfast.errors import HistoryCorrupt
from holdfast.history import History, models, queries, schema
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


def test_a_history_from_before_snapshots_opens_with_all_its_jobs(history_url: str) -> None:
    """It is migrated, and its jobs have no snapshots on record."""
    engine = create_engine(history_url.replace("postgresql:", "postgresql+psycopg:"))
    config = schema.alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        columns = {"id": "'j1'", "name": "'old'", "spec": "'{}'", "cluster": "'{}'", "directory": "'/'", "at": "1.0"}
        connection.execute(text(f"INSERT INTO job ({', '.join(columns)}) VALUES ({', '.join(columns.values())})"))  # noqa: S608 (constants)
    engine.dispose()
    history = History.open(history_url)
    assert queries.newest_job(history, "old").id == "j1"
    assert queries.snapshots(history, "j1") == []
    assert queries.newest_snapshots(history, "j1") is None
    history.close()


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
        assert connection.execute(text("SELECT * FROM alembic_version")).all() == [("theirs",)]
    engine.dispose()
