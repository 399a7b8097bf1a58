"""The tables of the history. Rows are appended; the few that close later (incident, generation) are amended once.

Times are seconds since 1970 (UTC, float), so that SQLite and PostgreSQL agree to the microsecond. Ids are made by the
writer (`new_id`), never by the database: a record can be referred to before the database has seen it, or while it is away.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any, ClassVar, Final

from sqlalchemy import JSON, BigInteger, Column, Dialect, Float, Index, TypeDecorator, UniqueConstraint
from sqlmodel import Field, SQLModel

_making = threading.Lock()
_newest = 0


def new_id() -> str:
    """Return an id that sorts by the time it was made: 12 hex digits of milliseconds, 12 random ones.

    Ids of one process grow strictly, even within a millisecond and when the clock is set back: "the newest row" is
    the one with the greatest id.
    """
    global _newest  # noqa: PLW0603 (one sequence a process is the point)
    fresh = (time.time_ns() // 1_000_000) << 48 | int.from_bytes(os.urandom(6), "big")
    with _making:
        _newest = max(fresh, _newest + 1)
        return f"{_newest:024x}"


class Real(TypeDecorator[float]):
    """A float that may be NaN or infinite. SQLite would store NaN as NULL: a loss that went bad would look unreported."""

    impl = Float
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Any:  # noqa: ANN401 (a function of the dialect's own kind)
        """Give SQLite the word for the number that it does not know; `Float` itself would turn the word back."""
        return _word_for_nan if dialect.name == "sqlite" else super().bind_processor(dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:  # noqa: ANN401, ARG002 (SQLAlchemy's signature)
        """Return the number again."""
        return None if value is None else float(value)


def _json() -> Any:  # noqa: ANN401 (sqlmodel's own type)
    return Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


def _maybe_json() -> Any:  # noqa: ANN401 (sqlmodel's own type)
    return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=True))


def _word_for_nan(value: float | None) -> float | str | None:
    """Return *value*, or ``NaN`` as a word."""
    return "NaN" if value is not None and math.isnan(value) else value


class Job(SQLModel, table=True):
    """One submission of a job; the same name may be submitted again once it has ended."""

    id: str = Field(default_factory=new_id, primary_key=True)
    name: str = Field(index=True)
    spec: dict[str, Any] = _json()
    cluster: dict[str, Any] = _json()
    directory: str
    at: float


class Lease(SQLModel, table=True):
    """Who steers a job now. *epoch* grows by one at every change of hands and fences orders to agents."""

    job_id: str = Field(primary_key=True)
    epoch: int
    holder: str
    host: str
    pid: int
    pid_started: float
    expires_at: float
    deaf: bool = False
    """Its holder hears none of the job's nodes, and reaches none: who does may steer the job better."""
    flow_run: str = ""
    """Id of the Prefect flow run that the holder runs in; it stays when the lease is given back."""
    flow_run_url: str = ""
    """Page of that flow run in the Prefect UI; empty where there is none."""
    outbox_key: str = Field(default="", repr=False)
    """Secret of the job's flows, made once: they sign with it what they leave with agents, which never see it."""
    settled_epoch: int = 0
    settled_row: int = Field(default=0, sa_type=BigInteger)
    """All that flows before that epoch left with agents, and that one before that row, is settled: offered again, it is refused."""


class StandbyHeartbeat(SQLModel, table=True):
    """A flow that stands by for the job of that name, as it last said of itself: one a host."""

    __tablename__: ClassVar[Any] = "standby_flow"
    job: str = Field(primary_key=True)
    host: str = Field(primary_key=True)
    pid: int
    at: float
    problem: str = ""
    """What keeps it from control_job now."""


class JobTransition(SQLModel, table=True):
    """One move of a job's state machine; the newest row is the state."""

    __tablename__: ClassVar[Any] = "move"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    before: str
    event: str
    after: str
    reason: str
    generation: int


