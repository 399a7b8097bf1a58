"""The tables of the history. Rows are appended; the few that close later (incident, generation) are amended once.

Times are seconds since 1970 (UTC, float), so that SQLite and PostgreSQL agree to the microsecond. The writer makes ids (`new_id`), not the
database: other rows can refer to a row before it is written, also while the database is unreachable.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any, ClassVar, Final

from sqlalchemy import JSON, BigInteger, Column, Dialect, Float, Index, TypeDecorator, UniqueConstraint
from sqlmodel import Field, SQLModel

_id_lock = threading.Lock()
_newest_id = 0


def new_id() -> str:
    """Return an id that sorts by creation time: 12 hex digits of milliseconds, then 12 random ones.

    Ids of one process increase strictly, also within a millisecond and when the clock is set back: the newest row has the greatest id.
    """
    global _newest_id  # noqa: PLW0603 (one sequence per process)
    candidate = (time.time_ns() // 1_000_000) << 48 | int.from_bytes(os.urandom(6), "big")
    with _id_lock:
        _newest_id = max(candidate, _newest_id + 1)
        return f"{_newest_id:024x}"


class Real(TypeDecorator[float]):
    """A float that may be NaN or infinite. SQLite stores NaN as NULL, so that a NaN loss would look like an unreported one."""

    impl = Float
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Any:  # noqa: ANN401 (a function of the dialect's own kind)
        """Write NaN as text to SQLite. `Float`'s own processor would convert the text back."""
        return _nan_as_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:  # noqa: ANN401, ARG002 (SQLAlchemy's signature)
        """Convert the stored value to a float."""
        return None if value is None else float(value)


def _json() -> Any:  # noqa: ANN401 (sqlmodel's own type)
    return Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


def _maybe_json() -> Any:  # noqa: ANN401 (sqlmodel's own type)
    return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=True))


def _nan_as_text(value: float | None) -> float | str | None:
    """Return *value*, NaN as the text ``NaN``."""
    return "NaN" if value is not None and math.isnan(value) else value


class Job(SQLModel, table=True):
    """One submission of a job; the same name may be submitted again once it has ended."""

    id: str = Field(default_factory=new_id, primary_key=True)
    name: str = Field(index=True)
    spec: dict[str, Any] = _json()
    cluster: dict[str, Any] = _json()
    directory: str
    at: float
    provenance: dict[str, Any] | None = _maybe_json()
    """What it was submitted with, by name: versions, git commit (`holdfast.control.supervisor.provenance`)."""


class Lease(SQLModel, table=True):
    """Which controller runs a job. *epoch* increases by one whenever another controller acquires the lease; agents refuse older epochs."""

    job_id: str = Field(primary_key=True)
    epoch: int
    holder: str
    host: str
    pid: int
    pid_started: float
    expires_at: float
    partitioned: bool = False
    """The holder can reach none of the job's nodes: another controller that can reach them may take over."""
    flow_run: str = ""
    """Id of the Prefect flow run of the holder; kept after the lease is released."""
    flow_run_url: str = ""
    """Page of that flow run in the Prefect UI; empty without one."""
    outbox_key: str = Field(default="", repr=False)
    """Secret of the job's controllers, made once. They sign the rows that they store on agents with it; agents never see it."""
    settled_epoch: int = 0
    settled_row: int = Field(default=0, sa_type=BigInteger)
    """Rows stored on agents by earlier epochs, and by this epoch before this row, are already in the history: refuse them."""


class StandbyHeartbeat(SQLModel, table=True):
    """The latest heartbeat of a standby controller of a job; one row per job and host."""

    __tablename__: ClassVar[Any] = "standby_heartbeat"
    job: str = Field(primary_key=True)
    host: str = Field(primary_key=True)
    pid: int
    at: float
    problem: str = ""
    """Why it could not take over now; empty if it could."""


class JobTransition(SQLModel, table=True):
    """One transition of a job's state machine; the newest row holds the current state."""

    __tablename__: ClassVar[Any] = "job_transition"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    before: str
    event: str
    after: str
    reason: str
    generation: int


