"""Whether the root cause of an incident is named, how fast, how sure, and whether a healthy node is isolated for it.

    python -m benchmarks.causes --json causes.json [--rounds N] [--only KIND ...] [--seed N]

A DDP job of four ranks on four nodes with torch's own groups, so that every fault has secondary failures: the peers' collectives fail, and
they exit. Each kind of fault is injected for real; faults of hardware, which this machine cannot have, are what the driver or the kernel
writes about them into that node's kernel log, with what the rank on it does then (simulated; the rest is not). Before every
fifth fault a line that a healthy node may write stands in the kernel log of some node: no cause, and no reason to leave that node.
Each node has the two network interfaces that lines name (simulated, in a copy of sysfs): one has the address of this machine and is up, the
other has none, and loses its link when the line says so.

- ``detected``: seconds from the injection to the incident, by kind.
- ``named``: share of the root causes that are right, in percent.
- ``isolated``: healthy nodes that were taken out of service or left.
- ``calibration``: expected calibration error of the stated confidences in ten bins (Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated
  Probabilities Using Bayesian Binning, AAAI 2015).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_run import excluded, put_out
from benchmarks.controlled import ControlledJob
from benchmarks.measuring import prefect, spread
from holdfast.agent.node.interfaces import interfaces
from holdfast.history import models, queries
from holdfast.host.process import NODE_MARK, marked

RANKS: Final = 4
SECONDS: Final = 5.0
NAMED: Final = 95.0
CALIBRATION: Final = 0.05
"""The goals: seconds to find a fault, percent of causes named, expected calibration error."""
BINS: Final = 10
LONGEST: Final = 120.0
QUIET: Final = 5
"""Steps that all ranks make between two faults."""
POLICY: Final = (
    "max_restarts_in_place: 100000\nmax_recoveries: 100000\nmax_recoveries_without_progress: 100\n"
    "recurring: {times: 0}\nflapping: {times: 0}\n"  # a hundred unrelated faults on four nodes are no pattern
)
NOISY: Final = 0.2
"""Share of the faults before which a harmless line is written: with a fault every four seconds far more than any kernel writes."""
CARD: Final = "0000:9a:00.0"
"""PCI address of the network card of the job."""
UNUSED_CARD: Final = "0000:9a:00.1"
UNUSED: Final = "ens5f1np1"
"""Another port of each node: it has no address, and its cable is moved now and then."""
LINK_DOWN: Final = f"mlx5_core {CARD} {{interface}}: Link down"
"""Of the card that the job uses, though its link was never lost."""
UNUSED_DOWN: Final = f"mlx5_core {UNUSED_CARD} {UNUSED}: Link down"
"""Of the other port, whose link is lost."""
NOISE: Final = (
    LINK_DOWN,
    UNUSED_DOWN,
    "clocksource: timekeeping watchdog on CPU9: Marking clocksource 'tsc' as unstable because the skew is too large:",
    "INFO: task kworker/u8:1:811 blocked for more than 120 seconds.",
    "EDAC MC2: 1 CE memory scrubbing error on CPU_SrcID#0_MC#2_Chan#0_DIMM#0 (channel:0 slot:0 page:0x0 offset:0x0 grain:32)",
    "pcieport 0000:3a:00.0: AER: Correctable error message received from 0000:3b:00.0",
    "nvme nvme1: I/O 4 QID 0 timeout, reset controller",
    "Buffer I/O error on dev sr0, logical block 0, async page read",
    "watchdog: BUG: soft lockup - CPU#9 stuck for 26s! [rsync:7712]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One kind of fault: how it is injected, and which diagnoses are right."""

    right: frozenset[str]
    """Kinds of the catalogue that name the cause."""
    signal: int = 0
    """What ends or stops the rank."""
    statements: str = ""
    """What the rank runs in a step of its."""
    line: str = ""
    """What stands in the kernel log of its node."""
    part: str = ""
    """`agent`: what is killed is the node's agent; `node`: everything on the node is stopped."""
    leaves: bool = False
    """The node is to be left."""


def _killed(number: signal.Signals, *right: str) -> Injection:
    return Injection(signal=number, right=frozenset(right))


def _runs(statements: str, *right: str) -> Injection:
    return Injection(statements=statements, right=frozenset(right))


def _raises(error: str, *right: str) -> Injection:
    return _runs(f"raise {error}", *right)


