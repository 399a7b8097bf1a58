"""A column for what a job was submitted with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0102"
down_revision = "0101"


def upgrade() -> None:
    """Add the column; jobs from before have nothing in it."""
    op.add_column("job", sa.Column("provenance", sa.JSON(none_as_null=True), nullable=True))
