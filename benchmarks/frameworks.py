"""What Holdfast costs and saves in scripts of four libraries: nanoGPT's way, the Hugging Face Trainer, Accelerate and Lightning.

    python -m benchmarks.frameworks --json frameworks.json

The same small GPT on two gloo ranks of this machine. Each round runs each script by `torchrun`, without the lines about Holdfast, and by
`holdfast run`, in turns: the overhead is the ratio of the median times of a step, of rank 0 and without the first twenty steps. Then each
script runs once more by `holdfast run` and rank 1 is killed (SIGKILL) at a random step of its second third. Measured from the kill until
the next process of rank 1 has ended the first step that the killed one had not; "steps lost" counts those that it computed again. The
final weights are compared bit by bit with those of a run without the fault. Lines are counted between the plain script and the other one,
without imports. A checkpoint on disk is due every 100 steps, snapshots in memory as the job chooses. Nothing is simulated.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.measuring import ROOT, figure, spread, wait_for

SCRIPTS: Final = {"nanogpt": "nanogpt", "trainer": "trainer", "accelerate": "accelerated", "lightning": "lightning_module"}
RANKS: Final = 2
FIRST: Final = 20
"""Steps at the beginning that are not measured."""
SECONDS: Final = 600.0
"""How long one run may take."""
OVERHEAD_GOAL: Final = 1.01
"""A step's time, as a multiple of that under torchrun."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a step: its number, the process, and the time."""

    step: int
    pid: int
    at: float