class Generation(SQLModel, table=True):
    """One agreed placement of the job's ranks on nodes."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    number: int
    at: float
    world_size: int
    ranks: dict[str, Any] = _json()
    """Node name to its global ranks, in order of local rank."""
    port: int = 0
    resumed_step: int | None = Field(default=None, sa_type=BigInteger)
    until: int | None = Field(default=None, sa_type=BigInteger)
    """Last step, if the script reports it."""
    first_step_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    facts: dict[str, Any] | None = _maybe_json()
    """What a controller needs to reattach: since when each process has its rank, the store, the roles of the job. For those who watch the
    job: ``spare_nodes``, ready ``hot_spares`` by node, ``isolated`` nodes with the reason, ``pids`` by rank, and the ``pause`` in which no
    rank makes progress; none before the first report."""


class NodeStatusChange(SQLModel, table=True):
    """One change of a node's status (``healthy``, ``suspect``, ``lost``, ``excluded``); the newest row holds the current status."""

    __tablename__: ClassVar[Any] = "node_status_change"
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    at: float
    status: str
    reason: str
    job_id: str | None = None


class NodeHealthChange(SQLModel, table=True):
    """One change of a node's health as probes found it (`holdfast.policies.nodes.node_health`)."""

    __tablename__: ClassVar[Any] = "node_health_change"
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    at: float
    before: str
    """Health before; empty for a node that was never probed."""
    after: str
    reason: str
    facts: dict[str, Any] = _json()
    """The findings that are `new` and `over`, each with kind, part and quote."""