class Generation(SQLModel, table=True):
    """One agreed membership: which node holds which ranks."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    number: int
    at: float
    world_size: int
    ranks: dict[str, Any] = _json()
    """Node name to the list of global ranks it holds, in order of local rank."""
    port: int = 0
    resumed_step: int | None = Field(default=None, sa_type=BigInteger)
    until: int | None = Field(default=None, sa_type=BigInteger)
    """Step at which the script says it will end; empty when it does not say."""
    first_step_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    facts: dict[str, Any] | None = _maybe_json()
    """What a flow that comes later must know of its processes: since when each holds its rank, the store, the roles of the job."""


class NodeStatusChange(SQLModel, table=True):
    """One change of a node's standing (``healthy``, ``suspect``, ``lost``, ``excluded``); the newest row is the standing."""

    __tablename__: ClassVar[Any] = "node_move"
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    at: float
    status: str
    reason: str
    job_id: str | None = None


class NodeHealthChange(SQLModel, table=True):
    """A change of what is thought of a node from outside (`policies.node_health`), or of what is held against it."""

    __tablename__: ClassVar[Any] = "node_verdict"
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    at: float
    before: str
    """The standing before; empty for a node that was never looked at."""
    after: str
    reason: str
    facts: dict[str, Any] = _json()
    """The faults that are `new` and `over`, each with kind, part and quote."""


class NodeCordon(SQLModel, table=True):
    """One hold on a node (`policies.cordons`): why it is not, or not gladly, given to jobs. Open while *ended_at* is empty."""

    __tablename__: ClassVar[Any] = "node_hold"
    __table_args__ = (UniqueConstraint("cluster", "node", "number"),)
    id: str = Field(default_factory=new_id, primary_key=True)
    cluster: str = Field(index=True)
    node: str = Field(index=True)
    number: int
    """Of this node; burn-ins take numbers of the same row."""
    kind: str
    owner: str
    person: bool
    reason: str
    evidence: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    faults: list[dict[str, str]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """Kind and device of each fault that it is for: what a burn-in has to exercise."""
    at: float
    until: float | None = None
    drains: bool = False
    """Jobs on the node are asked to leave it."""
    leave_by: float | None = None
    """When they have to be gone; empty: as soon as that interrupts nobody."""
    test: int = 0
    """Number of the burn-in that runs for it; 0: none."""
    newest_test: int = 0
    """Number of the newest burn-in that was begun for it."""
    test_until: float | None = None
    ended_at: float | None = None
    ended_by: str = ""
    ended_reason: str = ""


class ServiceTransition(SQLModel, table=True):
    """One move of a node's state machine (`policies.node_states`); the one with the greatest number is its state."""

    __tablename__: ClassVar[Any] = "service_move"
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
    hold: int
    """The number of the hold that it is about."""


class HealthSample(SQLModel, table=True):
    """The last look at a node, and what is thought of it since: written anew by each sweep, as the next one compares with it."""

    __tablename__: ClassVar[Any] = "last_look"
    cluster: str = Field(primary_key=True)
    node: str = Field(primary_key=True)
    at: float
    verdict: dict[str, Any] = _json()
    reading: str | None = None
    """The last `NodeReading`, as compressed JSON (`holdfast.history.health_samples`); empty before the first."""


DOWN_UNTIL: Final = "down_until"
"""Key of an incident's facts: what its downtime ends with, where that is not the first new step."""
STARTED: Final = "started"
"""All processes had started."""


class Incident(SQLModel, table=True):
    """The faults that one recovery answers. Open while *closed_at* is empty."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    number: int
    kind: str
    """Catalogue kind of the root fault."""
    subject: str
    fault_at: float
    """When the fault happened, as its observer saw it."""
    detected_at: float
    """When the flow knew."""
    commands_sent_at: float | None = None
    """When the first order of the recovery went out."""
    closed_at: float | None = None
    generation_before: int
    generation_after: int | None = None
    action: str | None = None
    outcome: str | None = None
    """``recovered``, ``passed`` (by itself), ``stopped`` or ``gave-up``."""
    step_before: int | None = Field(default=None, sa_type=BigInteger)
    """Newest step any rank had reported when the fault was seen."""
    resumed_step: int | None = Field(default=None, sa_type=BigInteger)
    steps_lost: int | None = Field(default=None, sa_type=BigInteger)
    downtime_s: float | None = None
    """From *fault_at* to the first new step; for scripts that report no steps only until all processes had started (see *facts*)."""
    reason: str = ""
    facts: dict[str, Any] | None = _maybe_json()
    """What the recovery did inside the workers (see `holdfast.control.checkpoints.snapshot_stats`), how old the newest snapshot in memory
    was in steps, ``orders``: each attempt's action, and when its orders had been answered; `DOWN_UNTIL`: what *downtime_s* ends with."""

    @property
    def until_started(self) -> bool:
        """Tell whether *downtime_s* ends when all processes had started, as no step was reported: training may have begun later."""
        return (self.facts or {}).get(DOWN_UNTIL) == STARTED


class FaultRecord(SQLModel, table=True):
    """A catalogue kind seen on a subject."""

    __tablename__: ClassVar[Any] = "fault"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str | None = Field(default=None, index=True)
    at: float
    kind: str
    recommended_action: str
    subject: str
    blame: str
    rank: int | None = None
    node: str | None = None
    generation: int
    step: int | None = Field(default=None, sa_type=BigInteger)
    root: bool = False
    evidence: dict[str, Any] = _json()


class IncidentDiagnosis(SQLModel, table=True):
    """What an incident was taken for, and the explanations that were weighed; each diagnosis of one incident adds a row."""

    __tablename__: ClassVar[Any] = "verdict"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    at: float
    kind: str
    """Catalogue kind of the root."""
    subject: str
    weight: float
    """How likely it was beside the others: 0 to 1."""
    reason: str
    candidates: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """The explanations, the likeliest first (see `holdfast.control.faults.diagnosis.record`)."""


class DecisionRecord(SQLModel, table=True):
    """What a policy answered, and why."""

    __tablename__: ClassVar[Any] = "decision"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    at: float
    action: str
    rule: str
    reason: str
    act: dict[str, Any] = _json()
    """Fields of the decision: nodes dropped, nodes added, restarts counted."""
    passed_over: dict[str, Any] = _json()
    """Rule to the reason why it did not answer."""


class DecidedCase(SQLModel, table=True):
    """What a decision was made from (`policies.case_codec`), so that another policy can be asked the same; of older ones there is none."""

    __tablename__: ClassVar[Any] = "decided_case"
    decision_id: str = Field(primary_key=True)
    job_id: str = Field(index=True)
    record: dict[str, Any] = _json()


class Phase(SQLModel, table=True):
    """One phase of one recovery, in seconds.

    detect, diagnose, isolate, reschedule (T1), communication (T2), load (T3), warm-up (T4), rollback (T0).
    """

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    incident_id: str = Field(index=True)
    position: int
    name: str
    seconds: float


class StepRecord(SQLModel, table=True):
    """A step that rank 0 reported."""

    __tablename__: ClassVar[Any] = "step"

    __table_args__ = (Index("ix_step_job_at", "job_id", "at"),)
    job_id: str = Field(primary_key=True)
    generation: int = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger)
    at: float
    seconds: float
    loss: float | None = Field(default=None, sa_type=Real)


