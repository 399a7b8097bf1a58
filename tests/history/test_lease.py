"""The lease: one controller runs a job, and its commands carry an epoch that only increases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from holdfast.errors import JobAlreadyRunning, LeaseLost
from holdfast.history import LEASE_SECONDS, History, Job, Lease, LeaseRenewer, acquire, acquire_when_free, holder_of, new_id, queries
from holdfast.history import lease as lease_module
from holdfast.history.lease import started_at, this_host
from holdfast.host.process import boot_time
from tests.history.children import LONG, Child
from tests.history.postgres_server import PostgresServer
from tests.history.rows import a_job
from tests.mentions import mentions
from tests.waiting import wait_until

StartChild = Callable[..., Child]


def forge(history: History, job_id: str, **fields: Any) -> None:
    """Write a lease of somebody else."""
    known: dict[str, Any] = {
        "epoch": 7,
        "holder": "elsewhere",
        "host": "far/away/1",
        "pid": 1,
        "pid_started": 0.0,
        "expires_at": time.time() + 60,
    }
    with history.session(immediate=True) as session:
        session.merge(Lease(job_id=job_id, **{**known, **fields}))


def row_of(history: History, job_id: str) -> Lease:
    """Return the lease's row as it is."""
    with history.session() as session:
        row = session.get(Lease, job_id)
        assert row is not None
        return row


@pytest.fixture(autouse=True)
def _leases_outlast_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no lease of a test's own expire while this process waits for its turn."""
    monkeypatch.setattr("holdfast.history.lease.LEASE_SECONDS", LONG)


def ignore(_: str) -> None:
    """Take no notice."""


@pytest.fixture
def renewer_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeaseRenewer]]:
    """Give a maker of keepers in a hurry, released at the end."""
    monkeypatch.setattr("holdfast.history.lease.RENEW_SECONDS", 0.05)
    made: list[LeaseRenewer] = []

    def make(history: History, lease: Lease, on_lost: Callable[[str], None] = ignore) -> LeaseRenewer:
        made.append(LeaseRenewer(history, lease, on_lost))
        return made[-1]

    yield make
    for renewer in made:
        renewer.release()


def test_a_lease_is_acquired_once(history: History) -> None:
    """The second flow is refused with the name of the first."""
    job = a_job()
    lease = acquire(history, job, holder="flow brave-otter")
    assert (lease.epoch, lease.pid) == (1, os.getpid())
    with pytest.raises(JobAlreadyRunning, match=rf"controlled by flow brave-otter \(pid {os.getpid()} on "):
        acquire(history, job, holder="flow two")
    assert holder_of(history, job.id) == lease
    assert [one.id for one in queries.jobs(history)] == [job.id]


def test_two_submissions_of_one_name_are_one_job(history: History) -> None:
    """Started at the same moment, each with a row of its own: the second is refused. Another name is free."""
    acquire(history, a_job("gpt"), holder="one")
    with pytest.raises(JobAlreadyRunning) as refused:
        acquire(history, a_job("gpt"), holder="two")
    assert refused.value.job == "gpt"
    assert mentions(refused.value.holder, "one")
    assert len(queries.jobs(history, "gpt")) == 1
    assert acquire(history, a_job("bert"), holder="two").epoch == 1


