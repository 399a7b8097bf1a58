"""What each decision was made from, so that another policy can be asked the same."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Make a table: cases are larger than decisions, and hardly anybody who reads the one reads the other."""
    op.create_table(
        "decided_case",
        sa.Column("decision_id", sa.String(), primary_key=True),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
    )
    op.create_index(op.f("ix_decided_case_job_id"), "decided_case", ["job_id"])
