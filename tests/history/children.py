"""What other processes do to a history: each function runs in a child, commanded by lines on stdin, answering by lines on stdout."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.errors import HoldfastError, JobAlreadyRunning
from holdfast.history import History, LeaseRenewer, acquire, lease, queries
from holdfast.history.cordons import CordonTable
from holdfast.history.cordons import apply as apply_cordon
from holdfast.policies.nodes import quarantine as acts
from holdfast.policies.nodes.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner, QuarantineLimits, Rules
from tests.history.rows import a_job, a_step

ROOT: Final = Path(__file__).parents[2]
LONG: Final = 600.0
"""Seconds that leases last here: none is to expire because its process waits for its turn on a busy machine."""


class Child:
    """A child that runs one function of this module."""

    def __init__(self, name: str, *arguments: str) -> None:
        argv = [sys.executable, "-m", "tests.history.children", name, *arguments]
        self.process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    def send(self, line: str = "") -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def receive(self) -> str:
        """Return its next line; an ended child says nothing more."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        """End it by SIGKILL, and bury it."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leave nothing of it."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def say(line: object) -> None:
    """Send the test a line."""
    print(line, flush=True)


def write_steps(url: str, job: str, count: str) -> None:
    """Write steps one by one, each in its own transaction; say each after it was committed."""
    history = History.open(url, patience=60)
    for number in range(1, int(count) + 1):
        with history.session() as session:
            session.add(a_step(job, number))
        say(number)


def count_steps(url: str, job: str) -> None:
    """Say on each line how many steps there are, until stdin ends."""
    history = History.open(url, create=False)
    for line in sys.stdin:
        say(len(queries.steps(history, line.strip() or job)))


def read_and_close(url: str) -> None:
    """Read as `holdfast status` does, and say how much there was only when the history is closed again."""
    history = History.open(url, create=False)
    found = len(queries.jobs(history))
    history.close()
    say(f"jobs {found}")


def open_at_the_signal(url: str) -> None:
    """Open the history at the signal; say whether it worked."""
    say("ready")
    sys.stdin.readline()
    try:
        history = History.open(url, patience=60)
        say(f"opened {len(queries.jobs(history))}")
    except HoldfastError as error:
        say(f"{type(error).__name__}: {error}")


def lock_file(path: str, statement: str) -> None:
    """Hold an SQLite file by *statement* until a line comes."""
    raw = sqlite3.connect(path, isolation_level=None, timeout=60)
    raw.execute(statement)
    say("locked")
    sys.stdin.readline()
    raw.close()
    say("unlocked")


def race_for_leases(url: str, name: str) -> None:
    """For each job id received, try to take its lease and say its epoch, or that it is refused."""
    history = History.open(url, patience=60)
    say("ready")
    for line in sys.stdin:
        try:
            say(acquire(history, a_job("raced", id=line.strip()), holder=name).epoch)
        except JobAlreadyRunning:
            say("refused")


def hold_lease(url: str, job_id: str, job_name: str) -> None:
    """Take a lease, keep it until a line comes, then release it; say when it is lost."""
    history = History.open(url)
    taken = acquire(history, a_job(job_name, id=job_id), holder="child")
    with LeaseRenewer(history, taken, lambda taker: say(f"lost to {taker}")):
        say(taken.epoch)
        sys.stdin.readline()
    say("released")


def hold_lease_in_a_zombie(url: str, job_id: str, job_name: str) -> None:
    """Let a grandchild take a lease and die, and do not bury it."""
    pid = os.fork()
    if pid == 0:
        acquire(History.open(url), a_job(job_name, id=job_id), holder="zombie")
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    say("dead")
    sys.stdin.readline()


def say_modules(url: str) -> None:
    """Say which modules are loaded after opening the history, and how many threads run."""
    History.open(url).close()
    say(json.dumps({"modules": sorted(sys.modules), "threads": threading.active_count()}))


def open_readonly(url: str, create: str) -> None:
    """Open a history and say how many jobs it has, or which error it is."""
    try:
        say(len(queries.jobs(History.open(url, create=create == "create"))))
    except HoldfastError as error:
        say(f"{type(error).__name__}: {error}")


def write_or_say(url: str) -> None:
    """Write a job, or say which error it is."""
    try:
        with History.open(url).session() as session:
            session.add(a_job())
        say("written")
    except HoldfastError as error:
        say(f"{type(error).__name__}: {error}")


def speak_of_nodes(url: str, name: str, rounds: str) -> None:
    """Take nodes out and back by turns as a program and as a person; say how many a program saw isolated after its own word."""
    place = CordonTable(cluster="c", names=[f"n{number}" for number in range(8)], rules=Rules())
    history, program, person = History.open(url, patience=60), Owner(name=name), Owner(name=f"{name}@desk", person=True)
    most = 0

    def out(node: Node, ward: QuarantineLimits) -> Answer:
        nonlocal most
        answer = acts.quarantine(node, OperatorRequest(owner=program, reason="unhealthy", at=time.time()), ward)
        if isinstance(answer, CordonChanged):
            most = max(most, ward.isolated + 1)
        return answer

    def back(node: Node, _: QuarantineLimits) -> Answer:
        return acts.return_to_service(node, OperatorRequest(owner=person, reason="well", at=time.time()))

    say("ready")
    sys.stdin.readline()
    for number in range(int(rounds)):
        for node in place.names:
            apply_cordon(history, place, node, out if (number + len(name)) % 3 else back, now=time.time())
    say(f"most {most}")


if __name__ == "__main__":
    setattr(lease, "LEASE_SECONDS", LONG)  # noqa: B010 (a constant, to the type checker)
    function: Callable[..., None] = globals()[sys.argv[1]]
    function(*sys.argv[2:])