def test_the_epoch_grows_by_one_at_every_change_of_hands(history: History, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """Released, expired or dead: the row stays and counts on."""
    job = a_job()
    for epoch in range(1, 4):
        lease = acquire(history, job, holder=f"flow {epoch}")
        assert lease.epoch == epoch
        renewer_of(history, lease).release()
        assert holder_of(history, job.id) is None
    forge(history, job.id, epoch=10, expires_at=time.time() - 0.001)
    assert acquire(history, job, holder="later").epoch == 11


def test_of_two_racing_processes_exactly_one_gets_the_lease(history_url: str, child: StartChild) -> None:
    """Many rounds: first takers of the same job, and of the same name."""
    history = History.open(history_url)
    racers = [child("race_for_leases", history_url, name) for name in ("left", "right")]
    assert [racer.receive() for racer in racers] == ["ready"] * 2
    for number in range(40):
        ids = [new_id()] * 2 if number % 2 else [new_id(), new_id()]
        for racer, job_id in zip(racers, ids, strict=True):
            racer.send(job_id)
        assert sorted(racer.receive() for racer in racers) == ["1", "refused"]
        with history.session(immediate=True) as session:  # leave the name free for the next round
            for job_id in ids:
                if lease := session.get(Lease, job_id):
                    lease.expires_at = 0.0
    history.close()


def test_racers_for_an_expired_lease_get_the_next_epoch_once(history_url: str, child: StartChild) -> None:
    """Both find the old holder gone."""
    history = History.open(history_url)
    racers = [child("race_for_leases", history_url, name) for name in ("left", "right")]
    assert [racer.receive() for racer in racers] == ["ready"] * 2
    job = a_job("raced")
    for epoch in range(1, 30):
        for racer in racers:
            racer.send(job.id)
        assert sorted(racer.receive() for racer in racers) == [str(epoch), "refused"]
        forge(history, job.id, epoch=epoch, expires_at=0.0)
    history.close()


def test_a_killed_holder_is_replaced_at_once_on_its_host(history_url: str, child: StartChild) -> None:
    """Kill -9 of the flow: nobody waits for the expiry."""
    history = History.open(history_url)
    job = a_job()
    holder = child("hold_lease", history_url, job.id, job.name)
    assert holder.receive() == "1"
    with pytest.raises(JobAlreadyRunning):
        acquire(history, job, holder="me")
    holder.kill()
    assert row_of(history, job.id).expires_at > time.time()
    assert holder_of(history, job.id) is None
    assert acquire(history, job, holder="me").epoch == 2
    history.close()


def test_a_zombie_holder_is_dead(history_url: str, child: StartChild) -> None:
    """A zombie has a pid and a start time, and controls nothing."""
    history = History.open(history_url)
    job = a_job()
    parent = child("hold_lease_in_a_zombie", history_url, job.id, job.name)
    assert parent.receive() == "dead"
    assert row_of(history, job.id).expires_at > time.time()
    assert acquire(history, job, holder="me").epoch == 2
    history.close()


def test_a_process_with_the_pid_of_a_dead_holder_is_not_the_holder(history: History) -> None:
    """Pids come back; the start time does not."""
    job = a_job()
    mine = started_at(os.getpid())
    assert mine is not None
    forge(history, job.id, host=this_host(), pid=os.getpid(), pid_started=mine)
    with pytest.raises(JobAlreadyRunning):
        acquire(history, job, holder="me")
    forge(history, job.id, host=this_host(), pid=os.getpid(), pid_started=mine - 100)
    assert acquire(history, job, holder="me").epoch == 8


HIDDEN = """
import os, sys, time
from holdfast.history.lease import Lease, _is_live, started_at, this_host
this_host()  # remembered, as the interpreter's own files may be hidden too
os.setgroups([]); os.setgid(65534); os.setuid(65534)
pid, started = int(sys.argv[1]), float(sys.argv[2])
def live(pid, started):
    return _is_live(Lease(job_id="j", epoch=1, holder="h", host=this_host(), pid=pid, pid_started=started, expires_at=9.0), 1.0)
assert started_at(pid) is None
print(live(pid, started), live(2**22 - 1, started), live(os.getpid(), started_at(os.getpid())))
"""
"""What another user sees where /proc shows nobody the processes of others: a living holder, a dead one, and itself."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide processes from another user")
def test_a_holder_that_proc_hides_is_not_dead() -> None:
    """Under hidepid two accounts that share a history would take each other's jobs."""
    script = f'mount -t proc -o hidepid=2 proc /proc && exec {sys.executable} -c "$0" "$@"'
    me = [str(os.getpid()), str(started_at(os.getpid()))]
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, HIDDEN, *me], capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"no file systems can be mounted here: {done.stderr.strip()}")
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


