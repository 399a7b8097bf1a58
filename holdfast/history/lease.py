"""Who steers a job: one flow at a time, decided by one row of the history. Orders carry its epoch, so that a late one is refused."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import func, or_, text
from sqlmodel import Session, col, select

from holdfast.errors import JobAlreadyRunning, LeaseLost
from holdfast.history.fence import lock_briefly
from holdfast.history.models import Job, Lease
from holdfast.history.retry import RetryingHistory
from holdfast.history.store import History
from holdfast.log import note
from holdfast.process import boot_time

LEASE_SECONDS: Final = 3.0
"""A lease not renewed for so long is free for anyone. Who takes it needs a second more to steer, of the five that a takeover may take."""

RENEW_SECONDS: Final = 0.5
_RETRY_EVERY: Final = 0.1

log = logging.getLogger(__name__)


def take(history: History, job: Job, *, holder: str, flow_run: str = "", flow_run_url: str = "") -> Lease:
    """Take the lease of *job* in the name of *holder* (its row is written if the history has none yet).

    Raise `JobAlreadyRunning` while someone lives who steers this job, or another one of the same name.
    """
    with history.session(immediate=True) as session:
        lock_briefly(session.connection())
        now = _now(session)
        _one_at_a_time(session, job.name)
        leases = _leases_of(session, job)
        for lease in leases:
            if _is_live(lease, now):
                raise JobAlreadyRunning(job.name, described(lease))
        before = next((lease for lease in leases if lease.job_id == job.id), None)
        if session.get(Job, job.id) is None:
            session.add(Job(**job.model_dump()))
        own = _own_lease(job.id, before.epoch + 1 if before else 1, holder, now).model_dump()
        return session.merge(Lease(**{**own, **_outbox_of(before), "flow_run": flow_run, "flow_run_url": flow_run_url}))


def acquire_when_free(history: History, job: Job, *, holder: str, seconds: float, **flow_run: str) -> Lease:
    """Take the lease as soon as it is free; raise `JobAlreadyRunning` when it is not for so many *seconds*."""
    until = time.monotonic() + seconds
    while True:
        try:
            return take(history, job, holder=holder, **flow_run)
        except JobAlreadyRunning:
            if time.monotonic() >= until:
                raise
        time.sleep(_RETRY_EVERY)


def holder_of(history: History, job_id: str) -> Lease | None:
    """Return the lease of who steers the job now; nothing when it expired, was given back, or its holder is dead."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return lease if lease is not None and _is_live(lease, _now(session)) else None


def flow_run_of(history: History, job_id: str) -> str:
    """Return the id of the Prefect flow run that controls the job, or did so last; empty where none is on record."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return "" if lease is None else lease.flow_run


def flow_run_url(history: History, job_id: str) -> str:
    """Return the page of that flow run in the Prefect UI; empty where it has none."""
    with history.session() as session:
        lease = session.get(Lease, job_id)
        return "" if lease is None else lease.flow_run_url


def release_lease(history: History, lease: Lease) -> None:
    """Let *lease* expire now, if it is still its holder's. The row stays: the epoch must never fall."""
    with history.session(immediate=True) as session:
        lock_briefly(session.connection())
        present = session.get(Lease, lease.job_id, with_for_update=True)
        if present is not None and not _is_anothers(present, lease):
            present.expires_at = 0.0


