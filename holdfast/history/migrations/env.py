"""Run the migrations in the transaction that the caller holds: all of them happen, or none."""

from __future__ import annotations

from alembic import context

from holdfast.history import models
from holdfast.history.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=models.Job.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite changes a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