def test_a_lease_is_not_valid_after_the_machine_was_suspended(
    history: History, renewer_of: Callable[..., LeaseRenewer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock that counts goes on meanwhile: others have had all that time to take it."""
    renewer = renewer_of(history, acquire(history, a_job(), holder="me"))
    wait_until(lambda: renewer.good_until, seconds=60)
    assert boot_time() < renewer.good_until < boot_time() + LONG
    renewer.release()
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + (3600.0 if which == time.CLOCK_BOOTTIME else 0.0))
    assert boot_time() > renewer.good_until


def test_a_controller_raises_its_epoch_above_those_of_agents(history: History, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """As after a backup was restored: it keeps its lease, under a greater number; who has lost it gets none."""
    job, lost = a_job(), list[str]()
    renewer = renewer_of(history, acquire(history, job, holder="me"), lost.append)
    assert renewer.raise_epoch(41).epoch == 42
    assert row_of(history, job.id).epoch == 42
    until = row_of(history, job.id).expires_at
    wait_until(lambda: row_of(history, job.id).expires_at > until, seconds=60)
    assert lost == []
    forge(history, job.id, epoch=43)
    with pytest.raises(LeaseLost, match="went to elsewhere"):
        renewer.raise_epoch(99)
    assert row_of(history, job.id).epoch == 43
    renewer.release()
    assert row_of(history, job.id).expires_at > time.time(), "it was not its own to give back"


def test_the_key_of_a_jobs_rows_is_made_once_and_its_own(history: History, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """Each flow of a job has that of the one before, and up to where its rows are settled; renewals keep both."""
    job, other = a_job("one"), a_job("two")
    first = acquire(history, job, holder="first")
    renewer = renewer_of(history, first)
    renewer.settle(17)
    wait_until(lambda: row_of(history, job.id).settled_row == 17, seconds=60)
    renewer.release()
    second = acquire(history, job, holder="second")
    assert len(first.outbox_key) == 64
    assert (second.outbox_key, second.settled_epoch, second.settled_row) == (first.outbox_key, 1, 17)
    assert acquire(history, other, holder="third").outbox_key != first.outbox_key
    assert first.outbox_key not in repr(second)


def test_a_holder_on_another_host_is_replaced_only_after_its_expiry(history: History) -> None:
    """From here nobody can see whether it lives."""
    job = a_job()
    forge(history, job.id, pid=2**22 + 1)
    with pytest.raises(JobAlreadyRunning, match=r"elsewhere .* on far"):
        acquire_when_free(history, job, holder="me", seconds=0.3)
    forge(history, job.id, pid=2**22 + 1, expires_at=time.time() + 0.5)
    assert acquire_when_free(history, job, holder="me", seconds=60).epoch == 8
    assert row_of(history, job.id).host == this_host()


def test_whoever_was_stopped_while_it_waited_looks_once_more(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last look was before the stop, and the lease has expired since."""
    job, looks, real = a_job(), list[str](), lease_module.acquire
    forge(history, job.id)

    def looked(history: History, job: Job, **more: str) -> Lease:
        try:
            return real(history, job, **more)
        except JobAlreadyRunning:
            looks.append("in use")
            forge(history, job.id, expires_at=0.0)
            clock[0] += 3600.0
            raise

    clock = [0.0]
    monkeypatch.setattr(lease_module, "acquire", looked)
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep, time=time.time))
    assert acquire_when_free(history, job, holder="me", seconds=4.0).epoch == 8
    assert looks == ["in use"]


