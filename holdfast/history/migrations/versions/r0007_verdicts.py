"""The explanations of an incident that were weighed, each with its evidence."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Make a table: older incidents have no rows in it."""
    op.create_table(
        "verdict",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("candidates", sa.JSON(), nullable=False),
    )
    op.create_index("ix_verdict_job_id", "verdict", ["job_id"])
    op.create_index("ix_verdict_incident_id", "verdict", ["incident_id"])
