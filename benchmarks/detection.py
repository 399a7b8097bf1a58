"""Detection latency of faults, the cost of monitoring, and false alarms for a healthy job.

    python -m benchmarks.detection --json detection.jsonl [--rounds N] [--clean SECONDS] [--only KEY ...]

A job of 2 nodes and a spare one under a real flow, agents and Prefect server; real signals, each from its injection to the time at which
the flow had it:

- ``exit``, ``stopped``, ``hang``: a rank is killed, stopped by SIGSTOP, and made to wait in a line of its own for ever.
- ``node-cut``: all processes of a node are stopped at once, agent and guardian too: what a flow sees of a node whose network is cut.
- ``kernel-log``: a line is written to ``/dev/kmsg`` (needs root); ``nvml``: an Xid comes from NVML's event set, asked by the real pynvml of
  a stand-in library.
- ``counter``: an interface counts broken frames, in a ``/sys`` of the benchmark's own. Nothing reports counters: they are polled.
- ``disk-full``: the file system of the checkpoints (a tmpfs, needs root) is filled; known with the next checkpoint.
- ``classify``: lines a second on one core, of a log in which one line in ten is a fault, each with a number of its own;
  ``classify-dense``: in which every line is one, and they repeat.
- ``agent-cpu``: share of one core that a node's agent, its lookout and its memory server take while a job trains, in percent.
- ``false-alarms``: faults reported of a healthy job; ``status`` are those of the machine itself, the same at every look.
- ``sweep``: nodes looked at over SSH, 200 real ones and 1,000 simulated; several lines, see sweep.py.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import steps
from benchmarks.measuring import ROOT, prefect, spread, wait_for
from benchmarks.real_job import Job
from holdfast.classify import classify
from holdfast.cli.commands.analyse.classify import json_lines
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.evidence import LogLine
from holdfast.history import models, queries
from holdfast.host.process import NODE_MARK, marked

KEYS: Final = (
    "exit",
    "stopped",
    "hang",
    "node-cut",
    "kernel-log",
    "nvml",
    "counter",
    "disk-full",
    "classify",
    "agent-cpu",
    "false-alarms",
    "sweep",
)
GOALS: Final = {"exit": 0.05, "node-cut": 3.0, "kernel-log": 0.25, "nvml": 0.25}
"""Seconds."""
LEAST_HANG: Final = 2.0
HANG_STEPS: Final = 3.0
LINES: Final = 200_000
"""Lines of a log that is classified."""
LINES_GOALS: Final = {10: 500_000, 1: 200_000}
"""Lines a second of one core, where one line in so many is a fault."""
CPU: Final = 1.0
ARGUMENTS: Final = ["--width", "128", "--layers", "2", "--pace", "0.1"]
NODES: Final = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1, "hot_spares": 0}
XIDS: Final = (13, 31, 43, 45, 62, 63, 64, 68, 69, 74, 92, 94, 95, 109, 119, 120, 121, 123, 136, 140, 143, 149)
"""Different ones: an error that a device repeats is reported once."""
KMSG: Final = Path("/dev/kmsg")
TMPFS_BYTES: Final = 48 << 20


def recorded_at(row: models.FaultRecord) -> float:
    """Return when the flow made a row, to the millisecond: its id begins with that."""
    return int(row.id[:12], 16) / 1000


class Bench:
    """All that is measured."""

    def __init__(self, folder: Path, environment: dict[str, str], rounds: int) -> None:
        self._folder, self._environment, self._rounds = folder, environment, rounds
        self.results: dict[str, dict[str, Any]] = {}

    def add_result(self, key: str, values: list[float], goal: float | None, *, more_is_better: bool = False, **details: Any) -> None:  # noqa: ANN401 (JSON)
        """Keep and print what was found for *key*."""
        figures = spread(values)
        worst = figures.get("median")
        met = None if goal is None or worst is None else (worst >= goal if more_is_better else worst <= goal)
        self.results[key] = {"key": key, **figures, "goal": goal, "met": met, **details}
        print(json.dumps(self.results[key]), flush=True)

    @contextmanager
    def job(self, name: str, **how: Any) -> Iterator[Job]:  # noqa: ANN401 (fields of a job)
        """Yield a job that trains."""
        environment = {**self._environment, **how.pop("environment", {})}
        fields = {"args": ARGUMENTS, **NODES, **how}
        job = Job(self._folder / name, environment, stock=False, **fields)
        try:
            job.settle()
            yield job
        finally:
            job.close()

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self, keys: set[str]) -> None:
        """Break ranks and nodes of one job, alternately."""
        acts: dict[str, Callable[[Job], float]] = {"exit": kill, "stopped": stop, "hang": hang, "node-cut": freeze}
        wanted = {key: act for key, act in acts.items() if key in keys}
        seen: dict[str, list[float]] = {key: [] for key in wanted}
        handled: dict[str, list[float]] = {key: [] for key in wanted}
        kinds: dict[str, Counter[str]] = {key: Counter() for key in wanted}
        paces: list[float] = []
        with self.job("processes") as job:
            for _ in range(self._rounds if wanted else 0):
                for key, act in wanted.items():
                    job.settle()
                    paces.append(statistics.median(gap for _, gap in steps.gaps(job.done()[0])[-20:]))
                    row, at = broken(job, act)
                    seen[key].append(row.detected_at - at)
                    handled[key].append((row.closed_at or row.detected_at) - at)
                    kinds[key][row.kind] += 1
        for key, values in seen.items():
            goal = GOALS.get(key) or max(LEAST_HANG, HANG_STEPS * statistics.median(paces))
            about: dict[str, Any] = {"kinds": dict(kinds[key]), "median_step": round(statistics.median(paces), 3)}
            self.add_result(key, values, goal, **about, seconds_until_all_train_again=spread(handled[key]))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def nodes(self, keys: set[str]) -> None:
        """Report faults in the kernel log and by the GPU driver."""
        library = stand_in(self._folder / "nvml") if "nvml" in keys else None
        events, state = self._folder / "events", self._folder / "state"
        events.touch()
        state.touch()
        given = {} if library is None else {"LD_LIBRARY_PATH": str(library)}
        given |= {"NVML_STAND_IN_STATE": str(state), "NVML_STAND_IN_EVENTS": str(events)}
        with self.job("nodes", environment=given) as job:
            wait_for(lambda: watched(job), "lookouts that listen", seconds=60)
            if "kernel-log" in keys:
                found = [delay_of(job, "kernel log", lambda number=number: log_xid(number)) for number in range(self._rounds)]  # type: ignore[misc]
                self.add_result("kernel-log", found, GOALS["kernel-log"])
            if library is not None:
                found = [delay_of(job, "GPU driver events", lambda xid=xid: happen(events, xid)) for xid in XIDS[: self._rounds]]  # type: ignore[misc]
                self.add_result("nvml", found, GOALS["nvml"], simulated="libnvidia-ml.so.1; pynvml is real")

    def counter(self, rounds: int = 3) -> None:
        """Increase an interface's counter of corrupt frames."""
        root = self._folder / "root"
        nic = root / "sys/class/net/eth0"
        files = {"device/vendor": "0x15b3", "flags": "0x1003", "operstate": "up", "carrier": "1", "carrier_down_count": "1"}
        for name, text in {**files, "statistics/rx_crc_errors": "0"}.items():
            (nic / name).parent.mkdir(parents=True, exist_ok=True)
            (nic / name).write_text(text)

        def step(number: int) -> float:
            (nic / "carrier_down_count").write_text(str(2 + number))
            return time.time()

        with self.job("counter", environment={"HOLDFAST_NODE_ROOT": str(root)}) as job:
            wait_for(lambda: watched(job), "lookouts that listen", seconds=60)
            time.sleep(10)  # the first look has been taken
            found = [delay_of(job, "interface counters", lambda number=2 * number: step(number), pause=65.0) for number in range(rounds)]  # type: ignore[misc]
        self.add_result("counter", found, None, simulated="/sys of the benchmark's own", looks_every=60)

    def disk_full(self) -> None:
        """Fill the checkpoints' file system."""
        found = []
        for number in range(min(3, self._rounds)):
            disk = self._folder / f"disk-{number}"
            disk.mkdir()
            subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", str(disk)], check=True)
            try:
                with self.job(f"disk-full-{number}", checkpoint={"interval": 3, "directory": str(disk / "checkpoints")}) as job:
                    found.append(delay_of(job, "report of rank", lambda: fill(disk)))  # noqa: B023 (called at once)
            finally:
                subprocess.run(["/bin/umount", "-l", str(disk)], check=True)
        self.add_result("disk-full", found, None, checkpoint_every=3)

    # -- what it costs ------------------------------------------------------------------------------------------------

    def clean(self, seconds: float) -> None:
        """Train for *seconds* without a fault, and count what was reported and what watching took."""
        with self.job("clean") as job:
            wait_for(lambda: watched(job), "lookouts that listen", seconds=60)
            time.sleep(5.0)
            begin, before = time.time(), {node: cpu_of(pids) for node, pids in watchers(job).items()}
            time.sleep(seconds)
            took, rows = time.time() - begin, queries.faults(job.history, job.row.id)
            shares = [100.0 * (cpu_of(pids) - before[node]) / took for node, pids in watchers(job).items() if node in before]
            incidents = queries.incidents(job.history, job.row.id)
        alarms = [row for row in rows if row.recommended_action != "record" and row.at >= begin] + list(incidents)
        status = Counter(row.kind for row in rows if row.at < begin or row.recommended_action == "record")
        self.add_result("agent-cpu", shares, CPU, unit="percent of a core", nodes=len(shares))
        kinds = dict(Counter(row.kind for row in alarms))
        self.add_result("false-alarms", [float(len(alarms))], 0.0, seconds=round(took), kinds=kinds, status=dict(status))

    def sweep(self) -> None:
        """Read many nodes, in a separate process to measure its CPU time."""
        place = self._folder / "sweep.jsonl"
        subprocess.run([sys.executable, "-m", "benchmarks.sweep", "--json", str(place)], check=True)
        for line in place.read_text().splitlines():
            one = json.loads(line)
            self.results[one["key"]] = one

    def classify(self) -> None:
        """Classify logs, diagnoses written as the command writes them."""
        list(classify(io.BytesIO(b"\n").read))  # the signatures are compiled the first time
        for key, unhealthy in (("classify", 10), ("classify-dense", 1)):
            log, found = a_log(unhealthy), []
            for _ in range(5):
                begin = time.process_time()
                written = sum(len(json_lines(page)) for page in classify(io.BytesIO(log).read))
                found.append(log.count(b"\n") / (time.process_time() - begin))
            what = {"unit": "lines a second of one core", "faults": f"1 line in {unhealthy}", "bytes_written": written}
            self.add_result(key, found, LINES_GOALS[unhealthy], more_is_better=True, **what)


