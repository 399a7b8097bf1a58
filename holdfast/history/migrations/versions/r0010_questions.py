"""What persons are asked before a program may isolate nodes, and what they answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Make a table: an answer comes from another process, hours later, or never."""
    op.create_table(
        "question",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("number", sa.Integer(), nullable=False, unique=True),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("about", sa.String(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("otherwise", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("flow_run", sa.String(), nullable=True),
        sa.Column("answered_at", sa.Float(), nullable=True),
        sa.Column("answer", sa.String(), nullable=False),
        sa.Column("picked", sa.JSON(), nullable=False),
        sa.Column("by", sa.String(), nullable=False),
        sa.Column("words", sa.String(), nullable=False),
    )
    op.create_index(op.f("ix_question_job_id"), "question", ["job_id"])
