"""A real flow over simulated nodes: ``python -m benchmarks.simulated.flow SPEC FOLDER COUNT``.

Only where its nodes come from is another.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.simulated.nodes import SimulatedNodes
from holdfast.control.supervisor import supervise
from holdfast.flows.training_job import training_job
from holdfast.host.process import die_with_parent
from holdfast.prefect_client import flow_program


def main(arguments: list[str]) -> int:
    """Run the job that the first argument describes on the nodes that the others describe."""
    spec, folder, count = arguments
    die_with_parent(os.getppid())
    nodes = SimulatedNodes("simulated", Path(folder), int(count))
    setattr(supervise, "open_cluster", lambda _: nodes)  # noqa: B010 (not exported, and nobody else's business)
    return flow_program.main([spec], training_job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
