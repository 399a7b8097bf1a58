"""What snapshots in memory were like, and cost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make a table: older jobs have no rows in it."""
    op.create_table(
        "snapshots",
        sa.Column("job_id", sa.String(), primary_key=True),
        sa.Column("generation", sa.Integer(), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("age_steps", sa.BigInteger(), nullable=True),
        sa.Column("age_s", sa.Float(), nullable=True),
        sa.Column("replica_step", sa.BigInteger(), nullable=True),
        sa.Column("every", sa.Integer(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("copied_s", sa.Float(), nullable=False),
        sa.Column("hidden_s", sa.Float(), nullable=False),
        sa.Column("cost_s", sa.Float(), nullable=False),
        sa.Column("trained_s", sa.Float(), nullable=False),
        sa.Column("ages", sa.JSON(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
    )
