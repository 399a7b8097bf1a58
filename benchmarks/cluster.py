"""Cost and recovery time of clusters of many hosts.

    python -m benchmarks.cluster --json FILE [--only NAME ...] [--rounds N] [--keep FOLDER]

Rows about scale are on simulated agents (see `benchmarks/simulated/`): one process plays all of them over the real protocol, a real flow
with its policies, Prefect server and history runs the job, and no worker trains. `cluster_scale.py` says what each row means.

Rows about hosts are on real ones: network namespaces with SSH servers, which needs root. `cluster_hosts.py` says what each row means.

FILE gets one JSON object a line: `what`, `median`, `p99`, `n`, `goal`, `met`, and what else is worth knowing of the row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import cluster_hosts, cluster_scale
from benchmarks.measuring import prefect

Line = dict[str, Any]
Row = Callable[[Path, dict[str, str], int], Iterator[Line]]
"""Given a folder, the environment of a Prefect server, and a number of rounds, yields what was measured."""

ROWS: Final[dict[str, Row]] = {
    "scale-16": lambda *given: cluster_scale.scale(16, *given),
    "scale-1024": lambda *given: cluster_scale.scale(1024, *given),
    "scale-4096": lambda *given: cluster_scale.scale(4096, *given),
    "growth": cluster_scale.growth,
    "orders": cluster_scale.orders,
    "sweep-1024": lambda *given: cluster_scale.sweep(1024, *given),
    "sweep-4096": lambda *given: cluster_scale.sweep(4096, *given),
    "hosts-faults": cluster_hosts.faults,
    "hosts-reconnect": cluster_hosts.reconnect,
    "hosts-takeover": cluster_hosts.takeover,
    "hosts-launch-16": lambda *given: cluster_hosts.launch(16, *given),
}


def main() -> int:
    """Measure, print a line for each figure as it comes, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS), default=tuple(ROWS), metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each thing is done")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for homes, logs and histories, which stays")
    given = parser.parse_args()
    setting, lines = {"cores": os.cpu_count()}, list[Line]()
    with tempfile.TemporaryDirectory(prefix="hf-bench-", ignore_cleanup_errors=True) as temporary:
        folder = given.keep.absolute() if given.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with prefect(folder) as environment:
            for name in given.only:
                for line in ROWS[name](folder / name, environment, given.rounds):
                    lines.append({**line, **setting, "load": os.getloadavg()[0]})
                    print(json.dumps(lines[-1]), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
