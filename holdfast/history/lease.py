"""Which controller runs a job: a lease, one row of the history, decides. Agents refuse commands, and writers rows, of older epochs.

Standby controllers record a heartbeat here, so that a user sees whether one is waiting, and whether it could take over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import sqlalchemy
from sqlalchemy import Connection, func, or_, text
from sqlmodel import Session, col, select

from holdfast.errors import JobAlreadyRunning, LeaseLost
from holdfast.history.errors import RetryingHistory
from holdfast.history.models import Job, Lease, StandbyHeartbeat
from holdfast.history.store import History
from holdfast.host.process import boot_time
from holdfast.log import note

LEASE_SECONDS: Final = 3.0
"""A lease that is not renewed for so long is free. A takeover may take five seconds: the new controller needs about one more to start."""

RENEW_SECONDS: Final = 0.5
_RETRY_INTERVAL: Final = 0.1
IDLE_TRANSACTION_MS: Final = 2000
"""PostgreSQL ends a transaction that holds a lease lock and is idle for so long: less than a lease lasts, so that a stopped process cannot
keep its job from the next controller."""
HEARTBEAT_INTERVAL: Final = 5.0
"""Seconds between two heartbeats of a standby controller."""
HEARTBEAT_TIMEOUT: Final = 30.0
"""Seconds without a heartbeat after which a standby controller counts as lost."""

log = logging.getLogger(__name__)


def acquire(history: History, job: Job, *, holder: str, flow_run: str = "", flow_run_url: str = "") -> Lease:
    """Acquire the lease of *job* for *holder*; write the job's row if the history has none.

    Raise `JobAlreadyRunning` while a live controller runs this job or another one of the same name.
    """
    with history.session(immediate=True) as session:
        limit_idle_time(session.connection())
        _lock_name(session, job.name)
        of_name = or_(col(Lease.job_id) == job.id, col(Job.name) == job.name)
        query = select(Lease).outerjoin(Job, col(Job.id) == col(Lease.job_id)).where(of_name)
        leases = list(session.exec(query.with_for_update(of=Lease)))
        now = _now(session)  # after the locks: however long they were waited for, the lease lasts from now on
        for lease in leases:
            if _is_live(lease, now):
                raise JobAlreadyRunning(job.name, describe_holder(lease))
        before = next((lease for lease in leases if lease.job_id == job.id), None)
        if session.get(Job, job.id) is None:
            session.add(Job(**job.model_dump()))
        pid = os.getpid()
        own = Lease(
            job_id=job.id,
            epoch=before.epoch + 1 if before else 1,
            holder=holder,
            host=this_host(),
            pid=pid,
            pid_started=started_at(pid) or 0.0,
            expires_at=now + LEASE_SECONDS,
            flow_run=flow_run,
            flow_run_url=flow_run_url,
            outbox_key=(before.outbox_key if before else "") or secrets.token_hex(32),
            settled_epoch=before.settled_epoch if before else 0,
            settled_row=before.settled_row if before else 0,
        )
        return session.merge(own)


def acquire_when_free(history: History, job: Job, *, holder: str, seconds: float, **flow_run: str) -> Lease:
    """Acquire the lease as soon as it is free; raise `JobAlreadyRunning` when it is not after *seconds*."""
    until = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        try:
            return acquire(history, job, holder=holder, **flow_run)
        except JobAlreadyRunning:
            if begun >= until:  # a try that began before says nothing of the time since, in which this process may have been stopped
                raise
        time.sleep(_RETRY_INTERVAL)


def holder_of(history: History, job_id: str) -> Lease | None:
    """Return the job's lease if it is valid: not expired, not released, and its holder not known to be dead."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return lease if lease is not None and _is_live(lease, _now(session)) else None


def leases_of(history: History, job_ids: Collection[str]) -> dict[str, tuple[Lease | None, str]]:
    """Return of each of these jobs that has a lease what `holder_of` and `flow_run_url` return."""
    with history.session() as session:
        now = _now(session)
        found = session.exec(select(Lease).where(col(Lease.job_id).in_(job_ids)))
        return {lease.job_id: (lease if _is_live(lease, now) else None, lease.flow_run_url) for lease in found}


def flow_run_of(history: History, job_id: str) -> str:
    """Return the id of the Prefect flow run that controls the job, or did so last; empty if none is recorded."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return "" if lease is None else lease.flow_run


def flow_run_url(history: History, job_id: str) -> str:
    """Return the page of that flow run in the Prefect UI; empty without one."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return "" if lease is None else lease.flow_run_url


