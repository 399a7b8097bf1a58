"""Start and end the process of a job's flow, its controller: it outlives the command that started it, and the terminal."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import holdfast
from holdfast import paths
from holdfast.control.supervisor.detach import sigusr1_blocked
from holdfast.errors import JobAlreadyRunning, NotWritable
from holdfast.history import queries
from holdfast.history.lease import this_host
from holdfast.history.models import Job, Lease
from holdfast.history.store import History
from holdfast.host.process import parent_of
from holdfast.prefect.server import UI_MESSAGE, UNUSABLE, is_configured

PROGRAM: Final = "holdfast.flows.training_job"
START_TIMEOUT: Final = 60.0
"""Seconds that another command may take to start the same job."""
ERROR_PREFIX: Final = "holdfast: "
"""Prefix of the last message in a flow's log when the flow refused to start."""


class StartLock:
    """The right to start a job of one name on this machine: of two commands at once, the second finds the job running."""

    def __init__(self, job: str) -> None:
        self._folder = writable_folder(job)
        self._job = job
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._folder / "starting.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    self.release()
                    raise JobAlreadyRunning(self._job, "another `holdfast run` that is starting it") from None
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the next command proceed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FlowProcess:
    """A flow that this command started."""

    def __init__(self, job: str, spec: Path, lock: StartLock, known: frozenset[str], name: str = "flow") -> None:
        self.job, self._lock, self._known = job, lock, known
        self.log = spec.with_name(f"{name}.log")
        with self.log.open("ab") as log, sigusr1_blocked():
            self._begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.prefect.server", PROGRAM, str(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )
        self.pid = self._process.pid

    def is_holder(self, lease: Lease) -> bool:
        """Return whether this flow, or its launcher, holds *lease*."""
        return lease.host == this_host() and self.pid in {lease.pid, parent_of(lease.pid)}

    def submission(self, history: History) -> Job | None:
        """Return the job that this flow entered into the history."""
        return next((job for job in queries.jobs(history, self.job, limit=5) if job.id not in self._known), None)

    def release_lock(self) -> None:
        """Let other commands proceed: the history shows that the job runs."""
        self._lock.release()

    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Request that the flow stop its job at once."""
        self._signal(signal.SIGTERM)

    def detach(self) -> None:
        """Request that the flow detach from its job, which continues."""
        self._signal(signal.SIGUSR1)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def last_lines(self, lines: int = 15) -> list[str]:
        """Return the last *lines* that this flow wrote into its log."""
        try:
            with self.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._begin, end - 64 * 1024))
                return log.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def refusal(self) -> str | None:
        """Return the message with which the flow refused to start."""
        text = "\n".join(map(_message, self.last_lines()))
        begin = text.rfind("\n" + ERROR_PREFIX) + 1 or (0 if text.startswith(ERROR_PREFIX) else -1)
        return text[begin:].removeprefix(ERROR_PREFIX).strip() if begin >= 0 else None


def waits_for(said: str) -> str:
    """Return what a flow that has *said* this in its log waits for before it has a job to show."""
    if UI_MESSAGE in said or (is_configured() and UNUSABLE not in said):
        return "the job's controller to start"
    why = "the configured one cannot be used" if is_configured() else "PREFECT_API_URL is not set"
    return f"a temporary Prefect server to start, as {why}; its first start also creates its database"


def write_spec(job: str, spec: Mapping[str, object], flow: str = "flow") -> Path:
    """Write what the flow of that name is to run into the job's folder, and return the file."""
    path = writable_folder(job) / ("spec.json" if flow == "flow" else f"{flow}.json")
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(spec, indent=1))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NotWritable("the job's folder", str(path.parent), error.strerror or str(error)) from error
    return path


def writable_folder(job: str) -> Path:
    """Return the folder of *job*, created if needed."""
    folder = paths.job_directory(job)
    try:
        paths.make_private(folder)
        (folder / ".").stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise NotWritable("the job's folder", str(folder), error.strerror or str(error)) from error
    return folder


def _message(line: str) -> str:
    """Return the message in a line of a log in either format, text or JSON."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return str(entry.get("message", line)) if isinstance(entry, dict) else line


def _environment() -> dict[str, str]:
    """Return our environment; in a checkout that is not installed, with its folder."""
    root = Path(next(iter(holdfast.__path__))).parent
    environment = dict(os.environ)
    if (root / "pyproject.toml").exists():
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(root), environment.get("PYTHONPATH")) if part)
    return environment