def a_log(unhealthy: int) -> bytes:
    """Return a log of 200,000 lines, one in *unhealthy* of which is a fault: samples of the whole catalogue in turn, at different times.

    Where every line is a fault, the samples repeat as they are, as a flood repeats its lines. Otherwise each ends in a number of its own,
    so that no line was seen before and each is judged anew.
    """
    samples = [one.unhealthy.evidence.text for one in CATALOGUE.values() if isinstance(one.unhealthy.evidence, LogLine)]
    faults = itertools.cycle([text for text in samples if "\n" not in text])
    lines = (
        f"[{number / 100:.2f}] {next(faults)}{f' #{number}' * (unhealthy > 1)}"
        if number % unhealthy == 0
        else f"step {number} loss 2.{number} lr 1e-4"
        for number in range(LINES)
    )
    return ("\n".join(lines) + "\n").encode()


# -- acts ----------------------------------------------------------------------------------------------------------------


def kill(job: Job) -> float:
    """Kill a rank."""
    pid, at = job.pids()[1], steps.now()
    os.kill(pid, signal.SIGKILL)
    return at


def stop(job: Job) -> float:
    """Stop a rank."""
    pid, at = job.pids()[1], steps.now()
    os.kill(pid, signal.SIGSTOP)
    return at


def hang(job: Job) -> float:
    """Hang a rank at its next step; return when that began."""
    (job.place / "hanging-1").unlink(missing_ok=True)
    (job.place / "hang-1").touch()
    return float(wait_for(lambda: (job.place / "hanging-1").exists() and (job.place / "hanging-1").read_text(), "the hang"))


