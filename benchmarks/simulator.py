"""How long the simulator takes: `python -m benchmarks.simulator --json FILE`.

One year of 65,536 GPUs on one core, and clusters of 1,024 to 131,072 GPUs with about the same number of faults.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import figure
from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import events_of
from holdfast.simulator.planning import PlanRequest

SIZES: Final = (1024, 4096, 16_384, 65_536, 131_072)
GOAL_SECONDS: Final = 60.0
GOAL_MIB: Final = 2048.0


def measured(gpus: int, days: float) -> dict[str, Any]:
    """Return how long managed groups on so many *gpus* take to simulate, with independent faults at Meta's rate."""
    request = PlanRequest(gpus=gpus, rate=6.5)
    spares = max(4, round(0.04 * request.nodes))
    scenario = request.scenario(spares=spares, hot_spares=16).model_copy(update={"duration": timedelta(days=days)})
    events = events_of(scenario, 0)
    began = time.process_time()
    result = simulate(scenario, "holdfast-groups", 0, events=events)
    seconds = time.process_time() - began
    faults = result.jobs["training"].faults
    return {"gpus": gpus, "days": round(days, 1), "faults": faults, "seconds": seconds, "ms_per_fault": 1000 * seconds / max(1, faults)}


def main() -> None:
    """Measure, print, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--faults", type=int, default=1000, help="about so many in each of the sizes")
    options = parser.parse_args()
    by_size = [measured(gpus, options.faults / (gpus / 8 * 6.5 / 1000)) for gpus in SIZES]
    for one in by_size:
        print(one)
    year = measured(65_536, 365)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(year, f"{mib:.0f} MiB")
    results = {
        "year_of_65536_seconds": figure([year["seconds"]], GOAL_SECONDS, {"seconds": year["seconds"] <= GOAL_SECONDS}),
        "peak_mib": figure([mib], GOAL_MIB, {"mib": mib <= GOAL_MIB}),
        "by_size": by_size,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
