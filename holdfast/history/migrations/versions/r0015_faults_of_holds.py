"""The faults that a node is held for: a burn-in has to exercise the parts that had them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add a column: older holds name no faults."""
    op.add_column("node_hold", sa.Column("faults", sa.JSON(), nullable=False, server_default="[]"))