def freeze(job: Job) -> float:
    """Stop everything on a node, its agent first, so that it does not report the others."""
    node = job.placed(1).node
    pids = sorted(marked(NODE_MARK, job.mark(node)), key=lambda pid: b"holdfast.agent" not in command(pid))
    at = steps.now()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return at


def broken(job: Job, act: Callable[[Job], float]) -> tuple[models.Incident, float]:
    """Break something; return the incident once it is over, and when it began."""
    known = len(queries.incidents(job.history, job.row.id))
    at = act(job)
    job.until(lambda: len(queries.incidents(job.history, job.row.id)) > known, "the incident")
    (job.place / "hang-1").unlink(missing_ok=True)
    return job.until(lambda: job.closed(known), "the incident's end"), at


def delay_of(job: Job, source: str, act: Callable[[], float], pause: float = 0.3) -> float:
    """Do *act*, and return the seconds until the history had a fault of it, by *source*."""
    time.sleep(pause)

    def by_source() -> dict[str, models.FaultRecord]:
        return {row.id: row for row in queries.faults(job.history, job.row.id) if row.evidence["source"].startswith(source)}

    known = by_source().keys()
    at = act()
    row = job.until(lambda: next((row for name, row in by_source().items() if name not in known), None), "a fault")
    return max(0.0, recorded_at(row) - at)


