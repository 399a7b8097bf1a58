"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("trouble", sa.String(), nullable=True),
        sa.Column("because", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_checkpoint_job_id", "checkpoint", ["job_id"])
    op.create_table(
        "decision",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("rung", sa.String(), nullable=False),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("act", sa.JSON(), nullable=False),
        sa.Column("passed_over", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_decision_incident_id", "decision", ["incident_id"])
    op.create_index("ix_decision_job_id", "decision", ["job_id"])
    op.create_table(
        "fault",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("level", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("blame", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("root", sa.Boolean(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_fault_incident_id", "fault", ["incident_id"])
    op.create_index("ix_fault_job_id", "fault", ["job_id"])
    op.create_table(
        "generation",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("port", sa.Integer(), nullable=False),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.Column("first_step_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("because", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_generation_job_id", "generation", ["job_id"])
    op.create_table(
        "incident",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("fault_at", sa.Float(), nullable=False),
        sa.Column("detected_at", sa.Float(), nullable=False),
        sa.Column("ordered_at", sa.Float(), nullable=True),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.Column("generation_before", sa.Integer(), nullable=False),
        sa.Column("generation_after", sa.Integer(), nullable=True),
        sa.Column("rung", sa.String(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("step_before", sa.BigInteger(), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("steps_lost", sa.BigInteger(), nullable=True),
        sa.Column("downtime_s", sa.Float(), nullable=True),
        sa.Column("because", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_incident_job_id", "incident", ["job_id"])
    op.create_table(
        "job",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("cluster", sa.JSON(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_job_name", "job", ["name"])
    op.create_table(
        "lease",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_table(
        "move",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_move_job_id", "move", ["job_id"])
    op.create_table(
        "node_move",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("standing", sa.String(), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_node_move_cluster", "node_move", ["cluster"])
    op.create_index("ix_node_move_node", "node_move", ["node"])
    op.create_table(
        "phase",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_phase_incident_id", "phase", ["incident_id"])
    op.create_index("ix_phase_job_id", "phase", ["job_id"])
    op.create_table(
        "remark",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_remark_job_id", "remark", ["job_id"])
    op.create_table(
        "request",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("by", sa.String(), nullable=False),
        sa.Column("handled_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_request_job_id", "request", ["job_id"])
    op.create_table(
        "step",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "generation", "step"),
    )
    op.create_index("ix_step_job_at", "step", ["job_id", "at"])
