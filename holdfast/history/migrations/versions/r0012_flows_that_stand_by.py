"""Flows that stand by, and what each waits for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add a table."""
    op.create_table(
        "standby_flow",
        sa.Column("job", sa.String(), primary_key=True),
        sa.Column("host", sa.String(), primary_key=True),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("trouble", sa.String(), nullable=False),
    )
