"""Real SSH servers on this machine, one process each, under the user of the tests: nodes that can be broken one by one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.host.ports import free_port
from tests.waiting import wait_until

PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))

SSH = 22


def key_at(path: Path, *more: str) -> Path:
    """Make a pair of keys; return the private one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, *more, "-f", path], check=True)
    return path


@dataclass
class Sshd:
    """A node: an address of its own, a host key, and a server."""

    place: Path
    address: str
    authorized: Path
    port: int = field(default_factory=free_port)
    more: tuple[str, ...] = ()
    """Further lines of its configuration."""
    process: subprocess.Popen[bytes] | None = None
    within: tuple[str, ...] = ()
    """What comes before its command, so that it runs on another host."""

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True)
        self.key = key_at(self.place / "host_key")

    @property
    def known(self) -> str:
        """Return its line of known_hosts."""
        kind, key = self.key.with_suffix(".pub").read_text().split()[:2]
        return f"{self.address if self.port == SSH else f'[{self.address}]:{self.port}'} {kind} {key}\n"

    @property
    def log(self) -> str:
        """Return what the server wrote."""
        return (self.place / "log").read_text()

    def start(self) -> None:
        """Start the server and wait until it listens."""
        settings = {
            "Port": self.port,
            "ListenAddress": self.address,
            "HostKey": self.key,
            "PidFile": "none",
            "AuthorizedKeysFile": self.authorized,
            "AuthenticationMethods": "publickey",
            "PermitRootLogin": "prohibit-password",
            "UsePAM": "no",
            "StrictModes": "no",
            "UseDNS": "no",
            "PrintMotd": "no",
            "MaxStartups": "1000",
            "LogLevel": "VERBOSE",
        }
        config = self.place / "config"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()) + "\n".join([*self.more, ""]))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it locks up what it does not trust
        assert PROGRAM is not None
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.within, PROGRAM, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self.listens, seconds=60, explain=lambda: self.log)

    def listens(self) -> bool:
        """Return whether a connection is taken."""
        try:
            socket.create_connection((self.address, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def children(self) -> list[int]:
        """Return the processes of its connections, and what they run."""
        assert self.process is not None
        return _below(self.process.pid)

    def logins(self) -> int:
        """Return the number of logins."""
        return self.log.count("Accepted publickey")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and to all that it has started."""
        assert self.process is not None
        for pid in [self.process.pid, *self.children()]:
            with suppress(ProcessLookupError):  # a child that ends by itself meanwhile
                os.kill(pid, number)

    def stop(self) -> None:
        """End the server with all its connections."""
        if self.process is not None:
            for pid in [self.process.pid, *self.children()]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait()
            self.process = None


def _below(pid: int) -> list[int]:
    """Return all processes below *pid*."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            child = int(entry.parent.name)
            found += [child, *_below(child)]
    return found
