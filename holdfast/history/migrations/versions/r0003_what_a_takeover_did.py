"""What a take-over did inside the workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add a column that older rows leave empty."""
    op.add_column("incident", sa.Column("facts", sa.JSON(none_as_null=True), nullable=True))
