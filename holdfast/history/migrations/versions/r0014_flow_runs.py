"""Which Prefect flow run a job's controller runs in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add two columns."""
    op.add_column("lease", sa.Column("flow_run", sa.String(), nullable=False, server_default=""))
    op.add_column("lease", sa.Column("flow_run_url", sa.String(), nullable=False, server_default=""))
