"""Which controller has a job: the one that holds its lease. Others are refused, or stand by until the lease is free."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.cluster import open_cluster
from holdfast.control.backup.standby import BackupPrerequisites, PartitionFailover
from holdfast.control.supervisor import early_launch
from holdfast.control.supervisor.detach import Detach
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.provenance import provenance
from holdfast.errors import JobAlreadyRunning, OperatorError
from holdfast.history import LEASE_SECONDS, History, Lease, acquire, acquire_when_free, holder_of, lease, models, queries, this_host
from holdfast.history.errors import RetryingHistory
from holdfast.history.lease import HEARTBEAT_INTERVAL, record_heartbeat, remove_heartbeat
from holdfast.log import note
from holdfast.paths import job_directory
from holdfast.policies.states import TERMINAL, State
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.nproc import counted
from holdfast.spec.policy import policy_for
from holdfast.stored_job import recorded_cluster, recorded_spec

log = logging.getLogger("holdfast.control")

HOLDER: Final = "the controller"
POLL: Final = 0.2
"""Seconds between two polls of a standby controller: of the five that a failover may take, the lease takes three to expire."""
RELEASE_SECONDS: Final = 60.0
"""How long the process that suspended a job may take to save it and to release its nodes, before the one that resumes it gives up."""
GRACE: Final = 2.0
"""Seconds for which a standby controller leaves a job to its former controller, once the database is reachable again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """A job, its specification and cluster, and the lease to control it."""

    job: models.Job
    spec: TrainingJob
    cluster: Cluster
    lease: Lease
    runs_already: bool
    """Without a controller; or it is suspended."""
    stood_by: bool = False
    handed_over: bool = False
    """This flow's launcher has launched it."""
    flow_run: FlowRun = field(default_factory=FlowRun)
    """The Prefect flow run that controls it from now on."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job that ended under another controller while this one stood by."""

    job: models.Job
    state: State
    reason: str
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Deposed:
    """Why this controller does not have the job: it was to detach before it had the lease."""

    reason: str


def take_leadership(history: History, spec: TrainingJob, cluster: Cluster, flow_run: FlowRun) -> Leadership | JobEnded:
    """Take the lease of the live job of that name, or submit one; raise `JobAlreadyRunning` while another controller has it.

    Return the job's end if it ended under this flow's launcher.
    """
    launched = early_launch.hand_over()
    live = queries.live_job(history, spec.name)
    if launched is early_launch.HandOver.ENDED and live is None:
        return _end(history, queries.newest_job(history, spec.name).id)
    if live is None:
        policy_for(spec)  # a file that cannot be used is refused before anything begins
    job = live or _submission(spec, cluster)
    if live is None:  # refuses a key that cannot be used: without it a job that is recorded could not even be stopped
        open_cluster(cluster).close()
    flow_run.predecessor = lease.flow_run_of(history, job.id)
    taken = _leadership(job, _lease(history, job, flow_run), runs_already=live is not None)
    return replace(taken, flow_run=flow_run, handed_over=launched is early_launch.HandOver.TAKEN and live is not None)


def stand_by(standby: StandbyController, detach: Detach) -> Leadership | JobEnded | Deposed:
    """Wait until no controller has the job, and take its lease; submit the job if nobody has. Return its end if it ended meanwhile.

    A request to detach ends the waiting. Raise `OperatorError` as soon as it is known that the job could not be controlled from here.
    """
    history, name, flow_run = standby.history, standby.spec.name, standby.flow_run
    at_end = partial(remove_heartbeat, history, name)
    try:
        while (found := standby.turn()) is None:
            if why := detach.why or flow_run.cancelled or flow_run.suspended:
                return Deposed(f"the standby ends: {why}")
            time.sleep(POLL)
    except OperatorError as error:
        at_end = partial(record_heartbeat, history, name, str(error))
        raise
    finally:
        standby.telling(at_end)
    return found


