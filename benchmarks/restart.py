"""Restart-level recovery, side by side: Holdfast and ``torchrun --max-restarts``, same script, same fault, interleaved in one run.

    python -m benchmarks.restart --json restart.json

Each round starts a fresh job of 4 gloo ranks on one node (torchrun's best case: one agent, no second rendezvous party),
waits for a step, kills rank 2 by SIGKILL, and waits for the first new step. Measured from the kill: when the orchestrator
knew (Holdfast: the flow's own time stamp; torchrun: the first line in which it names the failed rank), and when the first new
step was printed by a new rank 0. Both resume from the same checkpoints of the same script. torchrun runs with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which torch 2.13 over gloo does not recover.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import ROOT, prefect, wait_for
from holdfast.cluster.local import LocalNodes
from holdfast.history import History, queries
from holdfast.host.process import marked
from holdfast.testing.chaos import Chaos

SCRIPT: Final = ROOT / "examples" / "byte_gpt.py"
RANKS: Final = 4
VICTIM: Final = 2
KILL_AT: Final = 13
SAVE_EVERY: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round measured, in seconds from the kill."""

    detect_s: float
    downtime_s: float
    steps_lost: int
    orders_s: float | None = None
    """From the event's arrival in the flow to the orders sent."""


class StepClock:
    """Follows a log of ``step N: loss`` lines and notes when each was seen (within 2 ms of its being written)."""

    def __init__(self, path: Callable[[], Path | None]) -> None:
        self.seen: list[tuple[int, float]] = []
        self._path, self._over = path, threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        offset, rest = 0, b""
        while not self._over.wait(0.002):
            path = self._path()
            if path is None or not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if line.startswith("--- holdfast"):
            self.seen.append((-1, time.time()))
        elif found := re.match(r"step (\d+): loss", line):
            self.seen.append((int(found[1]), time.time()))

    def close(self) -> None:
        """Stop following."""
        self._over.set()


def arguments_of(steps: int) -> list[str]:
    """Return the script's arguments: a line a step, so that both sides are timed by the same words; groups that only a restart can mend."""
    return ["--steps", str(steps), "--print-every", "1", "--stock-groups"]


# -- Holdfast ----------------------------------------------------------------------------------------------------------


def holdfast_round(place: Path, environment: dict[str, str]) -> Round:
    """Run one job under a flow, kill a rank, and time the recovery."""
    home = place / "home"
    home.mkdir(parents=True)
    job = {
        "name": "bench",
        "script": str(SCRIPT),
        "args": arguments_of(100_000),
        "workdir": str(place),
        "nnodes": 1,
        "nproc_per_node": RANKS,
        "checkpoint": {"interval": SAVE_EVERY, "directory": str(place / "checkpoints")},
    }
    cluster = {"kind": "local", "name": "bench", "nodes": 1, "directory": str(home / "nodes")}
    spec = place / "spec.json"
    spec.write_text(json.dumps({"job": job, "cluster": cluster}))
    os.environ["HOLDFAST_HOME"] = str(home)
    history, nodes = History.open(f"sqlite:///{home / 'history.db'}"), LocalNodes("bench", home / "nodes", 1)
    log = home / "jobs" / "bench" / "logs" / "rank-0.log"
    clock = StepClock(lambda: log)
    with (place / "flow.log").open("wb") as out:
        command = [sys.executable, "-m", "holdfast.flows.training_job", str(spec)]
        flow = subprocess.Popen(command, env=environment | {"HOLDFAST_HOME": str(home)}, stdout=out, stderr=out)
    try:
        wait_for(lambda: any(step >= KILL_AT for step, _ in clock.seen), "Holdfast's step to kill at")
        victim = Chaos(nodes, history, "bench").ranks()[VICTIM].pid
        before = max(step for step, _ in clock.seen)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        again, first = wait_for(lambda: after_marker(clock.seen), "Holdfast's first new step")
        row = wait_for(lambda: closed(history), "Holdfast's incident")
        return Round(
            detect_s=row.detected_at - killed,
            downtime_s=first - killed,
            steps_lost=max(0, before - (again - 1)),
            orders_s=row.commands_sent_at - row.detected_at,
        )
    finally:
        clock.close()
        flow.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            flow.wait(30)
        flow.kill()
        flow.wait()
        nodes.clear("node-0")
        history.close()