class NodeCordon(SQLModel, table=True):
    """One cordon of a node (`holdfast.policies.nodes.cordons`): why jobs should not, or must not, use it. Active until *ended_at*."""

    __tablename__: ClassVar[Any] = "node_cordon"
    __table_args__ = (UniqueConstraint("cluster", "node", "number"),)
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    number: int
    """Counted per node, together with its burn-ins."""
    kind: str
    owner: str
    person: bool
    reason: str
    evidence: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    faults: list[dict[str, str]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """Kind and device of each fault that caused it: what a burn-in has to test."""
    at: float
    until: float | None = None
    drains: bool = False
    """Jobs must leave the node."""
    leave_by: float | None = None
    """When they must have left; empty: as soon as they can without an interruption."""
    test: int = 0
    """Number of the burn-in that is running for it; 0: none."""
    newest_test: int = 0
    """Number of the newest burn-in that was started for it."""
    test_until: float | None = None
    ended_at: float | None = None
    ended_by: str = ""
    ended_reason: str = ""


class ServiceTransition(SQLModel, table=True):
    """One transition of a node's state machine (`policies/nodes/node_states.py`); the row with the greatest number is the current state."""

    __tablename__: ClassVar[Any] = "service_transition"
    __table_args__ = (UniqueConstraint("cluster", "node", "number"),)
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    number: int
    at: float
    before: str
    event: str
    after: str
    owner: str
    person: bool
    reason: str
    cordon: int
    """Number of the cordon that caused it."""


class HealthSample(SQLModel, table=True):
    """The latest probe of a node and the health that follows from it; every sweep overwrites the row, and compares with the one before."""

    __tablename__: ClassVar[Any] = "health_sample"
    cluster: str = Field(primary_key=True)
    node: str = Field(primary_key=True)
    at: float
    health: dict[str, Any] = _json()
    reading: str | None = None
    """The latest `NodeReading` as compressed JSON (`holdfast.history.health_samples`); empty before the first."""


DOWN_UNTIL: Final = "down_until"
"""Key in an incident's facts: what its downtime ends with, if not with the first new step."""
STARTED: Final = "started"
"""Value of that key: the downtime ends when all processes have started."""


class Incident(SQLModel, table=True):
    """The faults that one recovery handles. Open while *closed_at* is empty."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    number: int
    kind: str
    """Catalogue kind of the root fault."""
    target: str
    fault_at: float
    """When the fault happened, by the clock of its observer."""
    detected_at: float
    """When the controller received it."""
    commands_sent_at: float | None = None
    """When the recovery sent its first command."""
    closed_at: float | None = None
    generation_before: int
    generation_after: int | None = None
    action: str | None = None
    outcome: str | None = None
    """``recovered``, ``passed`` (resolved by itself), ``stopped`` or ``failed``."""
    step_before: int | None = Field(default=None, sa_type=BigInteger)
    """Newest step that any rank had reported when the fault was detected."""
    resumed_step: int | None = Field(default=None, sa_type=BigInteger)
    steps_lost: int | None = Field(default=None, sa_type=BigInteger)
    downtime_s: float | None = None
    """From *fault_at* to the first new step; for scripts that report no steps, until all processes have started (see `DOWN_UNTIL`)."""
    reason: str = ""
    facts: dict[str, Any] | None = _maybe_json()
    """What the recovery did in the workers (`holdfast.control.checkpoints.snapshot_stats`), the age in steps of the newest snapshot,
    ``orders``: the action of each attempt and when its commands were acknowledged; `DOWN_UNTIL`: what *downtime_s* ends with."""

    @property
    def until_started(self) -> bool:
        """Whether *downtime_s* ends with the start of all processes because no step was reported: training may have resumed later."""
        return (self.facts or {}).get(DOWN_UNTIL) == STARTED


class FaultRecord(SQLModel, table=True):
    """One occurrence of a fault kind on a target."""

    __tablename__: ClassVar[Any] = "fault"
    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str | None = Field(default=None, index=True)
    at: float
    kind: str
    recommended_action: str
    target: str
    attributed_to: str
    rank: int | None = None
    node: str | None = None
    generation: int
    step: int | None = Field(default=None, sa_type=BigInteger)
    root: bool = False
    evidence: dict[str, Any] = _json()


class IncidentDiagnosis(SQLModel, table=True):
    """One diagnosis of an incident with its hypotheses; an incident may have several."""

    __tablename__: ClassVar[Any] = "incident_diagnosis"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    at: float
    kind: str
    """Catalogue kind of the root cause."""
    target: str
    confidence: float
    """Its confidence relative to the other hypotheses: 0 to 1."""
    reason: str
    candidates: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """The hypotheses, most likely first (see `holdfast.control.faults.diagnosis.record`)."""


class DecisionRecord(SQLModel, table=True):
    """What a policy decided, and why."""

    __tablename__: ClassVar[Any] = "decision"
    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    at: float
    action: str
    rule: str
    reason: str
    act: dict[str, Any] = _json()
    """Fields of the decision: nodes removed and added, restarts counted."""
    passed_over: dict[str, Any] = _json()
    """Rule to the reason why it did not apply."""


class DecidedCase(SQLModel, table=True):
    """The input of a decision (`policies/recovery/case_codec.py`), so that another policy can decide the same case."""

    __tablename__: ClassVar[Any] = "decided_case"
    decision_id: str = Field(primary_key=True)
    job_id: str = Field(index=True)
    record: dict[str, Any] = _json()


class Phase(SQLModel, table=True):
    """The duration of one phase of one recovery.

    Phases: detect, diagnose, isolate, reschedule (T1), communication (T2), load (T3), warm-up (T4), rollback (T0).
    """

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    position: int
    name: str
    seconds: float


class StepRecord(SQLModel, table=True):
    """A step, as the lowest rank reported it: rank 0, unless the job continues without it."""

    __tablename__: ClassVar[Any] = "step"
    __table_args__ = (Index("ix_step_job_at", "job_id", "at"),)
    job_id: str = Field(primary_key=True)
    generation: int = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger)
    at: float
    seconds: float
    loss: float | None = Field(default=None, sa_type=Real)
    """That rank's own; empty if the script reports none, or the rank was lost before it could report it: other ranks have other losses."""
    samples: int | None = Field(default=None, sa_type=BigInteger)
    """Samples that all ranks computed in this step, or since the one reported before; empty if the script does not report them."""
    tokens: int | None = Field(default=None, sa_type=BigInteger)


class Checkpoint(SQLModel, table=True):
    """A checkpoint that was written, or a problem with one."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    step: int | None = Field(default=None, sa_type=BigInteger)
    generation: int
    path: str
    seconds: float | None = None
    size: int | None = Field(default=None, sa_type=BigInteger)
    """Bytes."""
    overlapped_s: float | None = None
    """Seconds of writing while training continued; empty if training stopped for the whole save (`seconds`)."""
    problem: str | None = None
    """Catalogue kind of the problem; empty for a complete checkpoint."""
    reason: str = ""


class Snapshots(SQLModel, table=True):
    """The in-memory snapshots of one generation and what they cost, from the latest reports of its ranks; sums are over ranks.

    The row is updated while the generation runs, and stays after the memory is released.
    """

    job_id: str = Field(primary_key=True)
    generation: int = Field(primary_key=True)
    at: float
    """When the ranks last reported."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """The newest step of which every rank has a complete snapshot; empty before the first."""
    age_steps: int | None = Field(default=None, sa_type=BigInteger)
    """Steps completed since."""
    age_s: float | None = None
    """Seconds since it was the current state."""
    replica_step: int | None = Field(default=None, sa_type=BigInteger)
    """The newest step of which other nodes have complete replicas of all ranks; empty if unknown."""
    interval_steps: int | None = None
    """Steps between two snapshots, as agreed by the ranks."""
    size: int | None = Field(default=None, sa_type=BigInteger)
    """Bytes of one snapshot of all ranks."""
    copied_s: float = 0.0
    """Seconds of copying."""
    overlapped_s: float = 0.0
    """Seconds of copying while training was waiting anyway."""
    cost_s: float = 0.0
    """Seconds that snapshots added to steps, compared with steps without one."""
    trained_s: float = 0.0
    """Seconds of all steps."""
    ages: dict[str, Any] = _json()
    """Age of the newest snapshot in steps to how many of the samples, taken at equal intervals, had it."""
    reason: str = ""
    """Why ranks take no snapshots, if they reported it."""

    @property
    def overlapped(self) -> float | None:
        """Return the share of the copying that took place while training was waiting anyway."""
        return min(1.0, self.overlapped_s / self.copied_s) if self.copied_s else None

    @property
    def cost(self) -> float | None:
        """Return the share of the training time that snapshots cost."""
        return self.cost_s / self.trained_s if self.trained_s else None


class Request(SQLModel, table=True):
    """A person's request to a running job (``stop``, ``migrate``, ``detach``)."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    kind: str
    by: str
    handled_at: float | None = None
    facts: dict[str, Any] | None = _maybe_json()
    """Parameters: for ``migrate`` the node or rank to move and its target; for ``detach`` the epoch of the controller that it is for."""
    done: bool | None = None
    """Whether it was carried out; empty until known, and for requests whose outcome is that of the job."""
    outcome: str | None = None
    """What happened, as text."""


class StragglerDecision(SQLModel, table=True):
    """A decision about a straggling rank (`holdfast.policies.slowness`) and its input."""

    __tablename__: ClassVar[Any] = "straggler_decision"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    kind: str
    rank: int
    node: str
    act: str
    reason: str
    policy: str
    record: dict[str, Any] = _json()
    """The case, so that another policy can decide it."""


class ApprovalRequest(SQLModel, table=True):
    """A request to a person to approve that nodes are isolated. Pending while *answered_at* is empty."""

    __tablename__: ClassVar[Any] = "approval_request"

    id: str = Field(default_factory=new_id, primary_key=True)
    number: int = Field(unique=True)
    """Counted over the whole history; a person answers by it."""
    cluster: str
    job_id: str = Field(index=True)
    job: str
    """Name of the job."""
    about: str
    """``share``: more of the cluster would be unavailable than a program may take; ``least``: the job would have too few nodes."""
    nodes: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """Node to the evidence against it: ``reason``, ``seen``, ``evidence``."""
    reason: str
    otherwise: str
    """What happens without an answer: ``keep`` or ``isolate``."""
    at: float
    until: float
    """When that happens (seconds since 1970)."""
    flow_run: str | None = None
    """The paused flow run in the Prefect UI in which it can be answered."""
    answered_at: float | None = None
    answer: str = ""
    """``isolate``, ``keep``, or ``withdrawn`` if it no longer needs an answer."""
    picked: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """The nodes to isolate."""
    by: str = ""
    """Who answered; empty after a timeout."""
    comment: str = ""
    """Why, as stated by that person."""


class JobEvent(SQLModel, table=True):
    """A note about a job that is not a fault: a warning, a reattached controller, a script that exited at once."""

    __tablename__: ClassVar[Any] = "job_event"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    text: str


_MODELS: Final = (
    Job, Lease, JobTransition, Generation, NodeStatusChange, NodeHealthChange, NodeCordon, ServiceTransition, HealthSample, Incident,
    FaultRecord, IncidentDiagnosis, DecisionRecord, DecidedCase, Phase, StepRecord, Checkpoint, Snapshots, Request, StragglerDecision,
    ApprovalRequest, JobEvent, StandbyHeartbeat,
)  # fmt: skip
TABLES: Final = [SQLModel.metadata.tables[str(model.__tablename__)] for model in _MODELS]
"""Every table of the history; an embedding program may have SQLModel tables of its own."""
FIELDS: Final = {(str(model.__tablename__), name): field.annotation for model in _MODELS for name, field in model.model_fields.items()}
"""(table, column) to the Python type of its values."""
