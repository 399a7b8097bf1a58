"""What is started once for a whole run of the tests, however many workers pytest-xdist has.

The first worker that needs it starts it, and it ends when the last one is done with it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
IN_BACKGROUND = ("setsid", "--fork", "sh", "-c", 'echo $$ > "$0" && exec "$@"')
"""The words before a pid file and a command that leave the command running, with a session and a process group of its own."""


def run_folder(places: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of this run share."""
    base = places.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep all other workers out meanwhile."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def shared_server(
    place: Path, command: Sequence[str], environment: Mapping[str, str], ready: Callable[[], bool], seconds: float
) -> Iterator[None]:
    """Have *command* running and *ready*; what it prints goes to `server.log` in *place*, the folder that is known to all workers.

    It is started again when it dies (`tests.kept_running`), and ends with its last user, even if that one is killed.
    """
    pid, log, lock = place / "pid", place / "server.log", place / "users"
    with lock.open("w") as users:
        with locked(place / "lock"):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not pid.exists() or is_gone(pid):
                pid.touch()
                kept = [sys.executable, "-m", "tests.kept_running", str(lock), str(pid), *command]
                with log.open("ab") as out:
                    subprocess.run(
                        [*IN_BACKGROUND, pid, *kept],
                        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True,
                    )  # fmt: skip
            wait_until(lambda: ready() or not pid.exists() or is_gone(pid), seconds=seconds, explain=lambda: has_failed(command, log))
            assert ready(), has_failed(command, log)
        try:
            yield
        finally:
            with locked(place / "lock"), suppress(BlockingIOError):  # another worker uses it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(users, fcntl.LOCK_UN)
                wait_until(lambda: not pid.exists() or is_gone(pid), seconds=seconds, explain=lambda: f"still running: {command}")


def has_failed(command: Sequence[str], log: Path) -> str:
    """Return a message about a server that all tests of this run share and that does not start."""
    return f"the server that all workers of this run share does not start: {' '.join(command)}\n{log}:\n{log.read_text()}"


def is_gone(pid: Path) -> bool:
    """Return whether the process whose number is in that file has ended."""
    number = pid.read_text().strip() if pid.exists() else ""
    if not number:
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
