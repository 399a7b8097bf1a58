"""What is known of the processes of a generation, and what came of a request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add columns that older rows leave empty."""
    op.add_column("generation", sa.Column("facts", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("request", sa.Column("facts", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("request", sa.Column("done", sa.Boolean(), nullable=True))
    op.add_column("request", sa.Column("outcome", sa.String(), nullable=True))