def release_lease(history: History, lease: Lease) -> None:
    """Let *lease* expire now, unless another controller holds it. The row stays, because the epoch must never decrease."""
    with history.session(immediate=True) as session:
        limit_idle_time(session.connection())
        current = session.get(Lease, lease.job_id, with_for_update=True)
        if current is not None and not _supersedes(current, lease):
            current.expires_at = 0.0


class LeaseRenewer:
    """Renews a lease twice a second in a thread, until it is released or another controller acquires it.

    An unreachable database loses no lease by itself: the lease is renewed as soon as the database is reachable, unless it was acquired.
    """

    def __init__(
        self, history: History, lease: Lease, on_lost: Callable[[str], None], is_partitioned: Callable[[], bool] = lambda: False
    ) -> None:
        """Call *on_lost* with the new holder when the lease is lost; record at each renewal what *is_partitioned* returns."""
        self.lease = lease
        self._is_partitioned = is_partitioned
        self._history, self._on_lost = history, on_lost
        self._stopped = threading.Event()
        self._released = False
        self.good_until = 0.0
        """Until then nobody else can have acquired the lease: seconds since boot, which also count while the machine is suspended. That is
        known from the first renewal on, which comes at once: the lease may have been acquired any time ago."""
        self._lock = threading.Lock()
        self._try = RetryingHistory("lease", {"job": lease.job_id})
        self._thread = threading.Thread(target=self._run, name=f"lease of {lease.job_id}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def settle(self, row: int) -> None:
        """Record, with the next renewal, that the history has all rows stored on agents up to before *row* of this epoch."""
        with self._lock:
            self.lease = Lease(**{**self.lease.model_dump(), "settled_epoch": self.lease.epoch, "settled_row": row})

    def release(self) -> None:
        """Stop renewing and release the lease, so that the next controller need not wait; never raise."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:  # on_lost may call this
            self._thread.join()
        if not self._released:
            self._released = True
            self._try(lambda: release_lease(self._history, self.lease))

    def raise_epoch(self, epoch: int) -> Lease:
        """Set this controller's epoch above *epoch* in the history and return its lease; raise `LeaseLost` if another one holds the job.

        Agents may remember greater epochs than a history that was restored from a backup.
        """
        with self._lock, self._history.session(immediate=True) as session:
            limit_idle_time(session.connection())
            current = session.get(Lease, self.lease.job_id, with_for_update=True)
            if current is not None and _supersedes(current, self.lease):
                raise LeaseLost(self.lease.job_id, describe_holder(current))
            raised = Lease(**{**self.lease.model_dump(), "epoch": max(epoch, self.lease.epoch) + 1})
            session.merge(self._renewed(raised, _now(session)))
            session.commit()
            self.lease = raised
        return raised

    def _run(self) -> None:
        self._try(self._renew)
        while not self._stopped.wait(RENEW_SECONDS):
            self._try(self._renew)

    def _renew(self) -> None:
        """Extend the lease, unless another controller has acquired it."""
        with self._lock:
            started = boot_time()
            with self._history.session(immediate=True) as session:
                limit_idle_time(session.connection())
                current = session.get(Lease, self.lease.job_id, with_for_update=True)
                lost_to = current if current is not None and _supersedes(current, self.lease) else None
                if lost_to is None:
                    session.merge(self._renewed(self.lease, _now(session)))
            if lost_to is None:
                self.good_until = started + LEASE_SECONDS - RENEW_SECONDS
            else:
                self._lose(describe_holder(lost_to))

    def _renewed(self, lease: Lease, now: float) -> Lease:
        return Lease(**{**lease.model_dump(), "expires_at": now + LEASE_SECONDS, "partitioned": self._is_partitioned()})

    def _lose(self, holder: str) -> None:
        """Stop renewing and report the new *holder* once."""
        self._released = True
        self._stopped.set()
        note(log, "lease.lost", level=logging.WARNING, job=self.lease.job_id, epoch=self.lease.epoch, to=holder)
        try:
            self._on_lost(holder)
        except Exception as error:  # noqa: BLE001 (the thread ends either way; log a bug of the callback)
            note(log, "lease.on-lost-failed", level=logging.ERROR, job=self.lease.job_id, error=repr(error))


def describe_holder(lease: Lease) -> str:
    """Return who holds a lease: the holder, its process and its host."""
    return f"{lease.holder} (pid {lease.pid} on {lease.host.partition('/')[0]})"


@cache
def this_host() -> str:
    """Return an id of this machine, this boot and this pid namespace: two containers are two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{platform.node()}/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def started_at(pid: int) -> float | None:
    """Return when process *pid* started, in seconds since boot; None if it is dead or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # the name in parentheses may hold anything; see proc_pid_stat(5)
    return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _supersedes(current: Lease, ours: Lease) -> bool:
    """Return whether *current* was acquired after *ours*. An older row, as in a restored database, supersedes nothing."""
    process, own = ((one.holder, one.host, one.pid, one.pid_started) for one in (current, ours))
    return current.epoch > ours.epoch or (current.epoch == ours.epoch and process != own)


def _is_live(lease: Lease, now: float) -> bool:
    """Return whether *lease* has not expired and its holder, if it runs on this host, is alive.

    If /proc hides the processes of other users (hidepid), a signal still shows whether the process exists. Such a lease has to expire, like
    that of a holder on another host.
    """
    if lease.expires_at <= now:
        return False
    if lease.host != this_host():
        return True
    started = started_at(lease.pid)
    if started is not None:
        return started == lease.pid_started
    try:
        os.kill(lease.pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _now(session: Session) -> float:
    """Return the time of the clock that all controllers share: the database server's, or this machine's for SQLite."""
    if session.get_bind().dialect.name == "postgresql":
        return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()


def _lock_name(session: Session, name: str) -> None:
    """Serialise decisions about one job name; on SQLite the write lock does that already."""
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(f"holdfast lease {name}".encode()).digest()[:8], "big", signed=True)
        session.scalar(select(func.pg_advisory_xact_lock(key)))


# -- fencing of writes ----------------------------------------------------------------------------------------------------


def limit_idle_time(connection: Connection) -> None:
    """Have the database end this transaction, which is about to lock a lease, if this process stalls in it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_TRANSACTION_MS}"))


