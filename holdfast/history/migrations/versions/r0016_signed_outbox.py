"""The key that signs what a flow leaves with agents, and up to where that has been written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add three columns: a job without a key gets one when its lease is taken next."""
    op.add_column("lease", sa.Column("outbox_key", sa.String(), nullable=False, server_default=""))
    op.add_column("lease", sa.Column("settled_epoch", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("lease", sa.Column("settled_row", sa.BigInteger(), nullable=False, server_default="0"))