def test_a_lease_lasts_from_when_it_was_acquired_however_long_others_kept_it_waiting(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another controller decides about the same name at that time, and is slow."""
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 0.5)
    history, job, got = History.open(postgres.fresh_url()), a_job(), list[Lease]()
    waiter = threading.Thread(target=lambda: got.append(acquire(history, job, holder="me")))
    with history.session() as session:
        lease_module._lock_name(session, job.name)
        waiter.start()
        with history.session() as other:
            waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            wait_until(lambda: other.scalar(waiting), seconds=60)
        time.sleep(0.6)
        released_at = time.time()
    waiter.join()
    assert got[0].expires_at > released_at
    history.close()


def test_a_renewer_renews_and_releases(history_url: str, child: StartChild) -> None:
    """For longer than a lease lasts, and no longer than it is wanted."""
    history = History.open(history_url)
    job = a_job()
    holder = child("hold_lease", history_url, job.id, job.name)
    assert holder.receive() == "1"
    first = row_of(history, job.id).expires_at
    wait_until(lambda: row_of(history, job.id).expires_at > first + 2, seconds=60)
    holder.send()
    assert holder.receive() == "released"
    assert acquire(history, job, holder="me").epoch == 2
    history.close()


def test_a_renewer_notices_a_lost_lease(history: History, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """A flow that slept too long stops control_job; its release does not hurt the new holder."""
    job = a_job()
    lost: list[str] = []
    renewer = renewer_of(history, acquire(history, job, holder="me"), lost.append)
    forge(history, job.id, epoch=2)
    wait_until(lambda: lost, seconds=60)
    assert lost == ["elsewhere (pid 1 on far)"]
    renewer.release()
    assert lost == ["elsewhere (pid 1 on far)"]
    present = holder_of(history, job.id)
    assert present is not None
    assert (present.epoch, present.holder) == (2, "elsewhere")


def test_nobody_vouches_for_a_lease_that_was_taken_before_its_first_renewal(
    history: History, renewer_of: Callable[..., LeaseRenewer]
) -> None:
    """A controller that was stopped right after it had acquired the lease must not act past the agents."""
    job, lost = a_job(), list[str]()
    lease = acquire(history, job, holder="me")
    forge(history, job.id, epoch=2)
    renewer = renewer_of(history, lease, lost.append)
    wait_until(lambda: lost, seconds=60)
    assert renewer.good_until == 0.0


def test_an_expired_lease_that_nobody_took_is_still_ours(history: History, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """So is one whose row went away with a database restored from yesterday."""
    job = a_job()
    lost: list[str] = []
    lease = acquire(history, job, holder="me")
    forge(history, job.id, **{**lease.model_dump(exclude={"job_id"}), "expires_at": 1.0})
    renewer_of(history, lease, lost.append)
    wait_until(lambda: row_of(history, job.id).expires_at > time.time(), seconds=60)
    with history.session(immediate=True) as session:
        session.delete(session.get(Lease, job.id))
    wait_until(lambda: holder_of(history, job.id), seconds=60)
    forge(history, job.id, epoch=0)
    wait_until(lambda: row_of(history, job.id).epoch == 1, seconds=60)
    assert not lost


def test_an_unreachable_database_loses_no_lease(
    postgres: PostgresServer, renewer_of: Callable[..., LeaseRenewer], caplog: pytest.LogCaptureFixture
) -> None:
    """The server is killed and started again: the renewer goes on, and has said so once."""
    history = History.open(postgres.fresh_url())
    job = a_job()
    lost: list[str] = []
    renewer = renewer_of(history, acquire(history, job, holder="me"), lost.append)
    postgres.stop()
    try:
        wait_until(lambda: "lease.history-unreachable" in caplog.text, seconds=60)
    finally:
        postgres.start()
    before = row_of(history, job.id).expires_at
    wait_until(lambda: row_of(history, job.id).expires_at > before, seconds=60)
    renewer.release()
    assert not lost
    assert caplog.text.count("lease.history-unreachable") == 1
    assert acquire(history, job, holder="next").epoch == 2
    history.close()


def test_a_lease_can_be_released_without_a_database(postgres: PostgresServer, renewer_of: Callable[..., LeaseRenewer]) -> None:
    """The end of a flow must not hang on its history."""
    history = History.open(postgres.fresh_url())
    renewer = renewer_of(history, acquire(history, a_job(), holder="me"))
    postgres.stop()
    try:
        renewer.release()
    finally:
        postgres.start()
    history.close()


def test_a_failing_callback_is_logged_and_ends_the_renewer(
    history: History, renewer_of: Callable[..., LeaseRenewer], caplog: pytest.LogCaptureFixture
) -> None:
    """And one that releases in the callback does not wait for itself."""
    job = a_job()

    def fail(_: str) -> None:
        renewer.release()
        raise ZeroDivisionError

    renewer = renewer_of(history, acquire(history, job, holder="me"), fail)
    forge(history, job.id, epoch=2)
    wait_until(lambda: "lease.on-lost-failed" in caplog.text, seconds=60)
    wait_until(lambda: not renewer._thread.is_alive(), seconds=60)


def test_threads_of_one_process_do_not_share_a_lease(history: History) -> None:
    """The same pid is no permission."""
    job = a_job()
    answers: list[str] = []

    def attempt(name: str) -> None:
        try:
            answers.append(str(acquire(history, job, holder=name).epoch))
        except JobAlreadyRunning:
            answers.append("refused")

    threads = [threading.Thread(target=attempt, args=(str(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["1"] + ["refused"] * 5


def test_a_lease_lasts_as_long_as_it_says(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that all flows share."""
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", LEASE_SECONDS)
    job = a_job()
    before = time.time()
    lease = acquire(history, job, holder="me")
    assert before + LEASE_SECONDS - 1 < lease.expires_at < time.time() + LEASE_SECONDS + 1
