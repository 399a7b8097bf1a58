"""From the command to training, side by side: `holdfast run` and `torchrun` with the same options and script, interleaved in one run.

    python -m benchmarks.start --json start.json

Each round starts the same script with two gloo ranks on this machine by `torchrun`, by `holdfast run` in a fresh home ("cold": Prefect
creates its database), and by `holdfast run` in a home that has been used ("warm"); no Prefect server runs. Measured from the start of the
command until the last rank has printed its first line, before it imports anything, and until the last rank has ended its first step, after
torch was imported and the process group formed. Under Holdfast ranks are forked from a process that has imported torch already, so that
the first line comes later, and the first step right after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import ROOT, figure, spread

RANKS: Final = 2
GOAL: Final = 1.5
"""Times as long as torchrun."""
SECONDS: Final = 300.0
"""How long one command may take."""
LAUNCHERS: Final = ("torchrun", "cold", "warm")
SCRIPT: Final = """
import os, pathlib, time
place = pathlib.Path(os.environ["MARKS"])
(place / ("first-line-" + os.environ["RANK"])).write_text(repr(time.time()))
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
(place / ("first-step-" + os.environ["RANK"])).write_text(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
"""


def started(launcher: str, place: Path, home: Path) -> dict[str, float]:
    """Run the script once in the folder *place*; return the seconds until the last rank's first line and first step."""
    place.mkdir()
    script = place / "train.py"
    script.write_text(SCRIPT)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_", "SLURM_"))}
    own = {"MARKS": str(place), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    homes = {"HOLDFAST_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}
    program = ["torch.distributed.run", "--standalone"] if launcher == "torchrun" else ["holdfast", "run", "--name", place.name]
    command = [sys.executable, "-m", *program, "--nproc-per-node", str(RANKS), str(script)]
    begin = time.time()
    subprocess.run(command, cwd=place, env={**bare, **own, **homes}, check=True, capture_output=True, timeout=SECONDS)
    marks = {what: [float(mark.read_text()) for mark in place.glob(f"{what}-*")] for what in ("first-line", "first-step")}
    assert all(len(times) == RANKS for times in marks.values()), "a rank left no mark"
    return {what: max(times) - begin for what, times in marks.items()}


def measure(rounds: int, place: Path) -> dict[str, Any]:
    """Return the figures: seconds of each launcher, and of Holdfast the ratio to torchrun in the same round."""
    times: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    used = place / "used"
    started("warm", place / "unmeasured", used)
    for number in range(rounds):
        for turn in range(len(LAUNCHERS)):
            launcher = LAUNCHERS[(turn + number) % len(LAUNCHERS)]
            name = f"{launcher}-{number}"
            home = used if launcher == "warm" else place / f"home-of-{name}"
            times[launcher].append(started(launcher, place / name, home))
            print(name, {what: round(seconds, 2) for what, seconds in times[launcher][-1].items()}, flush=True)
    found: dict[str, Any] = {}
    for what in ("first-line", "first-step"):
        found[f"{what}, torchrun"] = {**spread([one[what] for one in times["torchrun"]]), "unit": "s"}
        for launcher in ("cold", "warm"):
            own, theirs = ([one[what] for one in times[name]] for name in (launcher, "torchrun"))
            ratios = sorted(mine / other for mine, other in zip(own, theirs, strict=True))
            met = {f"median at most {GOAL} times": ratios[len(ratios) // 2] <= GOAL}
            found[f"{what}, {launcher}"] = {**spread(own), "unit": "s"}
            found[f"{what}, {launcher}, against torchrun"] = figure(ratios, GOAL, met, unit="times")
    return found


def main() -> None:
    """Measure, print the figures, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-start-") as place:
        found = measure(args.rounds, Path(place))
    for name, one in found.items():
        low, high = one["range"]
        goal = f", goal {one['goal']}, {'met' if one['met'] else 'not met'}" if "goal" in one else ""
        print(f"{name:40} median {one['median']:.2f} {one['unit']} ({low:.2f} to {high:.2f}, n {one['n']}){goal}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