def _hardware(line: str, then: str, *right: str, leaves: bool = True) -> Injection:
    return Injection(line=line, statements=then, right=frozenset(right), leaves=leaves)


def _xid(code: int, text: str, then: str, *right: str, leaves: bool = True) -> Injection:
    return _hardware(f"NVRM: Xid (PCI:0000:18:00): {code}, pid=42, name=python, {text}", then, *right, leaves=leaves)


_CUDA: Final = "raise RuntimeError('CUDA error: {}')"
_LOST: Final = _CUDA.format("unspecified launch failure")
INJECTIONS: Final[dict[str, Injection]] = {
    "sigkill": _killed(signal.SIGKILL, "worker-sigkill"),
    "sigsegv": _killed(signal.SIGSEGV, "worker-sigsegv"),
    "sigabrt": _killed(signal.SIGABRT, "worker-sigabrt"),
    "sigbus": _killed(signal.SIGBUS, "worker-sigbus"),
    "sigfpe": _killed(signal.SIGFPE, "worker-sigfpe"),
    "sigill": _killed(signal.SIGILL, "worker-sigill"),
    "sigtrap": _killed(signal.SIGTRAP, "worker-sigtrap"),
    "sigterm": _killed(signal.SIGTERM, "worker-sigterm"),
    "sighup": _killed(signal.SIGHUP, "worker-sighup"),
    "sigstop": _killed(signal.SIGSTOP, "worker-stopped"),
    "exit-status": _runs("os._exit(7)", "worker-exit-code"),
    "exit-early": _runs("os._exit(0)", "worker-exit-early"),
    "exception": _raises("RuntimeError('shape mismatch in my_layer')", "worker-exception", "script-exception", "script-shape"),
    "value-error": _raises("ValueError('bad label 7')", "worker-exception", "script-value"),
    "gpu-out-of-memory": _raises("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')", "worker-gpu-out-of-memory"),
    "disk-full": _raises("OSError(28, 'No space left on device', '/data/ckpt')", "worker-disk-full"),
    "storage-failed": _raises("OSError(5, 'Input/output error', '/data/ckpt')", "worker-storage-failed"),
    "service-refused": _raises("ConnectionRefusedError(111, 'Connection refused')", "worker-service-unreachable"),
    "hang": _runs("stuck_in_user_code()", "job-hang"),
    "wrong-collective": _runs("dist.broadcast(torch.zeros(4), 0)", "collective-mismatch", "collective-stuck", "job-hang"),
    "connections-cut": _runs("cut_connections()", "worker-peer-lost", "group-broken", "peer-blamed", "torch-peer-lost"),
    "agent-killed": Injection(part="agent", right=frozenset({"agent-lost"})),
    "node-cut-off": Injection(part="node", right=frozenset({"node-lost", "agent-lost", "node-unknown"}), leaves=True),
    "out-of-memory-killer": _hardware(
        "Out of memory: Killed process {pid} (python) total-vm:9000kB, anon-rss:8000kB, file-rss:0kB", "os.kill(os.getpid(), 9)",
        "worker-oom-killed", "host-oom-kill", "host-out-of-memory", leaves=False,
    ),
    "gpu-off-bus": _xid(79, "GPU has fallen off the bus.", _LOST, "gpu-off-bus"),
    "gpu-double-bit": _xid(
        48, "An uncorrectable double bit error (DBE) has been detected on GPU", _CUDA.format("uncorrectable ECC error encountered"),
        "gpu-memory-double-bit", "cuda-uncorrectable-ecc",
    ),
    "gpu-uncontained": _xid(
        95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", _CUDA.format("uncorrectable ECC error encountered"),
        "gpu-memory-uncontained", "cuda-uncorrectable-ecc",
    ),
    "gpu-gsp-timeout": _xid(119, "Timeout after 6s of waiting for RPC response from GPU4 GSP!", "stuck_in_user_code()", "gpu-gsp-timeout"),
    "gpu-nvlink": _xid(
        74, "NVLink: fatal error detected on link 2(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
        _CUDA.format("uncorrectable NVLink error detected during the execution"), "gpu-nvlink", "cuda-nvlink",
    ),
    "gpu-page-fault": _xid(
        31, "Ch 00000012, intr 00000000. MMU Fault: ENGINE CE3 HUBCLIENT_CE1 faulted @ 0x7fc1_0a000000",
        _CUDA.format("an illegal memory access was encountered"), "gpu-page-fault", "cuda-illegal-address", leaves=False,
    ),
    "machine-check": _hardware(
        "mce: [Hardware Error]: CPU 61: Machine Check Exception: 5 Bank 1: bd80000000100134", "os.kill(os.getpid(), 7)",
        "cpu-machine-check",
    ),
    "memory-uncorrected": _hardware(
        "EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#1 (channel:0 slot:1 page:0x81c2 offset:0x40 grain:32)",
        "os.kill(os.getpid(), 7)", "memory-uncorrected",
    ),
    "memory-page-killed": _hardware(
        "Memory failure: 0x3f2c81: Sending SIGBUS to python:7712 due to hardware memory corruption", "os.kill(os.getpid(), 7)",
        "memory-page-killed",
    ),
    "nic-firmware": _hardware(
        "mlx5_core 0000:9a:00.0: poll_health:835:(pid 0): device's health compromised - reached miss count", "cut_connections()",
        "mlx5-health",
    ),
    "file-system": _hardware(
        "EXT4-fs (sdb1): Remounting filesystem read-only", "raise OSError(30, 'Read-only file system', '/data/ckpt')",
        "filesystem-read-only", "worker-storage-failed",
    ),
}  # fmt: skip
"""Each kind of fault."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of one injection."""

    kind: str
    node: str
    rank: int
    noise: str
    seconds: float
    root: str
    on: str
    right: bool
    """The cause is one of the right ones, on the right node or rank."""
    hypotheses: list[tuple[str, str, float]] = field(default_factory=list)
    """Kind, target and confidence of each hypothesis."""
    case: dict[str, Any] | None = None
    """What the policy was given (`holdfast.policies.recovery.case_codec`): the diagnosis can be made again from it."""