class Training:
    """One run of a script."""

    def __init__(self, framework: str, launcher: str, place: Path, home: Path, steps: int) -> None:
        place.mkdir()
        self.place, self.framework, self.launcher = place, framework, launcher
        script = place / "train.py"
        text = (ROOT / "benchmarks" / "framework_scripts" / f"{SCRIPTS[framework]}.py").read_text()
        script.write_text(plain(text) if launcher == "torchrun" else text)
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_", "SLURM_"))}
        own = {"BENCH_PLACE": str(place), "BENCH_STEPS": str(steps), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        homes = {"HOLDFAST_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}
        program = ["torch.distributed.run", "--standalone"] if launcher == "torchrun" else ["holdfast", "run", "--name", place.name]
        command = [sys.executable, "-m", *program, "--nproc-per-node", str(RANKS), str(script)]
        with (place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=place, env={**bare, **own, **homes}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def marks(self, rank: int) -> list[Mark]:
        """Return the marks of a rank so far."""
        try:
            lines = (self.place / f"steps-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [line.split() for line in lines]
        return [Mark(int(one[0]), int(one[1]), float(one[2])) for one in found if len(one) == len(fields(Mark))]

    def end(self) -> None:
        """Wait for the end; raise where the run failed."""
        status = self.process.wait(SECONDS)
        if status:
            raise RuntimeError(
                f"{self.framework} under {self.launcher} ended with status {status}:\n{(self.place / 'log').read_text()[-3000:]}"
            )

    def step_seconds(self) -> float:
        """Return the median time of a step of rank 0."""
        marks = self.marks(0)[FIRST:]
        return statistics.median(later.at - before.at for before, later in itertools.pairwise(marks))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the final weights."""
        found: dict[str, torch.Tensor] = torch.load(self.place / "weights.pt")
        return found


def plain(text: str) -> str:
    """Return a script without what it has for Holdfast."""
    lines = []
    for line in text.splitlines(keepends=True):
        found = re.search(r"# holdfast(: (.*))?$", line.rstrip("\n"))
        if found is None:
            lines.append(line)
        elif found[2]:
            lines.append(line[: len(line) - len(line.lstrip())] + found[2] + "\n")
    return "".join(lines)


def changed_lines(framework: str) -> int:
    """Return how many lines of the script are about Holdfast, imports not counted: added, or changed."""
    text = (ROOT / "benchmarks" / "framework_scripts" / f"{SCRIPTS[framework]}.py").read_text()
    added = [one[2:] for one in difflib.ndiff(plain(text).splitlines(), text.splitlines()) if one.startswith("+ ")]
    return sum(not re.match(r"\s*(import|from) ", line) for line in added)


def undisturbed(framework: str, rounds: int, place: Path, home: Path, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the figures of a step's time, and the final weights under Holdfast."""
    times: dict[str, list[float]] = {"torchrun": [], "holdfast": []}
    weights: dict[str, torch.Tensor] = {}
    for number in range(rounds):
        for launcher in ("torchrun", "holdfast") if number % 2 == 0 else ("holdfast", "torchrun"):
            run = Training(framework, launcher, place / f"{framework}-{launcher}-{number}", home, steps)
            run.end()
            times[launcher].append(run.step_seconds())
            weights = run.weights() if launcher == "holdfast" else weights
            print(f"{framework}, {launcher}, round {number + 1}: {times[launcher][-1] * 1000:.2f} ms per step", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(times["holdfast"], times["torchrun"], strict=True)]
    met = {f"median at most {OVERHEAD_GOAL}": statistics.median(ratios) <= OVERHEAD_GOAL}
    found = {
        "step, torchrun": {**spread(times["torchrun"]), "unit": "s"},
        "step, holdfast": {**spread(times["holdfast"]), "unit": "s"},
        "step, against torchrun": figure(ratios, OVERHEAD_GOAL, met, unit="times"),
    }
    return found, weights


def disturbed(framework: str, number: int, place: Path, home: Path, steps: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Kill rank 1 in the middle; return the seconds until the first new step, the steps that were lost, and the final weights."""
    run = Training(framework, "holdfast", place / f"{framework}-killed-{number}", home, steps)
    at = random.Random(number).randrange(steps // 3, 2 * steps // 3)  # noqa: S311 (no secret)
    victim = wait_for(lambda: next((one for one in run.marks(1) if one.step >= at), None), f"step {at} of {framework}", seconds=SECONDS)
    killed = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    run.end()
    done = max(one.step for one in run.marks(1) if one.pid == victim.pid)
    after = [one for one in run.marks(1) if one.pid != victim.pid]
    if not after:
        raise RuntimeError(f"{framework}: rank 1 has no second process: the kill came too late")
    new, lost = next(one for one in after if one.step > done), done - (after[0].step - 1)
    print(f"{framework}, killed at step {at}: new step after {new.at - killed:.2f} s, {lost} lost", flush=True)
    return new.at - killed, lost, run.weights()


def measure(frameworks: list[str], rounds: int, place: Path, steps: int) -> dict[str, Any]:
    """Return all figures."""
    home, found = place / "home", {}
    Training("nanogpt", "holdfast", place / "unmeasured", home, 30).end()  # makes Prefect's database
    for framework in frameworks:
        figures, weights = undisturbed(framework, rounds, place, home, steps)
        faults = [disturbed(framework, number, place, home, steps) for number in range(rounds)]
        equal = [float(all(torch.equal(own[name], weights[name]) for name in weights)) for *_, own in faults]
        lost, lines = [float(one) for _, one, _ in faults], changed_lines(framework)
        figures["fault to new step"] = {**spread([one for one, *_ in faults]), "unit": "s"}
        figures["steps lost"] = figure(lost, 1, {"at most 1": max(lost) <= 1})
        figures["weights equal"] = figure(equal, 1, {"in all runs": min(equal) == 1}, unit="of 1")
        figures["lines changed"] = figure([lines], 1, {"at most 1": lines <= 1})
        found.update({f"{framework}: {name}": one for name, one in figures.items()})
    return found


def main() -> None:
    """Measure, print the figures, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="steps of each run")
    parser.add_argument("--only", choices=SCRIPTS, action="append", help="one library; may be repeated")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-frameworks-") as place:
        found = measure(args.only or list(SCRIPTS), args.rounds, Path(place), args.steps)
    for name, one in found.items():
        low, high = one["range"]
        goal = f", goal {one['goal']}, {'met' if one['met'] else 'not met'}" if "goal" in one else ""
        print(f"{name:40} median {one['median']:.4g} {one.get('unit', '')} ({low:.4g} to {high:.4g}, n {one['n']}){goal}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
