"""Who steers a job from now on: the flow that gets its lease. Others are refused, or stand by until it is free."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.errors import HistoryTrouble, JobAlreadyRunning
from holdfast.history import LEASE_SECONDS, History, Lease, holder_of, lease, models, queries, take, this_host, wait_take
from holdfast.history.asking import Asking
from holdfast.log import note
from holdfast.places import job_directory
from holdfast.spec import Cluster, TrainingJob, cluster_of
from holdfast.spec.load_policy import policy_for
from policies.states import TERMINAL, State

log = logging.getLogger("holdfast.control")

HOLDER: Final = "the flow"
LOOK: Final = 0.2
"""Seconds between two looks of a standby: of the five that a takeover may take the lease's own end takes three."""
GRACE: Final = 2.0
"""Seconds for which a standby leaves a job to who steered it, once the database is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A job, what it is and where it runs, and the lease to steer it."""

    job: models.Job
    spec: TrainingJob
    cluster: Cluster
    lease: Lease
    adopted: bool
    """It runs already, without a flow."""
    stood_by: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended under another flow while this one stood by."""

    job: models.Job
    state: State
    moved: str
    over: bool = True


def take_wheel(history: History, spec: TrainingJob, cluster: Cluster) -> Wheel:
    """Take the lease of the job of that name, which is begun if none of that name lives; raise `JobAlreadyRunning` while it is steered."""
    live = queries.live_job(history, spec.name)
    if live is None:
        policy_for(spec)  # a file that cannot be used is refused before anything begins
    job = live or _submission(spec, cluster)
    return _wheel(job, _lease(history, job), adopted=live is not None)


def stand_by(history: History, spec: TrainingJob, cluster: Cluster) -> Wheel | Ended:
    """Wait until nobody steers the job, and take its lease; begin a job that nobody has begun. Return the end that another flow came to."""
    standby, found = Standby(history, spec, cluster), list[Wheel | Ended]()

    def look() -> None:
        if (answer := standby.look()) is not None:
            found.append(answer)

    asking = Asking("standby", {"job": spec.name})
    while not found:
        asking(look)
        if asking.is_away:
            standby.waits_until = time.monotonic() + GRACE
        if not found:
            time.sleep(LOOK)
    return found[0]


@dataclass(slots=True)
class Standby:
    """A flow that waits for the lease of a job."""

    history: History
    spec: TrainingJob
    cluster: Cluster
    watched: str = ""
    """Id of the job that another flow was seen to steer."""
    waits_until: float = 0.0
    """Until when nothing is taken (monotonic): with the database away nobody could renew a lease."""

    def look(self) -> Wheel | Ended | None:
        """Return the wheel, or the job's end; nothing while another flow steers it."""
        live = queries.live_job(self.history, self.spec.name)
        if live is None:
            self.watched = self.watched or self._ended()
            return _end(self.history, self.watched) if self.watched else self._take(None)
        if live.id != self.watched:
            note(log, "standby.waits", level=logging.WARNING, job=self.spec.name, id=live.id)  # that anybody who looks may see it
        self.watched = live.id
        if time.monotonic() < self.waits_until or holder_of(self.history, live.id) is not None:
            return None
        return self._take(live)

    def _ended(self) -> str:
        """Return the id of the newest job of that name if it was this very one and has ended: who comes late begins nothing anew."""
        newest = next(iter(queries.jobs(self.history, self.spec.name, limit=1)), None)
        same = newest is not None and newest.spec == self.spec.model_dump(mode="json")
        return newest.id if newest is not None and same and queries.has_ended(self.history, newest.id) else ""

    def _take(self, live: models.Job | None) -> Wheel | None:
        job = live or _submission(self.spec, self.cluster)
        try:
            taken = take(self.history, job, holder=HOLDER)
        except JobAlreadyRunning:  # another one was first, or the flow of a job that has ended closes its books
            self.watched = next((one.id for one in queries.jobs(self.history, self.spec.name, limit=1)), "")
            return None
        if live is not None and queries.has_ended(self.history, live.id):  # in between
            lease.give_back(self.history, taken)
            return None
        return _wheel(job, taken, adopted=live is not None, stood_by=True)


def open_patiently(name: str) -> History:
    """Open the history, however long its database is away."""
    said = False
    while True:
        try:
            return History.open()
        except HistoryTrouble as error:
            if not said:
                note(log, "standby.history-away", level=logging.WARNING, job=name, error=error)
            said = True
        time.sleep(1.0)


def settled(job: models.Job) -> tuple[TrainingJob, Cluster]:
    """Return what *job* is and where it runs, with the folders of the host on which it began: that of this flow may have others."""
    spec, cluster = TrainingJob.model_validate(job.spec), cluster_of(job.cluster)
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
        spec=spec.model_dump(mode="json"),
        cluster=cluster.model_dump(mode="json"),
        directory=str(job_directory(spec.name)),
        at=time.time(),
    )


def _wheel(job: models.Job, lease: Lease, *, adopted: bool, stood_by: bool = False) -> Wheel:
    spec, cluster = settled(job)
    return Wheel(job=job, spec=spec, cluster=cluster, lease=lease, adopted=adopted, stood_by=stood_by)


def _lease(history: History, job: models.Job) -> Lease:
    """Take the job's lease. A holder on another host may be dead without our knowing: its lease is waited out once."""
    try:
        return take(history, job, holder=HOLDER)
    except JobAlreadyRunning:
        present = holder_of(history, job.id)
        if present is None or present.host == this_host():
            raise
        return wait_take(history, job, holder=HOLDER, seconds=LEASE_SECONDS + 1.0)


def _end(history: History, job_id: str) -> Ended:
    """Return the end that the job came to."""
    job = next(one for one in queries.jobs(history, limit=None) if one.id == job_id)
    move = queries.state_of(history, job_id)
    assert move is not None
    assert move.after in TERMINAL
    return Ended(job, State(move.after), move.because)