class Causes:
    """Injects every kind of fault *rounds* times, in random order."""

    def __init__(self, place: Path, environment: dict[str, str], kinds: Sequence[str], rounds: int, seed: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 (the same faults for the same seed)
        self.order = [kind for _ in range(rounds) for kind in self.dice.sample(list(kinds), len(kinds))]
        self.roots, self.interface = place / "roots", interfaces()[0].name
        self.logs = place / "kernel"
        self.logs.mkdir(parents=True)
        leaving = sum(INJECTIONS[kind].leaves for kind in self.order)
        count = RANKS + 1 + leaving
        for number in range(count):
            self.log_of(f"node-{number}").write_text("Nov 21 10:00:00 n0 kernel: booted\n")
            make_root(self.root_of(f"node-{number}"), self.interface)
        (place / "policy.yaml").write_text(POLICY)
        environment = environment | {"HOLDFAST_KERNEL_LOG": str(self.log_of("{node}")), "HOLDFAST_NODE_ROOT": str(self.root_of("{node}"))}
        plan: dict[str, Any] = {"nnodes": RANKS, "nproc_per_node": 1, "spare_nodes": 1, "hot_spares": 0, "preflight": False}
        self.job = ControlledJob(
            place / "causes", environment, count=count, args=["--stock-groups", "--pace", "0", "--rest", "0.05"], **plan,
            policy=str(place / "policy.yaml"), checkpoint={"interval": 5}, timeouts={"hang": "2s"},
        )  # fmt: skip
        self.outcomes: list[Outcome] = []
        self.sick: set[str] = set()

    def log_of(self, node: str) -> Path:
        """Return the file that stands for the kernel log of *node*."""
        return self.logs / f"{node}.log"

    def root_of(self, node: str) -> Path:
        """Return the folder that stands for the root folder of *node*."""
        return self.roots / node

    def run(self) -> None:
        """Inject all faults."""
        job = self.job
        job.until(lambda: job.chaos.step() > 0 and job.at_work(), "the first step", seconds=180)
        for number, kind in enumerate(self.order, 1):
            job.goes_on(QUIET, seconds=LONGEST)
            job.until(self.spare_is_up, "a spare node", seconds=LONGEST)
            self.outcomes.append(one := self.inject(kind))
            print(f"{number}/{len(self.order)} {kind} on {one.node}: {'named' if one.right else 'NOT named'}, {one.root} on {one.on} "
                  f"({one.hypotheses[0][2]:.0%}) after {one.seconds:.2f} s", flush=True)  # fmt: skip
        job.goes_on(QUIET, seconds=LONGEST)

    def inject(self, kind: str) -> Outcome:
        """Inject a fault of *kind*, wait until it is over, and return its diagnosis."""
        job, what = self.job, INJECTIONS[kind]
        placed = job.chaos.ranks()[self.dice.randrange(RANKS)]
        noise = self.make_noise() if self.dice.random() < NOISY else ""
        known = {one.id for one in job.incidents()}
        if what.leaves:
            self.sick.add(placed.node)
        if what.line:
            self.write(placed.node, what.line.replace("{pid}", str(placed.pid)))
            job.until(lambda: self.noted(placed.node, what.line), "the line on record")
        at = self.act(what, placed.rank, placed.node, placed.pid)
        job.until(lambda: any(one.id not in known for one in job.incidents()), f"the incident of {kind}", seconds=LONGEST)
        row = next(one for one in job.incidents() if one.id not in known)
        job.until(lambda: self.closed(row.id), f"the end of the incident of {kind}", seconds=LONGEST)
        if what.part == "node":
            with suppress(ProcessLookupError):
                for pid in marked(NODE_MARK, job.mark(placed.node)):
                    os.kill(pid, signal.SIGCONT)
        last = queries.diagnoses(job.history, incident_id=row.id)[-1]
        named = last.kind in what.right and (last.candidates[0]["node"] in {placed.node, None} if last.candidates else False)
        hypotheses = [(one["kind"], one["target"], float(one["confidence"])) for one in last.candidates]
        decided = [one.id for one in queries.decisions(job.history, job.row.id) if one.incident_id == row.id]
        with job.history.session() as session:
            case = session.get(models.DecidedCase, decided[-1]) if decided else None
        return Outcome(
            kind=kind, node=placed.node, rank=placed.rank, noise=noise, seconds=row.detected_at - at, root=last.kind, on=last.target,
            right=named, hypotheses=hypotheses,
            case=case.record if case is not None else None,
        )  # fmt: skip

    def act(self, what: Injection, rank: int, node: str, pid: int) -> float:
        """Break the rank or its node; return when."""
        if what.statements:
            return self.job.trouble(rank, what.statements)
        at = time.time()
        if what.part == "agent":
            os.kill(next(one.pid for one in self.job.nodes.survey() if one.name == node and one.pid is not None), signal.SIGKILL)
        elif what.part == "node":
            agent = next(one.pid for one in self.job.nodes.survey() if one.name == node)
            for one in sorted(marked(NODE_MARK, self.job.mark(node)), key=lambda pid: pid != agent):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGSTOP)
        else:
            os.kill(pid, what.signal)
        return at

    def spare_is_up(self) -> bool:
        """Return whether there is a node with an agent and without ranks."""
        up = {one.name for one in self.job.nodes.survey() if one.status == "up" and one.pid is not None}
        return bool(up - {one.node for one in self.job.chaos.ranks().values()} - self.sick)

    def closed(self, incident: str) -> bool:
        """Return whether the incident is over."""
        return any(one.id == incident and one.outcome for one in self.job.incidents())

    # -- the kernel logs ------------------------------------------------------------------------------------------------

    def make_noise(self) -> str:
        """Write a harmless line into the kernel log of a node that has ranks; return which and where."""
        node, line = self.dice.choice(sorted({one.node for one in self.job.chaos.ranks().values()})), self.dice.choice(NOISE)
        line = line.replace("{interface}", self.interface)
        if line == UNUSED_DOWN:
            lose_link(self.root_of(node) / "sys/class/net" / UNUSED)
        self.write(node, line)
        return f"{node}: {line}"

    def write(self, node: str, line: str) -> None:
        """Write *line* into the kernel log of *node*."""
        with self.log_of(node).open("a") as file:
            file.write(f"{time.strftime('%b %d %H:%M:%S')} {node} kernel: {line}\n")

    def noted(self, node: str, line: str) -> bool:
        """Return whether the flow knows of the line, which is reported once a minute at most."""
        rows = queries.faults(self.job.history, self.job.row.id)
        words = line.rsplit(", ", maxsplit=1)[-1].split("{", maxsplit=1)[0][:30]
        return any(one.node == node and words in one.evidence.get("quote", "") for one in rows) or "Killed process" in line

    def isolated(self) -> dict[str, list[str]]:
        """Return the healthy nodes that were taken out or left, and why."""
        found = {node: [*put_out(self.job, node), *excluded(self.job, node)] for node in self.job.nodes.names() if node not in self.sick}
        return {node: reasons for node, reasons in found.items() if reasons}


