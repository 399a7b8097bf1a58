"""Whether jobs keep their guarantees while parts of their control plane are killed, and how soon a standby takes over.

    python -m benchmarks.control_plane --json FILE [--rounds 100] [--takeovers 10] [--seed S] [--only KEY ...]

PostgreSQL holds the history and Prefect's own database; two hosts with a Prefect worker each run the deployed flow, one of them as the
standby. These hosts are process groups with homes and, as root, host names of their own.

- ``takeover``: from SIGKILL, or SIGSTOP, of the controller, to when the standby controller on the other host has reattached to the job.
  Nodes are groups of processes of this machine.
- ``chaos``: each round is one job of two ranks on three hosts, one of them spare, with SSH servers in a network of their own (needs root;
  see `tests/hosts/`). Its flow, worker, Prefect server, PostgreSQL, an agent or an sshd is killed, alone or in pairs, while it trains or at
  some moment of a recovery. Promised, or the exit status is 1: it ends with the losses and parameters of an undisturbed run, bit for bit;
  each step, and each move, incident and decision is on record; no process, memory, spilled row or lease is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_run import TRAINING
from benchmarks.control_chaos import LONGEST, PARTS, ControlChaos
from benchmarks.control_jobs import Job
from benchmarks.control_parts import Host, Program, plane
from benchmarks.measuring import spread, wait_for
from holdfast.cli.watch import request_stop
from holdfast.history import History, queries

KEYS: Final = ("takeover", "chaos")
GOAL: Final = {"median": 5.0}


class Takeovers:
    """Flows on two hosts that follow each other."""

    def __init__(self, place: Path, history: History, hosts: list[Host]) -> None:
        self.place, self.history, self.hosts = place, history, hosts

    def play(self, count: int) -> list[dict[str, Any]]:
        """Have flows die, and standbys take their jobs over, *count* times each by SIGKILL and by SIGSTOP."""
        return [self._takeovers(name, number, count) for name, number in (("sigkill", signal.SIGKILL), ("sigstop", signal.SIGSTOP))]

    def _takeovers(self, name: str, number: int, count: int) -> dict[str, Any]:
        job, times = Job(self.place / f"takeover-{name}", self.history, args=[*TRAINING, "--rest", "0.05"]), list[float]()
        spec = job.place / "spec.json"
        spec.write_text(json.dumps({**job.described, "standby": True}))
        flows = [host.program(f"flow-{name}", sys.executable, "-m", "holdfast.flows.training_job", str(spec)) for host in self.hosts]
        flows[0].begin()
        wait_for(lambda: job.step() > 0, "the first step", every=0.1, seconds=LONGEST)
        flows[1].begin()
        for turn in range(count):
            times.append(self._takeover(job, number, flows[turn % 2], flows[(turn + 1) % 2]))
            print(f"takeover after {name}: {times[-1]:.2f} s", flush=True)
        incidents = [one.kind for one in queries.incidents(self.history, job.row.id)]
        request_stop(self.history, job.row)
        wait_for(lambda: not any(flow.lives() for flow in flows), "the end of both flows", every=0.1, seconds=LONGEST)
        left = job.left()
        job.close()
        return {"key": f"takeover: {name}", **spread(times), "goal": GOAL, "met": met(times), "incidents": incidents, "left": left}

    def _takeover(self, job: Job, number: int, old: Program, new: Program) -> float:
        """Have the flow *old* end or stop, and *new* follow it; return after how many seconds it did, with *old* standing by."""
        wait_for(lambda: waits(new), "the standby", every=0.1, seconds=LONGEST)
        seen, first, at = len(job.reattached()), job.step(), time.time()
        os.killpg(old.pid, number)
        wait_for(lambda: len(job.reattached()) > seen, "the takeover", every=0.05, seconds=LONGEST)
        seconds = job.reattached()[-1] - at
        wait_for(lambda: job.step() > first + 5, "further steps", every=0.05, seconds=LONGEST)
        old.kill()
        old.log.write_text("")
        old.begin()
        return seconds


def waits(flow: Program) -> bool:
    """Return whether a standby has begun to wait, and lives."""
    return flow.lives() and "standby.waits" in flow.log.read_text(errors="replace")


def met(times: list[float]) -> bool:
    """Return whether the goal was met."""
    return bool(times) and spread(times)["median"] <= GOAL["median"]


def together(text: str) -> tuple[str, ...]:
    """Return the parts that are killed together, as they are named on the command line."""
    if strange := set(text.split("+")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(strange))} is none of {', '.join(PARTS)}")
    return tuple(text.split("+"))


def main() -> int:
    """Measure, print, and write; return 1 when a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, one object a line")
    parser.add_argument("--rounds", type=int, default=100, help="jobs whose control plane is killed")
    parser.add_argument("--takeovers", type=int, default=10, help="takeovers after SIGKILL, and as many after SIGSTOP")
    parser.add_argument("--seed", type=int, default=1, help="the same seed kills the same parts in the same order")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    parser.add_argument("--parts", nargs="+", type=together, default=[], metavar="PART", help="kill only these, e.g. agent flow+postgresql")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for homes and logs, which stays")
    given = parser.parse_args()
    lines = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="hf-plane-", ignore_cleanup_errors=True) as temporary:
        folder = given.keep.absolute() if given.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with plane(folder) as made:
            history, hosts = History.open(made.history), [made.host(f"host-{name}") for name in "ab"]
            try:
                if "takeover" in given.only:
                    lines += Takeovers(folder, history, hosts).play(given.takeovers)
                if "chaos" in given.only:
                    lines.append(ControlChaos(folder, made, history, hosts, given.seed).play(given.rounds, given.parts))
            finally:
                for host in hosts:
                    host.close()
                history.close()
    setting = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "simulated": "all hosts are on one machine"}
    for line in lines:
        print(json.dumps({**line, **setting}), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps({**line, **setting}) + "\n" for line in lines))
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