class Checkpoint(SQLModel, table=True):
    """A checkpoint that was written, or trouble with one."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    step: int | None = Field(default=None, sa_type=BigInteger)
    generation: int
    path: str
    seconds: float | None = None
    size: int | None = Field(default=None, sa_type=BigInteger)
    """Bytes: more than 32 bits hold."""
    beside: float | None = None
    """Seconds for which it was written while training went on; empty where training stood for all of it, which `seconds` says."""
    problem: str | None = None
    """Catalogue kind of what is wrong with it; empty for a whole one."""
    reason: str = ""


class Snapshots(SQLModel, table=True):
    """What the snapshots in memory of one generation were like, and cost, as its ranks last told; sums are over its ranks.

    Written anew now and then while the generation lives: one row says how old the newest was, and stays when the memory is gone.
    """

    job_id: str = Field(primary_key=True)
    generation: int = Field(primary_key=True)
    at: float
    """When the ranks last told."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """The newest step of which every rank had a whole snapshot; empty before the first."""
    age_steps: int | None = Field(default=None, sa_type=BigInteger)
    """Steps that had been done since."""
    age_s: float | None = None
    """Seconds for which it had not been the present state."""
    replica_step: int | None = Field(default=None, sa_type=BigInteger)
    """The newest step of which other nodes were known to have whole replicas of all ranks; empty where that is not known."""
    every: int | None = None
    """Steps between two snapshots, as the ranks had agreed."""
    size: int | None = Field(default=None, sa_type=BigInteger)
    """Bytes of one snapshot of all ranks."""
    copied_s: float = 0.0
    """Seconds of copying."""
    overlapped_s: float = 0.0
    """Seconds of it while training waited anyway."""
    cost_s: float = 0.0
    """Seconds by which snapshots made the ranks' steps longer, measured beside steps without one."""
    trained_s: float = 0.0
    """Seconds of all steps."""
    ages: dict[str, Any] = _json()
    """How often the newest was how many steps old, by looks at equal distances."""
    reason: str = ""
    """Why ranks take none, where they said so."""

    @property
    def hidden(self) -> float | None:
        """Return the share of the copying that took place while training waited anyway."""
        return min(1.0, self.overlapped_s / self.copied_s) if self.copied_s else None

    @property
    def cost(self) -> float | None:
        """Return the share of the training time that snapshots cost."""
        return self.cost_s / self.trained_s if self.trained_s else None