def make_root(root: Path, interface: str) -> None:
    """Make a folder with this machine's /proc, /dev and /sys, and two network interfaces of its own: *interface*, and an unused one."""
    root.mkdir(parents=True)
    for name in ("proc", "dev"):
        (root / name).symlink_to(f"/{name}")
    _link_all(root / "sys", Path("/sys"), but=("class", "bus"))
    _link_all(root / "sys/class", Path("/sys/class"), but=("net",))
    _link_all(root / "sys/class/net", Path("/sys/class/net"), but=(interface, UNUSED))
    _link_all(root / "sys/bus", Path("/sys/bus"), but=("pci",))
    _link_all(root / "sys/bus/pci/devices", Path("/sys/bus/pci/devices"), but=(CARD, UNUSED_CARD))
    for name, bus in ((interface, CARD), (UNUSED, UNUSED_CARD)):
        device, place = root / "sys/bus/pci/devices" / bus, root / "sys/class/net" / name
        device.mkdir()
        place.mkdir()
        (place / "device").symlink_to(device)
        for file, text in {"flags": "0x1003", "operstate": "up", "carrier": "1", "speed": "100000", "carrier_down_count": "1"}.items():
            (place / file).write_text(f"{text}\n")


def _link_all(folder: Path, real: Path, but: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    for one in real.iterdir() if real.exists() else ():
        if one.name not in but:
            (folder / one.name).symlink_to(one)


def lose_link(place: Path) -> None:
    """Have the interface at *place* lose its link, once more."""
    (place / "carrier_down_count").write_text(f"{int((place / 'carrier_down_count').read_text()) + 1}\n")
    (place / "carrier").write_text("0\n")
    (place / "operstate").write_text("down\n")


def calibration(predictions: Iterable[tuple[float, bool]]) -> tuple[float, list[dict[str, float]]]:
    """Return the expected calibration error of (confidence, right), and the bins that have any: their mean confidence, share and number."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for confidence, right in predictions:
        bins[min(int(confidence * BINS), BINS - 1)].append((confidence, right))
    total = sum(map(len, bins.values()))
    rows = [
        {"confidence": sum(one for one, _ in found) / len(found), "right": sum(right for _, right in found) / len(found), "n": len(found)}
        for _, found in sorted(bins.items())
    ]
    return sum(row["n"] / total * abs(row["confidence"] - row["right"]) for row in rows), rows


def report(causes: Causes) -> dict[str, dict[str, Any]]:
    """Return the figures with their goals."""
    outcomes = causes.outcomes
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        by_kind[one.kind].append(one)
    seconds = [one.seconds for one in outcomes]
    right = [one.right for one in outcomes]
    error, bins = calibration((one.hypotheses[0][2], one.right) for one in outcomes if one.hypotheses)
    isolated = causes.isolated()
    share = 100 * sum(right) / len(right)
    kinds = {
        kind: {
            **spread([one.seconds for one in found]),
            "named": sum(one.right for one in found),
            "roots": sorted({one.root for one in found}),
        }
        for kind, found in by_kind.items()
    }
    return {
        "detected": {**spread(seconds), "unit": "s", "goal": SECONDS, "met": max(seconds) < SECONDS, "kinds": kinds},
        "named": {"median": round(share, 1), "n": len(right), "unit": "%", "goal": NAMED, "met": share >= NAMED},
        "isolated": {"median": len(isolated), "n": len(outcomes), "goal": 0, "met": not isolated, "nodes": isolated},
        "calibration": {"median": round(error, 4), "n": len(outcomes), "goal": CALIBRATION, "met": error <= CALIBRATION, "bins": bins},
    }


def main() -> None:
    """Inject, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures and every outcome here")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is injected")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--only", nargs="+", choices=list(INJECTIONS), default=list(INJECTIONS), help="inject only these")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-causes-") as folder, prefect(Path(folder)) as environment:
        causes = Causes(Path(folder), environment, given.only, given.rounds, given.seed)
        try:
            causes.run()
        finally:
            found = report(causes) if causes.outcomes else {}
            causes.job.close()
            if given.json:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps({**found, "outcomes": [asdict(one) for one in causes.outcomes]}, indent=1) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