class LeaseRenewer:
    """Renew a lease twice a second in a thread, until it is released or taken over.

    A database that is away costs nothing as long as nobody else takes the lease: it is renewed when the database is back.
    """

    def __init__(self, history: History, lease: Lease, on_lost: Callable[[str], None], is_deaf: Callable[[], bool] = lambda: False) -> None:
        """*on_lost* learns who has taken it; *is_deaf* tells, at each renewal, whether its holder hears none of the job's nodes."""
        self.lease = lease
        self._is_deaf = is_deaf
        self._history, self._on_lost = history, on_lost
        self._over = threading.Event()
        self._given_up = False
        self.good_until = boot_time() + LEASE_SECONDS - RENEW_SECONDS
        """Until when nobody else can have taken the lease: in seconds since boot, which go on while this machine is suspended."""
        self._turn = threading.Lock()
        self._try = RetryingHistory("lease", {"job": lease.job_id})
        self._thread = threading.Thread(target=self._keep, name=f"lease of {lease.job_id}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def settle(self, row: int) -> None:
        """Put on record, with the next renewal, that all is written which flows left with agents before *row* of this one."""
        with self._turn:
            self.lease = Lease(**{**self.lease.model_dump(), "settled_epoch": self.lease.epoch, "settled_row": row})

    def release(self) -> None:
        """Stop renewing and give the lease back, so that the next flow need not wait; never raise."""
        self._over.set()
        if threading.current_thread() is not self._thread:  # it may be, in on_lost
            self._thread.join()
        if not self._given_up:
            self._given_up = True
            self._try(lambda: release_lease(self._history, self.lease))

    def _keep(self) -> None:
        """Renew until it is over."""
        while not self._over.wait(RENEW_SECONDS):
            self._try(self._renew)

    def raise_epoch(self, epoch: int) -> Lease:
        """Give this flow an epoch above *epoch* in the history, and return its lease; raise `LeaseLost` if another flow has the job.

        Agents may remember greater epochs than a history that was restored from a backup: to be the newest by its row is what counts.
        """
        with self._turn, self._history.session(immediate=True) as session:
            lock_briefly(session.connection())
            present = session.get(Lease, self.lease.job_id, with_for_update=True)
            if present is not None and _is_anothers(present, self.lease):
                raise LeaseLost(self.lease.job_id, described(present))
            raised = Lease(**{**self.lease.model_dump(), "epoch": max(epoch, self.lease.epoch) + 1})
            session.merge(_renewed(raised, _now(session), deaf=self._is_deaf()))
            session.commit()
            self.lease = raised
        return raised

    def _renew(self) -> None:
        """Move the expiry on, unless the row says that the job changed hands."""
        with self._turn:
            self._renew_alone()

    def _renew_alone(self) -> None:
        asked = boot_time()
        with self._history.session(immediate=True) as session:
            lock_briefly(session.connection())
            present = session.get(Lease, self.lease.job_id, with_for_update=True)
            free = present is None or not _is_anothers(present, self.lease)
            if free:
                session.merge(_renewed(self.lease, _now(session), deaf=self._is_deaf()))
        if free:
            self.good_until = asked + LEASE_SECONDS - RENEW_SECONDS
            return
        assert present is not None
        self._lose(described(present))

    def _lose(self, taker: str) -> None:
        """Stop renewing and tell, once, who steers now."""
        self._given_up = True
        self._over.set()
        note(log, "lease.lost", level=logging.WARNING, job=self.lease.job_id, epoch=self.lease.epoch, to=taker)
        try:
            self._on_lost(taker)
        except Exception as error:  # noqa: BLE001 (the thread ends here either way; what the caller got wrong must be seen)
            note(log, "lease.on-lost-failed", level=logging.ERROR, job=self.lease.job_id, error=repr(error))


@cache
def this_host() -> str:
    """Return what names this machine, this boot, and the process ids as seen from here: two containers are two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{platform.node()}/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def started_at(pid: int) -> float | None:
    """Return when process *pid* started, in seconds since the machine booted; nothing when it is dead or awaits its burial."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # the name before it may hold anything; see proc_pid_stat(5)
    return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _is_anothers(present: Lease, ours: Lease) -> bool:
    """Tell whether *present* was taken after *ours*. An older row (a restored database) is nobody's claim."""
    return present.epoch > ours.epoch or (present.epoch == ours.epoch and _who(present) != _who(ours))


def _is_live(lease: Lease, now: float) -> bool:
    """Tell whether *lease* has not expired, and its holder, where it can be seen from here, is alive.

    Where /proc hides the processes of other users (hidepid) only the kernel's answer to a signal says that there is one: then its lease is
    waited out, as that of a holder on another host.
    """
    if lease.expires_at <= now:
        return False
    if lease.host != this_host():
        return True
    started = started_at(lease.pid)
    return started == lease.pid_started if started is not None else _is_another_users(lease.pid)


def _is_another_users(pid: int) -> bool:
    """Tell whether a process of that number lives that belongs to somebody else."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _own_lease(job_id: str, epoch: int, holder: str, now: float) -> Lease:
    """Return a lease for this process."""
    pid = os.getpid()
    started = started_at(pid) or 0.0
    return Lease(job_id=job_id, epoch=epoch, holder=holder, host=this_host(), pid=pid, pid_started=started, expires_at=now + LEASE_SECONDS)


def _outbox_of(before: Lease | None) -> dict[str, Any]:
    """Return what each flow of a job takes over from the one *before*: the key of its outbox, and up to where that is settled."""
    key = before.outbox_key if before else ""
    settled = {"settled_epoch": before.settled_epoch, "settled_row": before.settled_row} if before else {}
    return {"outbox_key": key or secrets.token_hex(32), **settled}


def _renewed(lease: Lease, now: float, *, deaf: bool) -> Lease:
    """Return a copy of *lease* that is good from *now*."""
    return Lease(**{**lease.model_dump(), "expires_at": now + LEASE_SECONDS, "deaf": deaf})


def _who(lease: Lease) -> tuple[str, str, int, float]:
    """Return what tells two holders apart."""
    return lease.holder, lease.host, lease.pid, lease.pid_started


def described(lease: Lease) -> str:
    """Return who holds a lease, in words: the process and its host."""
    return f"{lease.holder} (pid {lease.pid} on {lease.host.partition('/')[0]})"


def _now(session: Session) -> float:
    """Return the time of the one clock that all flows share: the server's, or that of the machine with the file."""
    if session.get_bind().dialect.name == "postgresql":
        return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()


def _one_at_a_time(session: Session, name: str) -> None:
    """Let no two processes decide about the same job name at once; SQLite's write lock is held already."""
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(f"holdfast lease {name}".encode()).digest()[:8], "big", signed=True)
        session.scalar(select(func.pg_advisory_xact_lock(key)))


def _leases_of(session: Session, job: Job) -> list[Lease]:
    """Return the lease of *job* and of every other job of its name, locked until the transaction ends."""
    mine = or_(col(Lease.job_id) == job.id, col(Job.name) == job.name)
    query = select(Lease).outerjoin(Job, col(Job.id) == col(Lease.job_id)).where(mine)
    return list(session.exec(query.with_for_update(of=Lease)))
