"""Whether the flow that steers a job hears any node of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add a column."""
    op.add_column("lease", sa.Column("deaf", sa.Boolean(), nullable=False, server_default=sa.false()))
