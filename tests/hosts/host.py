"""One host: power, an SSH server, and a cable that can be cut in many ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from tests.hosts.commands import inside, ip, run
from tests.ssh.sshd import Sshd
from tests.waiting import wait_until

Whom = Literal["orchestrator", "peers", "all"]
Direction = Literal["both", "in", "out"]
CHAINS = {"in": ("INPUT", "-i", "-s"), "out": ("OUTPUT", "-o", "-d")}
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Network:
    """Where a rack is: the switch, and who has which addresses."""

    switch: str
    """Network namespace of the switch, and the first letters of every name."""
    orchestrator: str
    """Address of this machine in the rack."""
    peers: str
    """Addresses of all hosts."""


@dataclass
class Host:
    """A machine of its own: name, address, processes, network devices, memory, home, boot id and kernel log. Only the files are shared."""

    name: str
    number: int
    address: str
    place: Path
    network: Network
    server: Sshd
    memory: str = "256m"
    """Size of its /dev/shm."""
    process: subprocess.Popen[bytes] | None = None
    links: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logged: int = 0

    @property
    def namespace(self) -> str:
        """Return the name of its network namespace."""
        return f"{self.network.switch}n{self.number}"

    @property
    def cable(self) -> str:
        """Return the name of its cable's end in the switch."""
        return f"port{self.number}"

    @property
    def mac(self) -> str:
        """Return its address on the wire: the same after every change of the device, so that nobody's memory of it is wrong."""
        return "02:" + ":".join(f"{int(part):02x}" for part in self.address.split(".")) + ":01"

    @property
    def home(self) -> Path:
        """Return the folder in which who logs in finds themselves."""
        return self.place / "home"

    @property
    def kernel_log(self) -> Path:
        """Return what it takes for `/dev/kmsg`. The machine's own has what other tests do to its disks and networks."""
        return self.place / "kmsg"

    def log(self, text: str, level: int = 3) -> None:
        """Have its kernel log a line: an error, unless another *level* is given."""
        self._logged += 1
        with self.kernel_log.open("a") as file:
            file.write(f"{level},{self._logged},{time.monotonic_ns() // 1000},-;{text}\n")

    @property
    def is_on(self) -> bool:
        """Return whether it has power."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Return its first process, as this machine counts."""
        assert self.process is not None, f"{self.name} is off"
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    @property
    def within(self) -> list[str]:
        """Return the words before a command that is to run on it, as root, without SSH."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-p", "-m"]

    def run(self, *words: str, text: str = "") -> str:
        """Run a program on it, without SSH; return what it says."""
        return run([*self.within, *words], text)

    def start(self, *words: str, log: int | IO[bytes] = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a program on it, without SSH."""
        return subprocess.Popen([*self.within, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def processes(self) -> dict[int, str]:
        """Return the command of each of its processes, by its number on this machine."""
        found = {}
        here = Path("/proc/self/ns/pid").readlink()
        for pid in map(int, run(["ip", "netns", "pids", self.namespace]).split()):
            with suppress(OSError):
                if Path(f"/proc/{pid}/ns/pid").readlink() == here:  # who waits on this machine for a program on that one
                    continue
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def pid_here(self, pid: int) -> int:
        """Return the number that process *pid* of this host has on this machine."""
        for here in self.processes():
            with suppress(OSError):  # it has ended
                lines = Path(f"/proc/{here}/status").read_text().splitlines()
                if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == str(pid):
                    return here
        raise LookupError(f"{self.name} has no process {pid}")

    # power

    def plug(self) -> None:
        """Give it a network device, and a cable to the switch that carries nothing yet."""
        ip([f"netns add {self.namespace}"])
        inner = f"{self.namespace}e"
        ip(
            [
                f"link add {self.cable} type veth peer name {inner} address {self.mac} netns {self.namespace}",
                f"link set {self.cable} master switch",
            ],
            self.network.switch,
        )
        lines = [f"link set {inner} name eth0", f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"]
        ip(lines, self.namespace)

    def power_on(self) -> None:
        """Boot it: an empty memory and kernel log, another boot id, an SSH server, and a cable that carries."""
        assert not self.is_on, f"{self.name} is on"
        self.kernel_log.write_bytes(b"")
        (self.place / "boot_id").write_text(f"{uuid.uuid4()}\n")
        given = {"name": self.name, "memory": self.memory, "binds": self._binds()}
        unshare = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        words = [
            "nsenter",
            f"--net=/run/netns/{self.namespace}",
            *unshare,
            sys.executable,
            "-I",
            "-S",
            str(HERE / "boot.py"),
            json.dumps(given),
        ]
        with (self.place / "console").open("wb") as console:
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=console, stderr=console, start_new_session=True)
        ip([f"link set {self.cable} up"], self.network.switch)

    def serve(self) -> None:
        """Wait until it has booted, and start its SSH server."""
        console = self.place / "console"
        wait_until(lambda: b"ready" in console.read_bytes() or not self.is_on, seconds=60, explain=console.read_text)
        assert self.is_on, console.read_text()
        self.server.within = tuple(self.within)
        self.server.start()

    def power_off(self, *, silent: bool = True) -> None:
        """Take its power: every process is gone. If not *silent*, its kernel still says good-bye to whoever is connected."""
        if silent:
            self.unplug()
        self._kill()
        self._end_links()
        ip([f"netns del {self.namespace}"])  # what its kernel would go on to say, and every fault of its cable
        with suppress(RuntimeError):  # the other end of its cable goes with the namespace, but not at once
            ip([f"link del {self.cable}"], self.network.switch)
        self.plug()

    def power_cycle(self) -> None:
        """Take its power, and boot it."""
        self.power_off()
        self.power_on()
        self.serve()

    def freeze(self) -> None:
        """Have no process of it run, its SSH server included; its kernel still answers pings and takes connections."""
        before = set[int]()
        while (after := self._signal(signal.SIGSTOP)) != before:  # one may have forked another just before
            before = after

    def thaw(self) -> None:
        """Let its processes run again."""
        self._signal(signal.SIGCONT)

    # the cable

    def unplug(self) -> None:
        """Pull its cable: it sees that it has none."""
        ip([f"link set {self.cable} down"], self.network.switch)

    def strand(self) -> None:
        """Have its switch lose all that it sends and is sent; it sees a cable that works."""
        ip([f"link set {self.cable} nomaster"], self.network.switch)

    def cut(self, whom: Whom | Sequence[Host] = "all", direction: Direction = "both") -> None:
        """Lose all that comes *in* from some, or goes *out* to them, or both; it sees nothing of that."""
        for one in self._addresses(whom):
            self._rule(direction, one, "-j", "DROP")

    def lose(self, share: float, whom: Whom | Sequence[Host] = "all", direction: Direction = "both") -> None:
        """Lose some of what goes through its cable."""
        for one in self._addresses(whom):
            self._rule(direction, one, "-m", "statistic", "--mode", "random", "--probability", f"{share:.4f}", "-j", "DROP")

    def refuse(self, port: int) -> None:
        """Have a firewall take nothing on *port*, without a word."""
        inside(self.namespace, "iptables", "-w", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--dport", str(port), "-j", "DROP")

    def limit(self, rate: str) -> None:
        """Let through so much and no more, e.g. `10mbit`, each way."""
        words = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        inside(self.network.switch, "tc", "qdisc", "replace", "dev", self.cable, *words)
        inside(self.namespace, "tc", "qdisc", "replace", "dev", "eth0", *words)

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Hold back every frame for so long, each way."""
        settings = self.place / "link.json"
        part = settings.with_suffix(".part")
        part.write_text(json.dumps({"delay": seconds, "jitter": jitter}))
        part.rename(settings)
        if not self.links:
            self._slow_down(settings)

    def reset(self, whom: Whom | Sequence[Host] = "all") -> None:
        """End its live connections with some, for both ends at once."""
        for one in self._addresses(whom):
            inside(self.namespace, "ss", "-K", "dst", one or f"{self.network.orchestrator}/24")

    def heal(self) -> None:
        """Mend its cable: all of the above is over, but for a device that delays, which delays no more."""
        ip([f"link set {self.cable} master switch", f"link set {self.cable} up"], self.network.switch)
        inside(self.namespace, "iptables", "-w", "-F")
        for where, device in ((self.network.switch, self.cable), (self.namespace, "eth0")):
            with suppress(RuntimeError):  # there was no limit
                inside(where, "tc", "qdisc", "del", "dev", device, "root")
        if self.links:
            self.delay(0.0)

    def lost(self) -> int:
        """Return how many packets its cuts and losses have taken so far: the proof that a fault happened."""
        rows = inside(self.namespace, "iptables", "-w", "-nvxL").splitlines()
        return sum(int(row.split()[0]) for row in rows if " DROP " in row)

    # the rest

    def explain(self) -> str:
        """Return what is to be known of it when a test failed."""
        log = self.server.log if (self.server.place / "log").exists() else ""
        return f"{self.name} {self.address} on={self.is_on}\n" + "\n".join(self.processes().values()) + "\n" + log[-2000:]

    def close(self) -> None:
        """Take it away, whatever state it is in."""
        self._kill()
        self._end_links()
        with suppress(RuntimeError):
            ip([f"netns del {self.namespace}"])

    def _binds(self) -> list[tuple[str, str]]:
        here = [(str(self.place / "boot_id"), "/proc/sys/kernel/random/boot_id"), (str(self.kernel_log), "/dev/kmsg")]
        return [
            *here,
            (str(self.place.parent / "hosts"), "/etc/hosts"),
            (str(self.place / "passwd"), "/etc/passwd"),
            (str(self.place / "shadow"), "/etc/shadow"),
        ]

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()  # it takes the first process along, and that all others
            self.process.communicate()
            self.server.stop()
            wait_until(lambda: not self.processes(), seconds=60, explain=lambda: str(self.processes()))
            self.process = None

    def _end_links(self) -> None:
        for link in self.links:
            link.kill()
            link.communicate()
        self.links.clear()

    def _signal(self, number: signal.Signals) -> set[int]:
        """Send a signal to all processes but the first; return their numbers."""
        pids = self.processes().keys() - {self.pid}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def _addresses(self, whom: Whom | Sequence[Host]) -> list[str]:
        if isinstance(whom, str):
            return [{"orchestrator": self.network.orchestrator, "peers": self.network.peers, "all": ""}[whom]]
        return [other.address for other in whom]

    def _rule(self, direction: Direction, address: str, *words: str) -> None:
        for way in ("in", "out") if direction == "both" else (direction,):
            chain, device, end = CHAINS[way]
            inside(self.namespace, "iptables", "-w", "-A", chain, device, "eth0", *([end, address] if address else []), *words)

    def _slow_down(self, settings: Path) -> None:
        outer, inner = f"{self.namespace}o", f"{self.namespace}i"
        words = [
            sys.executable,
            "-I",
            "-S",
            str(HERE / "link.py"),
            outer,
            inner,
            self.namespace,
            f"{self.address}/24",
            self.mac,
            str(settings),
        ]
        with (self.place / "link").open("wb") as log:
            self.links.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True))
        output = self.place / "link"
        wait_until(lambda: b"ready" in output.read_bytes() or self.links[0].poll() is not None, seconds=60, explain=output.read_text)
        ip([f"link del {self.cable}"], self.network.switch)
        ip([f"link set {outer} netns {self.network.switch} name {self.cable}"])
        ip([f"link set {self.cable} master switch", f"link set {self.cable} up"], self.network.switch)
