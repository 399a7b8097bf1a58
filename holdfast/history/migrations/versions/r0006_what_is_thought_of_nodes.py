"""What looks from outside tell of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Make two tables: what changed about nodes, and the last look at each."""
    op.create_table(
        "node_verdict",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
    )
    op.create_index(op.f("ix_node_verdict_cluster"), "node_verdict", ["cluster"])
    op.create_index(op.f("ix_node_verdict_node"), "node_verdict", ["node"])
    op.create_table(
        "last_look",
        sa.Column("cluster", sa.String(), primary_key=True),
        sa.Column("node", sa.String(), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("reading", sa.String(), nullable=True),
    )