def closed(history: History) -> Any:  # noqa: ANN401 (a row, or nothing)
    """Return the job's first incident once it is closed."""
    rows = queries.incidents(history, queries.newest_job(history, "bench").id)
    return rows[0] if rows and rows[0].closed_at else None


def after_marker(seen: list[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the first step printed by the second generation."""
    markers = [number for number, (step, _) in enumerate(seen) if step == -1]
    later = seen[markers[1] + 1 :] if len(markers) > 1 else []
    return later[0] if later else None


# -- torchrun ----------------------------------------------------------------------------------------------------------


def torchrun_round(place: Path) -> Round:
    """Run one job under torchrun, kill a rank, and time the recovery."""
    place.mkdir(parents=True)
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        "HOLDFAST_CHECKPOINT_DIR": str(place / "checkpoints"),
        "HOLDFAST_SAVE_EVERY": str(SAVE_EVERY),
        "BENCH_MARK": str(place),
    }
    logs = place / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    command += [f"--log-dir={logs}", "--redirects=3", str(SCRIPT), *arguments_of(100_000)]
    printed: list[tuple[float, str]] = []
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    threading.Thread(target=lambda: printed.extend(stamped(run)), daemon=True).start()
    clocks = [StepClock(lambda attempt=attempt: attempt_log(logs, attempt)) for attempt in (0, 1)]  # type: ignore[misc]
    try:
        wait_for(lambda: any(step >= KILL_AT for step, _ in clocks[0].seen), "torchrun's step to kill at")
        victim = next(pid for pid in marked("BENCH_MARK", str(place)) if pid in set(marked("RANK", str(VICTIM))))
        before = max(step for step, _ in clocks[0].seen)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        again, first = wait_for(lambda: clocks[1].seen and clocks[1].seen[0], "torchrun's first new step")
        detected = wait_for(lambda: next((at for at, line in printed if at > killed and "exitcode: -9" in line), None), "torchrun's word")
        return Round(detect_s=detected - killed, downtime_s=first - killed, steps_lost=max(0, before - (again - 1)))
    finally:
        for clock in clocks:
            clock.close()
        run.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            run.wait(20)
        for pid in marked("BENCH_MARK", str(place)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()


def stamped(run: subprocess.Popen[str]) -> Iterator[tuple[float, str]]:
    """Yield each line of torchrun's own log with the time at which it came."""
    assert run.stderr is not None
    for line in run.stderr:
        yield time.time(), line


def attempt_log(logs: Path, attempt: int) -> Path | None:
    """Return where rank 0 of that attempt prints."""
    return next(iter(logs.glob(f"*/attempt_{attempt}/0/stdout.log")), None)


# -- both --------------------------------------------------------------------------------------------------------------


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return medians, spread, and every value."""
    facts: dict[str, Any] = {"n": len(rounds)}
    for name in ("detect_s", "downtime_s", "steps_lost", "orders_s"):
        values = [getattr(one, name) for one in rounds if getattr(one, name) is not None]
        if values:
            facts[name] = round(statistics.median(values), 4)
            facts[f"{name}_range"] = [round(min(values), 4), round(max(values), 4)]
            facts[f"{name}_all"] = [round(value, 4) for value in values]
    return facts


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each; they take turns in going first")
    given = parser.parse_args()
    ours: list[Round] = []
    theirs: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder, prefect(Path(folder)) as environment:
        for number in range(given.rounds):
            turns = [("holdfast", ours), ("torchrun", theirs)]
            for name, rounds in turns if number % 2 == 0 else reversed(turns):
                place = Path(folder) / f"{name}-{number}"
                rounds.append(holdfast_round(place, environment) if name == "holdfast" else torchrun_round(place))
                print(f"round {number + 1} {name}: {rounds[-1]}", flush=True)
    facts = {"holdfast": summary(ours), "torchrun": summary(theirs)}
    facts["ratio"] = round(facts["holdfast"]["downtime_s"] / facts["torchrun"]["downtime_s"], 4)
    facts["goals"] = {"detect_s": 0.05, "ratio": 0.3, "orders_s": 0.25}
    facts["setting"] = {"ranks": RANKS, "script": SCRIPT.name, "cores": os.cpu_count(), "simulated": "nothing"}
    print(json.dumps(facts, indent=2))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
