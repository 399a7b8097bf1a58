"""Start a temporary Prefect server if none is configured; it lives as long as the process that needs it.

The settings are read from the environment and the active profile, as importing Prefect takes seconds.
``python -m holdfast.prefect.server PROGRAM ARGUMENT...`` runs a Python module with a Prefect server, a temporary one if none is
configured. The module replaces this process, so the server dies with it.
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

from holdfast.control.supervisor import early_launch
from holdfast.control.supervisor.detach import Detach, handle_sigusr1, sigusr1_blocked
from holdfast.errors import OperatorError
from holdfast.host.own_variables import with_added
from holdfast.host.ports import free_port, is_free, listens
from holdfast.host.process import die_with_parent
from holdfast.log import line
from holdfast.paths import own_folder
from holdfast.security.redaction import shown, without

START_SECONDS: Final = 120.0
"""How long a server may take to answer: usually 5 s, longer on its first start on a busy machine."""
UI_MESSAGE: Final = "Prefect UI while this job runs: "
"""Begin of the message that follows once a temporary server answers."""
UNUSABLE: Final = "cannot be used"
"""What is said of a configured server before a temporary one replaces it."""
UNREACHABLE_SECONDS: Final = 5.0
"""Seconds that a configured server may be unreachable before a flow starts without it."""
REQUEST_SECONDS: Final = 60.0
"""Timeout of one request, in seconds: a slow server is not an unreachable one."""
ATTEMPTS: Final = 3
"""Number of ports to try: another process may take a free port before the server listens on it."""
TEMPORARY_FOR: Final = "HOLDFAST_PREFECT_STANDS_IN"
"""Environment variable: the configured server that a temporary one replaces; empty if none was configured."""
CONFIGURED_AUTH: Final = "HOLDFAST_PREFECT_STANDS_IN_AUTH"
"""Environment variable: user and password of the configured server; those of the temporary one are where Prefect reads them."""
PASSWORD: Final = "holdfast-server.password"  # noqa: S105 (the name of a file)
"""File with user and password of the temporary server, next to its database: every user of this machine can connect to its port."""
USER: Final = "holdfast"
QUIET: Final = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
"""A temporary server sends no telemetry."""


class ServerNotStarted(OperatorError):
    """The temporary Prefect server did not start."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log

    def __str__(self) -> str:
        return f"the temporary Prefect server did not start; see {self.log}. Or start one yourself and set PREFECT_API_URL to it."


def is_configured() -> bool:
    """Return whether a Prefect server is configured."""
    return bool(configured())


def configured() -> str:
    """Return the API URL of the configured server, from the environment or the active profile; empty if there is none."""
    return setting("PREFECT_API_URL")


def named() -> str | None:
    """Return the API URL that the operator configured, also while a temporary server replaces it; None if there is none."""
    return (os.environ[TEMPORARY_FOR] or None) if TEMPORARY_FOR in os.environ else configured()


def is_temporary_server() -> bool:
    """Return whether the server in use is a temporary one, to which no link stays valid."""
    return TEMPORARY_FOR in os.environ


def setting(name: str) -> str:
    """Return a Prefect setting from the environment or the active profile; empty if it is not set."""
    if value := os.environ.get(name):
        return value
    with suppress(OSError, ValueError, KeyError, AttributeError, RuntimeError):
        folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
        profiles = tomllib.loads((folder / "profiles.toml").read_text())
        active = os.environ.get("PREFECT_PROFILE") or profiles["active"]
        return str(profiles["profiles"][active].get(name) or "")
    return ""


def auth_string() -> str:
    """Return user and password for the configured server, or for the temporary one if none is configured; empty if none are needed."""
    return os.environ.get(CONFIGURED_AUTH, "") if TEMPORARY_FOR in os.environ and named() else setting("PREFECT_API_AUTH_STRING")


def unreachable_reason(url: str, seconds: float = UNREACHABLE_SECONDS) -> str:
    """Return why the server at *url*, or its database, has been unreachable for *seconds*; empty if it is reachable."""
    until, why = time.monotonic() + seconds, ""
    while True:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/ready", timeout=REQUEST_SECONDS):  # noqa: S310 (the address that the operator gave)
                return ""
        except urllib.error.HTTPError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:  # it answers; Prefect reports whether access is allowed
                return ""
            why = f"its database is unreachable (it answers {error.code})"
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", error))
        if time.monotonic() >= until:
            return without(why, url)
        time.sleep(0.5)


