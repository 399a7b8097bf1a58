"""Checkpoints that are written out of memory while training goes on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add a column that older rows leave empty."""
    op.add_column("checkpoint", sa.Column("beside", sa.Float(), nullable=True))
