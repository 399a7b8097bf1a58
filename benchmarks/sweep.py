"""What a sweep costs: 200 real SSH servers, and 1,000 simulated ones; over connections that stay, against logging in each time.

    python -m benchmarks.sweep --json FILE [--real N] [--simulated N] [--rounds N]

*Real*: one sshd process a node on this machine, each with an address, a host key and a log of its own. The collector that they run is the
real one: a sweep has this machine do the work of all nodes, and its seconds are those of that work. *Simulated*: see `ssh_nodes.py`. A look
takes a node 0.3 s without work, as if nodes were machines of their own; the process that plays them shares our processors all the same.

Both ways sweep in turn, round by round. What counts as CPU is the sweeping process's own, user and system. The first sweep over connections
that stay, with all its logins, is not among their rounds: it stands beside them. `idle` is what those connections cost between sweeps.

FILE gets one JSON object a line: `key`, `median`, `p99`, `n`, `goal`, `met`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import figure, wait_for
from benchmarks.ssh_nodes import PORT, address
from holdfast.cluster.ssh import SshSweeper
from holdfast.cluster.ssh.sweeper import MAX_THREADS
from holdfast.detectors.codec import packed
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.probe.readers.local import read_node
from holdfast.spec import SshCluster, cluster_of
from tests.ssh.sshd import Sshd, key_at

SECONDS: Final = {"real": 60.0, "simulated": 10.0}
"""Goals for a sweep over connections that stay: of 200 real nodes whose work this machine does too, of 1,000 simulated ones."""
SHARE: Final = 0.5
"""Of the CPU of a sweep that logs in each time, a sweep over connections that stay should cost at most this."""
IDLE: Final = 0.05
"""Cores that all connections may cost while nobody sweeps."""
DEADLINE: Final = 120.0
SELF: Final = 16
"""Nodes that are looked at at once where this machine does their work."""
REST: Final = 5.0
"""Seconds over which the idle cost is taken."""


@contextmanager
def real(place: Path, count: int) -> Iterator[SshCluster]:
    """Give *count* nodes of one sshd process each."""
    key = key_at(place / "id")
    nodes = [Sshd(place / f"n{number}", f"127.11.{number // 250}.{number % 250 + 1}", key.with_suffix(".pub")) for number in range(count)]
    (place / "python3").symlink_to(sys.executable)
    try:
        with ThreadPoolExecutor(8) as hands:
            list(hands.map(Sshd.start, nodes))
        (place / "known_hosts").write_text("".join(node.known for node in nodes))
        hosts = [{"name": node.place.name, "address": node.address, "port": node.port} for node in nodes]
        yield _cluster(place, hosts, str(place / "python3"))
    finally:
        for node in nodes:
            node.stop()


@contextmanager
def simulated(place: Path, count: int) -> Iterator[SshCluster]:
    """Give *count* nodes that one process of their own plays."""
    key = key_at(place / "id")
    shutil.copy(key.with_suffix(".pub"), place / "authorized")
    (place / "look.json").write_text(json.dumps(packed(read_node("n0"))))
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.ssh_nodes", str(place), str(count)], stdin=subprocess.PIPE)
    try:
        wait_for((place / "known_hosts").exists, "the simulated nodes")
        yield _cluster(place, [{"name": f"n{number}", "address": address(number), "port": PORT} for number in range(count)], "python3")
    finally:
        server.kill()
        server.communicate()


def _cluster(place: Path, hosts: list[dict[str, Any]], python: str) -> SshCluster:
    fields = {"kind": "ssh", "hosts": hosts, "key": str(place / "id"), "known_hosts": str(place / "known_hosts"), "python": python}
    made = cluster_of(fields)
    assert isinstance(made, SshCluster)
    return made


def measured(sweeper: SshSweeper) -> tuple[float, float]:
    """Sweep once, and return its seconds and its CPU seconds; fail when a node was not seen."""
    begun, before = time.monotonic(), _cpu()
    looks = sweeper.sweep(DEADLINE)
    took = time.monotonic() - begun, _cpu() - before
    unseen = [look for look in looks.values() if not isinstance(look.found, NodeReading)]
    if unseen:
        raise RuntimeError(f"{len(unseen)} of {len(looks)} nodes were not seen, such as {unseen[0]}")
    return took


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rounds(cluster: SshCluster, count: int, hands: int) -> dict[str, Any]:
    """Sweep both ways in turn."""
    found: dict[str, Any] = {"kept": [], "fresh": []}
    with SshSweeper(cluster, threads=hands) as kept, SshSweeper(cluster, threads=hands, keep=False) as fresh:
        found["first"] = measured(kept)
        for _ in range(count):
            found["fresh"].append(measured(fresh))
            found["kept"].append(measured(kept))
        begun, before = time.monotonic(), _cpu()
        time.sleep(REST)
        found["idle"] = (_cpu() - before) / (time.monotonic() - begun)
        found["threads"] = threading.active_count()
    return found


def figures(name: str, count: int, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the result."""
    fresh_cpu = sorted(cpu for _seconds, cpu in found["fresh"])[len(found["fresh"]) // 2]
    for way in ("kept", "fresh"):
        seconds, cpu = ([one[column] for one in found[way]] for column in (0, 1))
        kept = way == "kept"
        goal = {"seconds": SECONDS[name]} if kept else {}
        details = {"nodes": count, "first": [round(value, 3) for value in found["first"]]} if kept else {"nodes": count}
        yield {
            "key": f"sweep_{name}_{way}_seconds",
            **figure(seconds, goal, {"seconds": max(seconds) <= SECONDS[name]} if kept else {}, **details),
        }
        middle = sorted(cpu)[len(cpu) // 2]
        goal = {"of_fresh": SHARE} if kept else {}
        met = {"of_fresh": middle <= SHARE * fresh_cpu} if kept else {}
        yield {"key": f"sweep_{name}_{way}_cpu_seconds", **figure(cpu, goal, met, of_fresh=round(middle / fresh_cpu, 3), nodes=count)}
    idle = [found["idle"]]
    yield {"key": f"sweep_{name}_idle_cores", **figure(idle, {"cores": IDLE}, {"cores": idle[0] <= IDLE}, threads=found["threads"])}


def main() -> int:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--real", type=int, default=200)
    parser.add_argument("--simulated", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # two hundred servers must not stay behind
    os.environ.pop("SSH_AUTH_SOCK", None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    places: dict[str, tuple[Callable[..., Any], int]] = {"real": (real, given.real), "simulated": (simulated, given.simulated)}
    lines = []
    for name, (stage, count) in places.items():
        if not count:
            continue
        place = Path(tempfile.mkdtemp(prefix="holdfast-sweep-"))
        try:
            with stage(place, count) as cluster:
                lines += list(figures(name, count, rounds(cluster, given.rounds, SELF if name == "real" else MAX_THREADS)))
        finally:
            with suppress(OSError):
                shutil.rmtree(place)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if given.json is not None:
        given.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
