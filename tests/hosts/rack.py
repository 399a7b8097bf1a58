"""Several hosts on one machine: network namespaces around a switch, each host with its own processes, memory, name and SSH server.

    with Rack(place, 4) as rack:
        cluster_file.write_text(yaml.safe_dump(rack.cluster()))
        rack[1].cut("orchestrator")

They see this machine's files, its interpreters included: a shared file system, so to say.
Everything is in network namespaces whose names begin with `hfN`; N is also the third number of all addresses, and belongs to who holds
the lock N. Hosts go off when who made them is gone; what is left of their networks goes when somebody makes hosts under that number again.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.hosts.commands import inside, ip, missing, run
from tests.hosts.host import Host, Network
from tests.ssh.sshd import Sshd, key_at

LOCKS = Path("/run/lock/holdfast-hosts")
RACKS = 250
LOWEST = 0
"""The first number that is tried; a test that wants the same one twice, and nobody in between, takes another."""
FIRST = 129
"""Last number of the first host's address: the upper half of the numbers are hosts, so that one rule names them all."""
MOST = 126


class NoHosts(Exception):
    """There can be no hosts on this machine, or no further ones."""


@dataclass
class Rack:
    """So many hosts, all of them on."""

    place: Path
    count: int
    memory: str = "256m"
    more: tuple[str, ...] = ()
    """Further lines of each SSH server's configuration, e.g. `SetEnv`."""
    hosts: list[Host] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert 1 <= self.count <= MOST
        if why := missing():
            raise NoHosts(why)
        self._lock, self.number = _claim()
        self.switch = f"hf{self.number}"
        _sweep(self.switch)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _what: BaseException | None, _where: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def address(self) -> str:
        """Return the address of this machine, as the hosts see it: the orchestrator's."""
        return f"10.231.{self.number}.1"

    @property
    def key(self) -> Path:
        """Return the key of a user who may log in to all of them."""
        return self.place / "id"

    @property
    def known_hosts(self) -> Path:
        """Return the file that has the keys of all."""
        return self.place / "known_hosts"

    @property
    def login(self) -> list[str]:
        """Return the words before the address of a host, and a command, with which who may log in does so."""
        options = (f"UserKnownHostsFile={self.known_hosts}", "BatchMode=yes", "ConnectTimeout=20")
        return ["ssh", "-F", "none", "-i", str(self.key), *(word for option in options for word in ("-o", option))]

    def second_address(self) -> str:
        """Give this machine a further address, which is no part of a cut from the orchestrator; return it."""
        address = f"10.231.{self.number}.2"
        with suppress(RuntimeError):  # it has it
            ip([f"addr add {address}/24 dev {self.switch}"])
        return address

    def cluster(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a cluster file of all of them."""
        hosts = [{"name": host.name, "address": host.address} for host in self.hosts]
        given = {"kind": "ssh", "hosts": hosts, "key": str(self.key), "known_hosts": str(self.known_hosts), "python": sys.executable}
        return {**given, **fields}

    def named(self, name: str) -> Host:
        """Return a host by its name."""
        return next(host for host in self.hosts if host.name == name)

    def limit(self, rate: str | None) -> None:
        """Let through so much and no more, e.g. `64kbit`, between this machine and all hosts, each way; nothing named: all again."""
        words = ("tbf", "rate", rate, "burst", "4kb", "latency", "2s") if rate else ()
        verb = "replace" if rate else "del"
        run(["tc", "qdisc", verb, "dev", self.switch, "root", *words])
        inside(self.switch, "tc", "qdisc", verb, "dev", "uplink", "root", *words)

    def held_back(self) -> int:
        """Return how often the limit has had something from the hosts wait: the proof that the link is slow."""
        (row,) = [row for row in inside(self.switch, "tc", "-s", "qdisc", "show", "dev", "uplink").splitlines() if "overlimits" in row]
        return int(row.partition("overlimits ")[2].split()[0])

    def explain(self) -> str:
        """Return what is to be known of all of them when a test failed."""
        return "\n".join(host.explain() for host in self.hosts)

    def close(self) -> None:
        """Take everything away."""
        for host in self.hosts:
            host.close()
        _sweep(self.switch)
        self._lock.close()

    def _make(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        key_at(self.key)
        self._lay_cables()
        self.hosts = [self._host(number) for number in range(self.count)]
        names = [("127.0.0.1", "localhost"), (self.address, "orchestrator"), *((host.address, host.name) for host in self.hosts)]
        (self.place / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
        for host in self.hosts:
            host.plug()
            host.power_on()
        for host in self.hosts:
            host.serve()
        self.known_hosts.write_text("".join(host.server.known for host in self.hosts))

    def _lay_cables(self) -> None:
        """Make the switch, and a cable from this machine to it."""
        ip([f"netns add {self.switch}"])
        ip([f"link add {self.switch} type veth peer name uplink netns {self.switch}", f"addr add {self.address}/24 dev {self.switch}"])
        ip(["link add switch type bridge", "link set uplink master switch", "link set uplink up", "link set switch up"], self.switch)
        ip([f"link set {self.switch} up"])

    def _host(self, number: int) -> Host:
        name, address = f"n{number}", f"10.231.{self.number}.{FIRST + number}"
        place = self.place / name
        (place / "home").mkdir(parents=True)
        _write_account(place)
        server = Sshd(place / "sshd", address, self.key.with_suffix(".pub"), port=22, more=("MaxSessions 200", *self.more))
        network = Network(self.switch, self.address, f"10.231.{self.number}.128/25")
        return Host(name, number, address, place, network, server, self.memory)


def _write_account(place: Path) -> None:
    """Give who runs this a home and a shell of their own on the host: what `.bashrc` does takes long on many machines."""
    me = pwd.getpwuid(os.geteuid())
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(f"{me.pw_name}:")]
    mine = f"{me.pw_name}:x:{me.pw_uid}:{me.pw_gid}::{place / 'home'}:/bin/sh"
    (place / "passwd").write_text("\n".join([mine, *others]) + "\n")
    (place / "shadow").write_text(f"{me.pw_name}:*:19000:0:99999:7:::\n")  # `!` in place of the star would be a locked account
    (place / "shadow").chmod(0o600)


def _claim() -> tuple[IO[bytes], int]:
    """Take a number that is nobody's, for as long as this process lives."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    for number in range(LOWEST, RACKS):
        lock = (LOCKS / str(number)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return lock, number
    raise NoHosts(f"all {RACKS} numbers are taken")


def _sweep(switch: str) -> None:
    """Remove what one who is dead left under this name. Their hosts have no power any more, so networks are all there is."""
    names = {line.split()[0] for line in run(["ip", "netns", "list"]).splitlines()}
    for name in sorted(name for name in names if name == switch or name.startswith(f"{switch}n")):
        for pid in run(["ip", "netns", "pids", name]).split():  # a host that is just going off
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with suppress(RuntimeError):
            ip([f"netns del {name}"])
    with suppress(RuntimeError):  # it goes with the switch, but not at once
        ip([f"link del {switch}"])
