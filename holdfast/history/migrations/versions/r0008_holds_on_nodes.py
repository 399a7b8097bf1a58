"""Holds on nodes, and their moves in and out of service."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Make two tables: nodes of older histories are healthy."""
    op.create_table(
        "node_hold",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("person", sa.Boolean(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("test", sa.Integer(), nullable=False),
        sa.Column("newest_test", sa.Integer(), nullable=False),
        sa.Column("test_until", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("ended_by", sa.String(), nullable=False),
        sa.Column("ended_because", sa.String(), nullable=False),
        sa.UniqueConstraint("cluster", "node", "number"),
    )
    op.create_table(
        "service_move",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("person", sa.Boolean(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("hold", sa.Integer(), nullable=False),
        sa.UniqueConstraint("cluster", "node", "number"),
    )
    for table in ("node_hold", "service_move"):
        for column in ("cluster", "node"):
            op.create_index(f"ix_{table}_{column}", table, [column])
