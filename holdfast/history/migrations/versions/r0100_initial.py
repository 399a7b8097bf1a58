"""All tables, as one revision: nobody depended on those before.

Databases of the revisions before (0001 to 0016) are refused by `holdfast.history.schema`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0100"
down_revision = None


def upgrade() -> None:  # noqa: PLR0915 (two statements a table)
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
        sa.Column("beside", sa.Float(), nullable=True),
        sa.Column("problem", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_checkpoint_job_id", "checkpoint", ["job_id"])
    op.create_table(
        "decided_case",
        sa.Column("decision_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("decision_id"),
    )
    op.create_index("ix_decided_case_job_id", "decided_case", ["job_id"])
    op.create_table(
        "decision",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
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
        sa.Column("recommended_action", sa.String(), nullable=False),
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
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=True),
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
        sa.Column("commands_sent_at", sa.Float(), nullable=True),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.Column("generation_before", sa.Integer(), nullable=False),
        sa.Column("generation_after", sa.Integer(), nullable=True),
        sa.Column("action", sa.String(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("step_before", sa.BigInteger(), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("steps_lost", sa.BigInteger(), nullable=True),
        sa.Column("downtime_s", sa.Float(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=True),
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
        "last_look",
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("reading", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )
    op.create_table(
        "lease",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("deaf", sa.Boolean(), nullable=False),
        sa.Column("flow_run", sa.String(), nullable=False),
        sa.Column("flow_run_url", sa.String(), nullable=False),
        sa.Column("outbox_key", sa.String(), nullable=False),
        sa.Column("settled_epoch", sa.Integer(), nullable=False),
        sa.Column("settled_row", sa.BigInteger(), nullable=False),
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
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_move_job_id", "move", ["job_id"])
    op.create_table(
        "node_hold",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("person", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("faults", sa.JSON(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("drains", sa.Boolean(), nullable=False),
        sa.Column("leave_by", sa.Float(), nullable=True),
        sa.Column("test", sa.Integer(), nullable=False),
        sa.Column("newest_test", sa.Integer(), nullable=False),
        sa.Column("test_until", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("ended_by", sa.String(), nullable=False),
        sa.Column("ended_reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("cluster", "node", "number"),
    )
    op.create_index("ix_node_hold_cluster", "node_hold", ["cluster"])
    op.create_index("ix_node_hold_node", "node_hold", ["node"])
    op.create_table(
        "node_move",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_node_move_cluster", "node_move", ["cluster"])
    op.create_index("ix_node_move_node", "node_move", ["node"])
    op.create_table(
        "node_verdict",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_node_verdict_cluster", "node_verdict", ["cluster"])
    op.create_index("ix_node_verdict_node", "node_verdict", ["node"])
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
        "question",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("about", sa.String(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("otherwise", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("flow_run", sa.String(), nullable=True),
        sa.Column("answered_at", sa.Float(), nullable=True),
        sa.Column("answer", sa.String(), nullable=False),
        sa.Column("picked", sa.JSON(), nullable=False),
        sa.Column("by", sa.String(), nullable=False),
        sa.Column("words", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("number"),
    )
    op.create_index("ix_question_job_id", "question", ["job_id"])
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
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("done", sa.Boolean(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_request_job_id", "request", ["job_id"])
    op.create_table(
        "service_move",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("person", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("hold", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("cluster", "node", "number"),
    )
    op.create_index("ix_service_move_cluster", "service_move", ["cluster"])
    op.create_index("ix_service_move_node", "service_move", ["node"])
    op.create_table(
        "snapshots",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("age_steps", sa.BigInteger(), nullable=True),
        sa.Column("age_s", sa.Float(), nullable=True),
        sa.Column("replica_step", sa.BigInteger(), nullable=True),
        sa.Column("every", sa.Integer(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("copied_s", sa.Float(), nullable=False),
        sa.Column("overlapped_s", sa.Float(), nullable=False),
        sa.Column("cost_s", sa.Float(), nullable=False),
        sa.Column("trained_s", sa.Float(), nullable=False),
        sa.Column("ages", sa.JSON(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "generation"),
    )
    op.create_table(
        "standby_flow",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("problem", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("job", "host"),
    )
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
    op.create_table(
        "verdict",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("candidates", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_verdict_incident_id", "verdict", ["incident_id"])
    op.create_index("ix_verdict_job_id", "verdict", ["job_id"])
    op.create_table(
        "weighing",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("act", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_weighing_job_id", "weighing", ["job_id"])
