"""Cost of a fault under a real flow and real agents, by the source of the state if no live rank has it: steps lost, seconds to resume.

- ``memory``: all ranks are killed at once; new processes on the same nodes go on from their nodes' memory.
- ``replica``: the node of rank 0 is taken away with its memory; a process on a spare node takes the copy in another node's memory.
- ``disk``: no snapshots are taken; all ranks are killed at once, and the newest checkpoint's pages are dropped from the page cache then.

The clock starts at the fault and ends when the last rank has committed the first new step. Each source has a job of its own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from benchmarks import loading
from benchmarks.real_job import Job, steady

SCRIPT: Final = Path(__file__).with_name("train_pieces.py")
SAVE_EVERY: Final = 10
"""Steps between two checkpoints of the job that has nothing else."""
SLEEP: Final = 0.3
"""Seconds of a step that use no core: a replica must keep up with the steps, on a node that has two cores for everything."""
AHEAD: Final = 5
"""Steps of a job before its first fault."""
SOURCES: Final = ("memory", "replica", "disk")


class Resumes:
    """A job for each source, and what faults have cost them."""

    def __init__(self, place: Path, environment: dict[str, str], *, megabytes: int, faults: int) -> None:
        self._random = random.Random(5)  # noqa: S311 (when a fault comes)
        self._place, self._environment = place, environment
        self._megabytes, self._faults = megabytes, faults

    def all(self) -> list[dict[str, Any]]:
        """Break every job as often as requested; return what each fault cost."""
        return [measured for source in SOURCES for measured in self._job(source)]

    def _job(self, source: str) -> list[dict[str, Any]]:
        snapshots: dict[str, Any] = {"interval": 0} if source == "disk" else {"when_late": "pause", "max_pause": "10s"}
        place = self._place / source
        plan = {"interval": SAVE_EVERY if source == "disk" else 0, "memory": snapshots, "directory": str(place / "checkpoints")}
        nodes = {"nproc_per_node": 1, "spare_nodes": self._faults if source == "replica" else 1, "hot_spares": 0}
        args = ["--megabytes", str(self._megabytes), "--sleep", str(SLEEP)]
        job = Job(place, self._environment, stock=True, script=str(SCRIPT), args=args, **nodes, checkpoint=plan)
        try:
            return [self._fault(job, source) for _ in range(self._faults)]
        finally:
            job.close()

    def _fault(self, job: Job, source: str) -> dict[str, Any]:
        job.settle()
        job.run(AHEAD + self._random.randrange(SAVE_EVERY))
        step = steady(job.done()[0])

        def happen() -> float:
            at = job.take_node() if source == "replica" else job.kill_all()
            if source == "disk":
                loading.evict(job.checkpoints)
            return at

        measured = {"source": source, "step": step, **job.lose(happen)}
        print(f"resume: {measured}", flush=True)
        return measured
