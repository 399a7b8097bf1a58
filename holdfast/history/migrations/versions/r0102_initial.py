"""All tables, as one revision. `holdfast.history.schema` refuses databases of earlier revisions, whose tables have other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0102"
down_revision = None


def _of_type(kind: type[sa.types.TypeEngine[Any]]) -> Callable[..., sa.Column[Any]]:
    """Return a maker of columns of that type: NOT NULL unless they are said to be nullable."""

    def column(name: str, *, nullable: bool = False) -> sa.Column[Any]:
        return sa.Column(name, sa.JSON(none_as_null=nullable) if kind is sa.JSON else kind(), nullable=nullable)

    return column


text, integer, bigint, real, boolean, json = map(_of_type, (sa.String, sa.Integer, sa.BigInteger, sa.Float, sa.Boolean, sa.JSON))


def upgrade() -> None:  # noqa: PLR0915 (two statements per table)
    """Create all tables."""
    op.create_table(
        "approval_request",
        text("id"), integer("number"), text("cluster"), text("job_id"), text("job"), text("about"), json("nodes"), text("reason"),
        text("otherwise"), real("at"), real("until"), text("flow_run", nullable=True), real("answered_at", nullable=True),
        text("answer"), json("picked"), text("by"), text("comment"),
        sa.PrimaryKeyConstraint("id"), sa.UniqueConstraint("number"),
    )  # fmt: skip
    op.create_index("ix_approval_request_job_id", "approval_request", ["job_id"])
    op.create_table(
        "checkpoint",
        text("id"), text("job_id"), real("at"), bigint("step", nullable=True), integer("generation"), text("path"),
        real("seconds", nullable=True), bigint("size", nullable=True), real("overlapped_s", nullable=True),
        text("problem", nullable=True), text("reason"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_checkpoint_job_id", "checkpoint", ["job_id"])
    op.create_table(
        "decided_case",
        text("decision_id"), text("job_id"), json("record"),
        sa.PrimaryKeyConstraint("decision_id"),
    )  # fmt: skip
    op.create_index("ix_decided_case_job_id", "decided_case", ["job_id"])
    op.create_table(
        "decision",
        text("id"), text("job_id"), text("incident_id"), real("at"), text("action"), text("rule"), text("reason"), json("act"),
        json("passed_over"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_decision_incident_id", "decision", ["incident_id"])
    op.create_index("ix_decision_job_id", "decision", ["job_id"])
    op.create_table(
        "fault",
        text("id"), text("job_id"), text("incident_id", nullable=True), real("at"), text("kind"), text("recommended_action"),
        text("target"),
        text("attributed_to"), integer("rank", nullable=True), text("node", nullable=True), integer("generation"),
        bigint("step", nullable=True), boolean("root"), json("evidence"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_fault_incident_id", "fault", ["incident_id"])
    op.create_index("ix_fault_job_id", "fault", ["job_id"])
    op.create_table(
        "generation",
        text("id"), text("job_id"), integer("number"), real("at"), integer("world_size"), json("ranks"), integer("port"),
        bigint("resumed_step", nullable=True), bigint("until", nullable=True), real("first_step_at", nullable=True),
        real("ended_at", nullable=True), text("reason"), json("facts", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_generation_job_id", "generation", ["job_id"])
    op.create_table(
        "health_sample",
        text("cluster"), text("node"), real("at"), json("health"), text("reading", nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )  # fmt: skip
    op.create_table(
        "incident",
        text("id"), text("job_id"), integer("number"), text("kind"), text("target"), real("fault_at"), real("detected_at"),
        real("commands_sent_at", nullable=True), real("closed_at", nullable=True), integer("generation_before"),
        integer("generation_after", nullable=True), text("action", nullable=True), text("outcome", nullable=True),
        bigint("step_before", nullable=True), bigint("resumed_step", nullable=True), bigint("steps_lost", nullable=True),
        real("downtime_s", nullable=True), text("reason"), json("facts", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_incident_job_id", "incident", ["job_id"])
    op.create_table(
        "incident_diagnosis",
        text("id"), text("job_id"), text("incident_id"), real("at"), text("kind"), text("target"), real("confidence"), text("reason"),
        json("candidates"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_incident_diagnosis_incident_id", "incident_diagnosis", ["incident_id"])
    op.create_index("ix_incident_diagnosis_job_id", "incident_diagnosis", ["job_id"])
    op.create_table(
        "job",
        text("id"), text("name"), json("spec"), json("cluster"), text("directory"), real("at"), json("provenance", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_job_name", "job", ["name"])
    op.create_table(
        "job_event",
        text("id"), text("job_id"), real("at"), text("text"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_job_event_job_id", "job_event", ["job_id"])
    op.create_table(
        "job_transition",
        text("id"), text("job_id"), real("at"), text("before"), text("event"), text("after"), text("reason"), integer("generation"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_job_transition_job_id", "job_transition", ["job_id"])
    op.create_table(
        "lease",
        text("job_id"), integer("epoch"), text("holder"), text("host"), integer("pid"), real("pid_started"), real("expires_at"),
        boolean("partitioned"), text("flow_run"), text("flow_run_url"), text("outbox_key"), integer("settled_epoch"),
        bigint("settled_row"),
        sa.PrimaryKeyConstraint("job_id"),
    )  # fmt: skip
    op.create_table(
        "node_cordon",
        text("id"), text("cluster"), text("node"), integer("number"), text("kind"), text("owner"), boolean("person"), text("reason"),
        json("evidence"), json("faults"), real("at"), real("until", nullable=True), boolean("drains"), real("leave_by", nullable=True),
        integer("test"), integer("newest_test"), real("test_until", nullable=True), real("ended_at", nullable=True), text("ended_by"),
        text("ended_reason"),
        sa.PrimaryKeyConstraint("id"), sa.UniqueConstraint("cluster", "node", "number"),
    )  # fmt: skip
    op.create_index("ix_node_cordon_cluster", "node_cordon", ["cluster"])
    op.create_index("ix_node_cordon_node", "node_cordon", ["node"])
    op.create_table(
        "node_health_change",
        text("id"), text("cluster"), text("node"), real("at"), text("before"), text("after"), text("reason"), json("facts"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_node_health_change_cluster", "node_health_change", ["cluster"])
    op.create_index("ix_node_health_change_node", "node_health_change", ["node"])
    op.create_table(
        "node_status_change",
        text("id"), text("cluster"), text("node"), real("at"), text("status"), text("reason"), text("job_id", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_node_status_change_cluster", "node_status_change", ["cluster"])
    op.create_index("ix_node_status_change_node", "node_status_change", ["node"])
    op.create_table(
        "phase",
        text("id"), text("job_id"), text("incident_id"), integer("position"), text("name"), real("seconds"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_phase_incident_id", "phase", ["incident_id"])
    op.create_index("ix_phase_job_id", "phase", ["job_id"])
    op.create_table(
        "request",
        text("id"), text("job_id"), real("at"), text("kind"), text("by"), real("handled_at", nullable=True),
        json("facts", nullable=True), boolean("done", nullable=True), text("outcome", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_request_job_id", "request", ["job_id"])
    op.create_table(
        "service_transition",
        text("id"), text("cluster"), text("node"), integer("number"), real("at"), text("before"), text("event"), text("after"),
        text("owner"), boolean("person"), text("reason"), integer("cordon"),
        sa.PrimaryKeyConstraint("id"), sa.UniqueConstraint("cluster", "node", "number"),
    )  # fmt: skip
    op.create_index("ix_service_transition_cluster", "service_transition", ["cluster"])
    op.create_index("ix_service_transition_node", "service_transition", ["node"])
    op.create_table(
        "snapshots",
        text("job_id"), integer("generation"), real("at"), bigint("step", nullable=True), bigint("age_steps", nullable=True),
        real("age_s", nullable=True), bigint("replica_step", nullable=True), integer("interval_steps", nullable=True),
        bigint("size", nullable=True), real("copied_s"), real("overlapped_s"), real("cost_s"), real("trained_s"), json("ages"),
        text("reason"),
        sa.PrimaryKeyConstraint("job_id", "generation"),
    )  # fmt: skip
    op.create_table(
        "standby_heartbeat",
        text("job"), text("host"), integer("pid"), real("at"), text("problem"),
        sa.PrimaryKeyConstraint("job", "host"),
    )  # fmt: skip
    op.create_table(
        "step",
        text("job_id"), integer("generation"), bigint("step"), real("at"), real("seconds"), real("loss", nullable=True),
        bigint("samples", nullable=True), bigint("tokens", nullable=True),
        sa.PrimaryKeyConstraint("job_id", "generation", "step"),
    )  # fmt: skip
    op.create_index("ix_step_job_at", "step", ["job_id", "at"])
    op.create_table(
        "straggler_decision",
        text("id"), text("job_id"), real("at"), text("kind"), integer("rank"), text("node"), text("act"), text("reason"),
        text("policy"), json("record"),
        sa.PrimaryKeyConstraint("id"),
    )  # fmt: skip
    op.create_index("ix_straggler_decision_job_id", "straggler_decision", ["job_id"])