class FenceLost(Exception):
    """A newer controller runs the job."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.epoch = epoch

    def __str__(self) -> str:
        return f"a newer controller (epoch {self.epoch}) runs the job"


@dataclass(frozen=True, slots=True)
class Fence:
    """The lease under which rows are written: rows of an older epoch are refused."""

    job_id: str
    epoch: int

    def hold(self, connection: Connection) -> None:
        """Keep the lease from being acquired until the transaction ends; raise `FenceLost` if it has been acquired already.

        A lease that is not recorded, as after a restored backup, is held by nobody else.
        """
        limit_idle_time(connection)
        query = sqlalchemy.select(col(Lease.epoch)).where(col(Lease.job_id) == self.job_id)
        current = connection.scalar(query.with_for_update(read=True))
        if current is not None and current > self.epoch:
            raise FenceLost(int(current))

    def as_record(self) -> dict[str, Any]:
        """Return the fence as JSON."""
        return {"job": self.job_id, "epoch": self.epoch}

    @classmethod
    def from_record(cls, record: Any) -> Fence | None:  # noqa: ANN401 (any JSON from a file)
        """Return the fence that *record* describes; None for anything else."""
        match record:
            case {"job": str(job), "epoch": int(epoch)}:
                return cls(job, epoch)
        return None


# -- standby controllers --------------------------------------------------------------------------------------------------


def record_heartbeat(history: History, job: str, problem: str = "") -> None:
    """Record that this process is a standby controller of the job called *job*, and why it could not take over now."""
    with history.session(immediate=True) as session:
        session.merge(StandbyHeartbeat(job=job, host=platform.node(), pid=os.getpid(), at=time.time(), problem=problem))


def remove_heartbeat(history: History, job: str) -> None:
    """Record that this process is no standby controller any more."""
    with history.session(immediate=True) as session:
        row = session.get(StandbyHeartbeat, (job, platform.node()))
        if row is not None and row.pid == os.getpid():
            session.delete(row)


def standby_heartbeats(history: History, job: Job) -> list[StandbyHeartbeat]:
    """Return the latest heartbeats of the standby controllers of *job*, by host."""
    query = select(StandbyHeartbeat).where(col(StandbyHeartbeat.job) == job.name, col(StandbyHeartbeat.at) >= job.at)
    with history.session() as session:
        return list(session.exec(query.order_by(col(StandbyHeartbeat.host))))
