"""Holds by which jobs are to leave a node, and by when; what was decided about slow ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add two columns, as who trained on a node that was held before this went on there; and a table."""
    op.add_column("node_hold", sa.Column("drains", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("node_hold", sa.Column("leave_by", sa.Float(), nullable=True))
    op.create_table(
        "weighing",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("act", sa.String(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
    )
    op.create_index(op.f("ix_weighing_job_id"), "weighing", ["job_id"])
