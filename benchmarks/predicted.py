"""Chaos runs against what the simulator predicts of each from its list of faults and the phase times of the others.

    python -m benchmarks.handling --only chaos --faults 25 --runs 20 --json chaos.jsonl
    python -m benchmarks.predicted chaos.jsonl ... [--json FILE] [--store]

Several files may hold runs, as such a benchmark can be started in parts. ``--store`` puts the runs into `holdfast/simulator/data`, from
where `holdfast simulate --validate` has them.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import yaml

from benchmarks.chaos_run import POLICY, SAVE_EVERY, TIMEOUTS, promises
from holdfast.simulator.chaos_runs import DATA, predictions
from holdfast.simulator.validation import chaos_runs

KEPT: Final = ("seed", "wall_s", "step_s", "downtime_s", "steps_recomputed", "reattached", "fault_list", "incident_list")
LEAST_KINDS: Final = 25


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the chaos runs in *files* that came to their end, by their seeds."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted((one for one in lines if one["key"] == "chaos" and "fault_list" in one), key=lambda one: one["seed"])


def record_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the simulator needs of *runs*."""
    kept = [{name: run[name] for name in KEPT} for run in runs]
    return {"policy": yaml.safe_load(POLICY), "timeouts": TIMEOUTS["recovery"], "checkpoint_steps": SAVE_EVERY, "runs": kept}


def guarantees(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each guarantee: how often it was broken in all *runs*."""
    broken = Counter[str]()
    kinds = {fault["kind"] for run in runs for fault in run["fault_list"]}
    for run in runs:
        broken.update(promises(run))
    broken["kinds of faults too few"] = max(0, LEAST_KINDS - len(kinds))
    faults = sum(run["faults"] for run in runs)
    return [
        {"key": f"chaos: {name}", "median": often, "n": faults, "runs": len(runs), "kinds": len(kinds), "goal": 0, "met": not often}
        for name, often in broken.items()
    ]


def main() -> None:
    """Read, predict, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="what `benchmarks.handling --only chaos --json` has written")
    parser.add_argument("--json", type=Path, help="write the figures here, one object a line")
    parser.add_argument("--store", action="store_true", help="keep the runs for `holdfast simulate --validate`")
    given = parser.parse_args()
    runs = read(given.files)
    record = record_of(runs)
    for one in predictions(record):
        print(
            f"seed {one.seed}: downtime {one.downtime:.1f} s, predicted {fmean(one.predicted_downtimes):.1f} s; "
            f"steps computed again {one.steps}, predicted {fmean(one.predicted_steps):.1f}"
        )
    lines = [*guarantees(runs), *(target.record() for target in chaos_runs(record))]
    for line in lines:
        print(json.dumps(line))
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if given.store:
        place = Path(str(resources.files("holdfast.simulator"))) / DATA
        place.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
