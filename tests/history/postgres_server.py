"""A real PostgreSQL of our own: in a temporary folder, on a unix socket, as a user without privileges."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import psycopg

MISSING: Final = "PostgreSQL is not installed: scripts/system_packages.sh installs it (Debian's package `postgresql`)"
_UNPRIVILEGED: Final = ("postgres", "nobody")


def programs() -> Path | None:
    """Return the folder with initdb and pg_ctl of the newest PostgreSQL installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """A server that gives each test a place of its own."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))  # short: a socket's path has 107 characters at most
        self._as = self._unprivileged() if os.geteuid() == 0 else []
        self._schemas = 0
        options = ["--username=holdfast", "--auth=trust", "--encoding=UTF8", "--no-sync", "--no-instructions"]
        self._run("initdb", "--pgdata", str(self.folder / "data"), *options)
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all guarded scram-sha-256\nlocal all barred reject\n{rules.read_text()}")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off"
        self._control("start", "--options", settings, "--log", str(self.folder / "log"))

    def stop(self) -> None:
        """End the server at once, as a crash would."""
        self._control("stop", "--mode", "immediate")

    def remove(self) -> None:
        """Stop the server if it runs, and remove its folder."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder)

    def fresh_url(self) -> str:
        """Return the URL of an empty schema, which is to a client like an empty database, at a fraction of the files."""
        self._schemas += 1
        with psycopg.connect(host=str(self.folder), user="holdfast", dbname="postgres") as connection:
            connection.execute(f"CREATE SCHEMA history{self._schemas}".encode())
        return f"{self.url('postgres')}&options=-csearch_path%3Dhistory{self._schemas}"

    def url(self, database: str) -> str:
        """Return the URL of a database of that name."""
        return f"postgresql://holdfast@/{database}?host={self.folder}"

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "--wait", "--silent", "--pgdata", str(self.folder / "data"), *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # To a file, not a pipe: the server inherits it and would keep a pipe open.
        with (self.folder / f"{program}.out").open("w+") as said:
            argv = [*self._as, str(self._programs / program), *arguments]
            done = subprocess.run(argv, cwd=self.folder, stdout=said, stderr=said, check=False, env={"LC_ALL": "C.UTF-8"})
            said.seek(0)
            log = self.folder / "log"
            assert done.returncode == 0, f"{program}: {said.read()}\n{log.read_text() if log.exists() else ''}"

    def _unprivileged(self) -> list[str]:
        """Give the folder to a user who is not root: PostgreSQL refuses to run as root."""
        user = next(user for name in _UNPRIVILEGED for user in pwd.getpwall() if user.pw_name == name)
        os.chown(self.folder, user.pw_uid, user.pw_gid)
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
