"""A Prefect server for who has none: bound to the life of the process that needs it.

Standard library only: whether a server is configured is read from the environment and the profile, since importing Prefect takes seconds.
``python -m holdfast.prefect.server PROGRAM ARGUMENT...`` runs a Python module with a server at hand, its own if none is
configured; the module takes the place of this process, so that the server dies with it, however it dies.
"""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

from holdfast.control.supervisor.detach import handle_sigusr1, sigusr1_blocked
from holdfast.errors import OperatorError
from holdfast.log import line
from holdfast.own_variables import with_added
from holdfast.paths import own_folder
from holdfast.ports import free_port, is_free, listens
from holdfast.process import die_with_parent
from holdfast.redaction import shown, without

START_SECONDS: Final = 120.0
"""How long a server may take to answer: 5 s as a rule, longer on its first start on a busy machine."""

PATIENCE: Final = 5.0
"""Seconds for which a server that was named may be away before a flow begins without it."""

SLOW: Final = 60.0
"""Seconds that it may take to answer: one that is slow is not away."""

ATTEMPTS: Final = 3
"""Ports that are tried: it takes seconds until a server listens on the one that was free."""

STANDS_IN: Final = "HOLDFAST_PREFECT_STANDS_IN"
"""Variable: the server that was named and is away, or nothing where none was, for which one of our own stands in."""

NAMED_AUTH: Final = "HOLDFAST_PREFECT_STANDS_IN_AUTH"
"""Variable: user and password for the server that was named and is away; those of our own stand where Prefect looks for them."""

PASSWORD: Final = "holdfast-server.password"  # noqa: S105 (the name of a file)
"""File with user and password of the servers of our own, beside their database: every user of this machine reaches their port."""

USER: Final = "holdfast"

QUIET: Final = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
"""A server of ours sends nothing anywhere."""


class ServerSilent(OperatorError):
    """A Prefect server of our own did not come up."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log

    def __str__(self) -> str:
        return f"the temporary Prefect server did not come up; see {self.log}. Or start one yourself and set PREFECT_API_URL to it."


def is_configured() -> bool:
    """Tell whether Prefect knows a server."""
    return bool(configured())


def configured() -> str:
    """Return the address of the server that Prefect knows: by the environment, or by its active profile; empty when it knows none."""
    return setting("PREFECT_API_URL")


def named() -> str | None:
    """Return the address of the server that the operator names, also while one of our own stands in; None where that is all there is."""
    return (os.environ[STANDS_IN] or None) if STANDS_IN in os.environ else configured()


def is_temporary_server() -> bool:
    """Tell whether the server in use is one of our own, which ends with this process: no link to it would last."""
    return STANDS_IN in os.environ


def setting(name: str) -> str:
    """Return what Prefect is told by the environment, or by its active profile; empty when it is told nothing."""
    if value := os.environ.get(name):
        return value
    with suppress(OSError, ValueError, KeyError, AttributeError, RuntimeError):
        folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
        profiles = tomllib.loads((folder / "profiles.toml").read_text())
        active = os.environ.get("PREFECT_PROFILE") or profiles["active"]
        return str(profiles["profiles"][active].get(name) or "")
    return ""


def auth_string() -> str:
    """Return user and password for the server that the operator names, or where there is none for ours; empty when none are wanted."""
    return os.environ.get(NAMED_AUTH, "") if STANDS_IN in os.environ and named() else setting("PREFECT_API_AUTH_STRING")


def unreachable_reason(url: str, seconds: float = PATIENCE) -> str:
    """Return why the server at *url*, or its database, cannot be used, if that is so for so many *seconds*; empty when it can."""
    until, why = time.monotonic() + seconds, ""
    while True:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/ready", timeout=SLOW):  # noqa: S310 (the address that the operator gave)
                return ""
        except urllib.error.HTTPError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:  # it answers; whether we may use it Prefect will say
                return ""
            why = f"its database is away (it answers {error.code})"
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", error))
        if time.monotonic() >= until:
            return without(why, url)
        time.sleep(0.5)


class TemporaryServer:
    """A server on a free port of the loopback interface; it dies with this process.

    What it knows is this user's alone: it asks for the password that stands in `password`, and its files are private.
    """

    def __init__(self, folder: Path, log: str, environment: dict[str, str]) -> None:
        """Start it with *folder* as its home and *log* there as its log; raise ``OSError`` when that cannot be."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own_folder("PREFECT_HOME", str(folder))
        _make_private(folder)
        self.log, self.password = folder / log, folder / PASSWORD
        self._auth, self._given = _kept(self.password), {**environment, "PREFECT_HOME": str(folder)}
        self._begin()

    def _begin(self) -> None:
        parent, self._port = os.getpid(), free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        ours = {"PREFECT_API_URL": f"{self.address}/api", "PREFECT_API_AUTH_STRING": self._auth}
        self.environment = with_added(self._given, QUIET) | ours
        with open(self.log, "ab", opener=_privately) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, "PREFECT_LOGGING_SERVER_LEVEL": "WARNING", "PREFECT_SERVER_API_AUTH_STRING": self._auth},
                start_new_session=True,
                umask=0o077,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (nobody has started a thread yet)
            )

    @property
    def words(self) -> str:
        """Return the address of its UI, and how to get in there."""
        return f"{self.address}/runs (it asks for a password, which is the line in {self.password})"

    def wait(self) -> None:
        """Wait until the server answers; raise `ServerSilent` when it does not. One that has lost its port to somebody takes another."""
        until = time.monotonic() + START_SECONDS
        for attempt in range(ATTEMPTS):
            if attempt:
                self._begin()
            while time.monotonic() < until and self._process.poll() is None:
                if self._answers():
                    return
                time.sleep(0.1)
            self.close()
            if is_free(self._port):
                break
        raise ServerSilent(str(self.log))

    def _answers(self) -> bool:
        """Tell whether the server is ready, and is ours: a stranger on this port would answer too."""
        if listens(self._process.pid, self._port):
            with suppress(OSError), urllib.request.urlopen(f"{self.address}/api/health", timeout=2) as answer:  # noqa: S310 (our own address)
                return bool(answer.status == 200)  # noqa: PLR2004 (HTTP's word for yes)
        return False

    def close(self) -> None:
        """End the server. What it has answered is in its database; it has nothing else to save."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make_private(folder: Path) -> None:
    """Take from others the databases in *folder* that were made while they were everybody's to read; journals come to be like them."""
    for one in folder.glob("*.db*"):
        with suppress(OSError):
            facts = one.lstat()
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o077:
                one.chmod(0o600)