class Request(SQLModel, table=True):
    """What a person asked of a running job (``stop``, ``migrate``, ``detach``)."""

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    kind: str
    by: str
    handled_at: float | None = None
    facts: dict[str, Any] | None = _maybe_json()
    """What belongs to the request: for ``migrate`` the node or rank to move, and where to; for ``detach`` the epoch of who is asked."""
    done: bool | None = None
    """Whether what was asked was done; empty until it is known, and for requests whose outcome is the job's."""
    outcome: str | None = None
    """What came of it, in words."""


class StragglerDecision(SQLModel, table=True):
    """What was decided about a rank that holds the others up (`policies.slowness`), and from what."""

    __tablename__: ClassVar[Any] = "weighing"

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
    """The case, so that another policy can be asked the same."""


class ApprovalRequest(SQLModel, table=True):
    """What a person is asked before a program may isolate nodes. Open while *answered_at* is empty."""

    __tablename__: ClassVar[Any] = "question"

    id: str = Field(default_factory=new_id, primary_key=True)
    number: int = Field(unique=True)
    """By which a person answers: counted over the whole history."""
    cluster: str
    job_id: str = Field(index=True)
    job: str
    """Its name."""
    about: str
    """``share``: the cluster would lose more than a program may take; ``least``: the job would be left with fewer nodes than it needs."""
    nodes: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """Node to what speaks against it: ``reason``, ``seen``, ``evidence``."""
    reason: str
    otherwise: str
    """What happens when nobody answers: ``keep`` or ``isolate``."""
    at: float
    until: float
    """When that happens (seconds since 1970)."""
    flow_run: str | None = None
    """The paused flow run in which it is asked in the Prefect UI."""
    answered_at: float | None = None
    answer: str = ""
    """``isolate``, ``keep``, or ``withdrawn`` where it need not be answered any more."""
    picked: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """The nodes that are to be isolated."""
    by: str = ""
    """Who answered; empty where nobody did in time."""
    words: str = ""
    """Why, in the words of who answered."""


class JobEvent(SQLModel, table=True):
    """Something worth telling that is no fault: a warning, an adoption, a script that ended at once."""

    __tablename__: ClassVar[Any] = "remark"

    id: str = Field(default_factory=new_id, primary_key=True)
    job_id: str = Field(index=True)
    at: float
    text: str


_MODELS: Final = (
    Job, Lease, JobTransition, Generation, NodeStatusChange, NodeHealthChange, NodeCordon, ServiceTransition, HealthSample, Incident,
    FaultRecord, IncidentDiagnosis, DecisionRecord, DecidedCase,
    Phase, StepRecord, Checkpoint, Snapshots, Request, StragglerDecision, ApprovalRequest, JobEvent, StandbyHeartbeat,
)  # fmt: skip
TABLES: Final = [SQLModel.metadata.tables[str(model.__tablename__)] for model in _MODELS]
"""Every table of the history; a program around us may have SQLModel tables of its own."""
FIELDS: Final = {(str(model.__tablename__), name): field.annotation for model in _MODELS for name, field in model.model_fields.items()}
"""What each column holds, by table and column, as Python knows it."""