@dataclass(slots=True)
class StandbyController:
    """A controller that waits for the lease of a job."""

    history: History
    spec: TrainingJob
    prerequisites: BackupPrerequisites
    wanted: Cluster
    """Where the job runs: what is needed to reach it must be here before the job is taken."""
    flow_run: FlowRun = field(default_factory=FlowRun)
    watched: str = ""
    """Id of the job that another controller had."""
    _attended: tuple[float, str] = (-HEARTBEAT_INTERVAL, "")
    """When the newest heartbeat was recorded (monotonic), and with what problem."""
    waits_until: float = 0.0
    """Until when the lease is not taken (monotonic): nobody could renew it while the database was unreachable."""
    failover: PartitionFailover = field(init=False)
    asking: RetryingHistory = field(init=False)
    telling: RetryingHistory = field(init=False)

    def __post_init__(self) -> None:
        self.failover = PartitionFailover(self.history)
        self.asking, self.telling = (RetryingHistory(who, {"job": self.spec.name}) for who in ("standby", "standby-words"))

    def turn(self) -> Leadership | JobEnded | None:
        """Poll once; while there is nothing to take, get what controlling the job needs, and record whether that succeeded."""
        found = list[Leadership | JobEnded | None]()
        self.asking(lambda: found.append(self.poll()))
        if found and found[0] is not None:
            return found[0]
        if self.asking.is_away:
            self.waits_until = time.monotonic() + GRACE
        self.prerequisites.prepare(self.wanted)
        if not self.asking.is_away:
            self.telling(self.record_heartbeat)
        return None

    def poll(self) -> Leadership | JobEnded | None:
        """Return the leadership, or the job's end; None while another controller has the job."""
        live = queries.live_job(self.history, self.spec.name)
        if live is None:
            self.watched = self.watched or self._ended()
            return _end(self.history, self.watched) if self.watched else self._take(None)
        if live.id != self.watched:
            note(log, "standby.waits", level=logging.WARNING, job=self.spec.name, id=live.id)
            self.wanted = spec_and_cluster(live)[1]
        self.watched = live.id
        holder = holder_of(self.history, live.id)
        if holder is not None and holder.partitioned:
            self.failover.offer(holder, self.wanted)
        if holder is not None or time.monotonic() < max(self.waits_until, self.failover.yields_until):
            return None
        if self._is_for_others_to_resume(live):
            return None
        return self._take(live)

    def _is_for_others_to_resume(self, live: models.Job) -> bool:
        """Return whether *live* is suspended: a standby controller does not resume it, unless its own flow run is the one that was."""
        move = queries.state_of(self.history, live.id)
        suspended = move is not None and move.after == State.SUSPENDED
        return suspended and lease.flow_run_of(self.history, live.id) != self.flow_run.id

    def record_heartbeat(self) -> None:
        """Record from time to time that this controller stands by, and at once when its problem changes."""
        at, problem = self._attended
        if problem != self.prerequisites.problem or time.monotonic() - at > HEARTBEAT_INTERVAL:
            self._attended = time.monotonic(), self.prerequisites.problem
            record_heartbeat(self.history, self.spec.name, self.prerequisites.problem)

    def _ended(self) -> str:
        """Return the id of the newest job of that name if it is this very one and has ended: a late standby submits nothing again."""
        newest = next(iter(queries.jobs(self.history, self.spec.name, limit=1)), None)
        same = newest is not None and newest.spec == self._as_recorded(newest).model_dump(mode="json")
        return newest.id if newest is not None and same and queries.has_ended(self.history, newest.id) else ""

    def _as_recorded(self, other: models.Job) -> TrainingJob:
        """Return the job with the number of ranks that *other* was submitted with, where the file leaves it to be counted."""
        counts = isinstance(self.spec.nproc_per_node, int)
        return self.spec if counts else self.spec.model_copy(update={"nproc_per_node": other.spec.get("nproc_per_node")})

    def _take(self, live: models.Job | None) -> Leadership | None:
        if not self.prerequisites.is_ready(self.wanted):
            return None
        job = live or _submission(self.spec, self.wanted)
        self.flow_run.predecessor = lease.flow_run_of(self.history, job.id)
        try:
            taken = acquire(self.history, job, holder=HOLDER, **self.flow_run.on_lease)
        except JobAlreadyRunning:  # another one was first, or the controller of a job that has ended stores its last rows
            self.watched = next((one.id for one in queries.jobs(self.history, self.spec.name, limit=1)), "")
            return None
        if live is not None and queries.has_ended(self.history, live.id):  # in between
            lease.release_lease(self.history, taken)
            return None
        return replace(_leadership(job, taken, runs_already=live is not None), stood_by=True, flow_run=self.flow_run)


def spec_and_cluster(job: models.Job) -> tuple[TrainingJob, Cluster]:
    """Return the specification and cluster of *job*, with the folders of the host on which it began: this host may have others."""
    spec, cluster = recorded_spec(job), recorded_cluster(job)
    folder = Path(job.directory)
    if folder != job_directory(job.name):
        if spec.checkpoint.directory is None:
            plan = spec.checkpoint.model_copy(update={"directory": str(folder / "checkpoints")})
            spec = spec.model_copy(update={"checkpoint": plan})
        if cluster.kind == "local" and cluster.directory is None:
            cluster = cluster.model_copy(update={"directory": str(folder.parents[1] / "clusters" / cluster.name)})
    return spec, cluster


def _submission(spec: TrainingJob, cluster: Cluster) -> models.Job:
    return models.Job(
        name=spec.name,
        spec=counted(spec, cluster).model_dump(mode="json"),
        cluster=cluster.model_dump(mode="json"),
        directory=str(job_directory(spec.name)),
        at=time.time(),
        provenance=provenance(spec),
    )


def _leadership(job: models.Job, lease: Lease, *, runs_already: bool) -> Leadership:
    spec, cluster = spec_and_cluster(job)
    return Leadership(job=job, spec=spec, cluster=cluster, lease=lease, runs_already=runs_already)


def _lease(history: History, job: models.Job, flow_run: FlowRun) -> Lease:
    """Take the job's lease. A holder on another host may be dead: wait once until its lease expires.

    The process that suspended this very flow run may still be saving the job: wait for it.
    """
    try:
        return acquire(history, job, holder=HOLDER, **flow_run.on_lease)
    except JobAlreadyRunning:
        present = holder_of(history, job.id)
        if present is not None and flow_run.id and present.flow_run == flow_run.id:
            return acquire_when_free(history, job, holder=HOLDER, seconds=RELEASE_SECONDS, **flow_run.on_lease)
        if present is None or present.host == this_host():
            raise
        return acquire_when_free(history, job, holder=HOLDER, seconds=LEASE_SECONDS + 1.0, **flow_run.on_lease)


def _end(history: History, job_id: str) -> JobEnded:
    """Return how the job ended."""
    job = next(one for one in queries.jobs(history, limit=None) if one.id == job_id)
    move = queries.state_of(history, job_id)
    assert move is not None
    assert move.after in TERMINAL
    return JobEnded(job, State(move.after), move.reason)