class TemporaryServer:
    """A Prefect server on a free port of the loopback interface; it dies with this process.

    Only this user can use it: it requires the password in the file `password`, and its files are private.
    """

    def __init__(self, folder: Path, log: str, environment: dict[str, str]) -> None:
        """Start it with *folder* as its home and *log* as its log file there; raise ``OSError`` if that fails."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own_folder("PREFECT_HOME", str(folder))
        _make_private(folder)
        self.log, self.password = folder / log, folder / PASSWORD
        self._auth, self._base_environment = _credentials(self.password), {**environment, "PREFECT_HOME": str(folder)}
        self._start()

    def _start(self) -> None:
        parent, self._port = os.getpid(), free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        ours = {"PREFECT_API_URL": f"{self.address}/api", "PREFECT_API_AUTH_STRING": self._auth}
        self.environment = with_added(self._base_environment, QUIET) | ours
        with open(self.log, "ab", opener=_privately) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.prefect.serve", "--host", "127.0.0.1", "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, "PREFECT_LOGGING_SERVER_LEVEL": "WARNING", "PREFECT_SERVER_API_AUTH_STRING": self._auth},
                start_new_session=True,
                umask=0o077,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (no thread has been started yet)
            )

    @property
    def ui_hint(self) -> str:
        """Return the address of its UI, and where its password is."""
        return f"{self.address}/runs (it asks for a password, which is the line in {self.password})"

    def wait(self) -> None:
        """Wait until the server answers; raise `ServerNotStarted` if it does not. Try another port if the first one is taken."""
        until = time.monotonic() + START_SECONDS
        for attempt in range(ATTEMPTS):
            if attempt:
                self._start()
            while time.monotonic() < until and self._process.poll() is None:
                if self._answers():
                    return
                time.sleep(0.1)
            self.close()
            if is_free(self._port):
                break
        raise ServerNotStarted(str(self.log))

    def _answers(self) -> bool:
        """Return whether the server is ready; a foreign server on this port does not count."""
        if listens(self._process.pid, self._port):
            with suppress(OSError), urllib.request.urlopen(f"{self.address}/api/health", timeout=2) as answer:  # noqa: S310 (our own address)
                return bool(answer.status == 200)  # noqa: PLR2004 (HTTP's word for yes)
        return False

    def close(self) -> None:
        """Kill the server. All it has answered is in its database already."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make_private(folder: Path) -> None:
    """Make databases in *folder* that others can read private; their journals inherit the mode."""
    for one in folder.glob("*.db*"):
        with suppress(OSError):
            facts = one.lstat()
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o077:
                one.chmod(0o600)


def _credentials(path: Path) -> str:
    """Return user and password from the file; create it if needed. Servers that start at the same time share one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        if credentials := _read(path):
            return credentials
        path.unlink()  # an empty file
    try:
        with open(temporary, "x", opener=_privately, encoding="ascii") as file:
            file.write(f"{USER}:{secrets.token_urlsafe(24)}\n")
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> str:
    with open(path, opener=_privately, encoding="ascii", errors="replace") as file:
        return file.read(4096).strip()


def main(arguments: list[str]) -> int:
    """Replace this process by ``python -m`` *arguments*, with a Prefect server; exit at once if it has to detach meanwhile."""
    detach = handle_sigusr1()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    failed = True
    try:
        early_launch.start(arguments, detach)
        return _run(arguments, detach)
    except SystemExit:
        failed = False
        raise
    finally:
        early_launch.abandon(early_launch.DETACH if detach.why else early_launch.STOP, failed=failed)


def _exit_on_signal(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _run(arguments: list[str], detach: Detach) -> int:
    environment, known = dict(os.environ), configured()
    problem = unreachable_reason(known) if known else ""
    if problem or not known:
        try:
            folder = own_folder("PREFECT_HOME", environment.get("PREFECT_HOME") or "~/.prefect")
            if problem:
                text = f"The Prefect server at {shown(known)} {UNUSABLE}: {problem}. The flow continues with a temporary one."
                print(text, flush=True)  # noqa: T201
                environment["PREFECT_API_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{folder / 'holdfast-server.db'}"
            server = _temporary_server(folder, environment, detach)
        except (OSError, OperatorError) as error:
            if detach.why:
                return _detached()
            print(line("refused", f"holdfast: {error}", level="error"), file=sys.stderr)  # noqa: T201
            return 2
        environment = {**server.environment, TEMPORARY_FOR: known, CONFIGURED_AUTH: setting("PREFECT_API_AUTH_STRING") if known else ""}
        print(line("prefect.ui", f"{UI_MESSAGE}{server.ui_hint}"), flush=True)  # noqa: T201
    command = [sys.executable, "-P", "-m", *arguments]
    with sigusr1_blocked():
        if detach.why:
            return _detached()
        return os.execve(sys.executable, command, environment)  # noqa: S606 (replaces this process, so that the server dies with it)


def _detached() -> int:
    from holdfast.exit_codes import DETACHED  # noqa: PLC0415 (importing it takes half a second)

    return DETACHED


def _temporary_server(folder: Path, environment: dict[str, str], detach: Detach) -> TemporaryServer:
    """Start a temporary server and wait until it answers; try again for as long as a launcher controls the job meanwhile."""
    while True:
        try:
            server = TemporaryServer(folder, "holdfast-server.log", environment)
            server.wait()
        except (OSError, ServerNotStarted) as error:
            if not early_launch.go_on_alone():
                raise
            text = f"{error} The job goes on without it; the next attempt follows in {early_launch.RETRY_SECONDS:.0f} s."
            print(line("prefect.late", text, level="warning"), flush=True)  # noqa: T201
            if not early_launch.wait_to_try_again(detach):
                raise
        else:
            return server


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