def log_xid(number: int) -> float:
    """Write a line into the kernel's log; each open file may write ten lines in five seconds."""
    at = time.time()
    with KMSG.open("w") as log:
        log.write(f"<3>NVRM: Xid (PCI:0000:{number + 16:02x}:00): 79, pid=42, GPU has fallen off the bus.\n")
    return at


def happen(events: Path, xid: int) -> float:
    """Report an Xid of the first GPU."""
    at = time.time()
    with events.open("a") as file:
        file.write(f"0 {xid}\n")
    return at


def fill(disk: Path) -> float:
    """Use up the space on *disk*."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return time.time()


def stand_in(folder: Path) -> Path:
    """Build the tests' stand-in for NVIDIA's library; return its folder."""
    folder.mkdir()
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("`nvml` needs a C compiler: install gcc, or name other keys with --only")
    source = ROOT / "tests" / "readers" / "nvml_stand_in.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-fvisibility=hidden", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return folder


# -- looking ---------------------------------------------------------------------------------------------------------------


def command(pid: int) -> bytes:
    """Return the command line of a process; empty if it ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def watchers(job: Job) -> dict[str, list[int]]:
    """Return, by node, the processes that watch it: agent, guardian, lookout, memory server; not what trains."""
    found = {node: [pid for pid in marked(NODE_MARK, job.mark(node)) if b"holdfast.agent" in command(pid)] for node in job.nodes()}
    return {node: pids for node, pids in found.items() if pids}


def watched(job: Job) -> bool:
    """Return whether every node with an agent has a lookout that has been there for a moment."""
    lookouts = [[pid for pid in pids if b"holdfast.agent.monitor" in command(pid)] for pids in watchers(job).values()]
    return all(len(pids) > 1 for pids in lookouts)  # itself, and the one that listens to GPUs


def cpu_of(pids: list[int]) -> float:
    """Return the CPU seconds that *pids* have taken, with those of children that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here, one object a line")
    parser.add_argument("--rounds", type=int, default=20, help="how often each signal is given")
    parser.add_argument("--clean", type=float, default=600.0, help="seconds of the run without faults")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, help="measure only these")
    given = parser.parse_args()
    keys = set(given.only)
    if os.geteuid() != 0 and keys & {"kernel-log", "disk-full"}:
        keys -= {"kernel-log", "disk-full"}
        print("not root: `kernel-log` and `disk-full` are left out")
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder, prefect(Path(folder)) as environment:
        bench = Bench(Path(folder), environment, given.rounds)
        parts: list[tuple[set[str], Callable[[], None]]] = [
            ({"classify"}, bench.classify),
            ({"exit", "stopped", "hang", "node-cut"}, lambda: bench.processes(keys)),
            ({"kernel-log", "nvml"}, lambda: bench.nodes(keys)),
            ({"counter"}, bench.counter),
            ({"disk-full"}, bench.disk_full),
            ({"agent-cpu", "false-alarms"}, lambda: bench.clean(given.clean)),
            ({"sweep"}, bench.sweep),
        ]
        for part, measure in parts:
            if part & keys:
                measure()
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps(one) + "\n" for one in bench.results.values()))


if __name__ == "__main__":
    main()