def _kept(path: Path) -> str:
    """Return user and password in the file, made if there are none yet. Several servers may begin at once, and have the same."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        if told := _read(path):
            return told
        path.unlink()  # an empty one is no secret
    try:
        with open(beside, "x", opener=_privately, encoding="ascii") as file:
            file.write(f"{USER}:{secrets.token_urlsafe(24)}\n")
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> str:
    with open(path, opener=_privately, encoding="ascii", errors="replace") as file:
        return file.read(4096).strip()


def main(arguments: list[str]) -> int:
    """Become ``python -m`` *arguments*, with a Prefect server to talk to; who is told to let go meanwhile has nothing to let go of."""
    detach, environment, known = handle_sigusr1(), dict(os.environ), configured()
    away = unreachable_reason(known) if known else ""
    if away or not known:
        try:
            folder = own_folder("PREFECT_HOME", environment.get("PREFECT_HOME") or "~/.prefect")
            if away:
                print(f"The Prefect server at {shown(known)} cannot be used: {away}. The flow goes on with one of its own.", flush=True)  # noqa: T201
                environment["PREFECT_API_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{folder / 'holdfast-server.db'}"
            server = TemporaryServer(folder, "holdfast-server.log", environment)
            server.wait()
        except (OSError, OperatorError) as error:
            print(line("refused", f"holdfast: {error}", level="error"), file=sys.stderr)  # noqa: T201
            return 2
        environment = {**server.environment, STANDS_IN: known, NAMED_AUTH: setting("PREFECT_API_AUTH_STRING") if known else ""}
        print(line("prefect.ui", f"Prefect UI while this job runs: {server.words}"), flush=True)  # noqa: T201
    command = [sys.executable, "-P", "-m", *arguments]
    with sigusr1_blocked():
        if detach.why:
            from holdfast.exit_codes import DETACHED  # noqa: PLC0415 (with the history it takes half a second, which others need not wait for)

            return DETACHED
        return os.execve(sys.executable, command, environment)  # noqa: S606 (the same process: the server dies with it)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
