"""How long training pauses when a node goes and there is no spare, and when it comes back: in the processes that live.

One job of three ranks that share each step's samples (examples/elastic.py) loses one node after another, rank 0's too, and gets it back.
Its steps take next to nothing, or rest for a while as those of real jobs do while GPUs compute (train_resting.py).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.controlled import ControlledJob
from benchmarks.measuring import ROOT
from holdfast.history import models, queries

RANKS: Final = 3
SETTLED: Final = 12
"""Steps between two changes: the median of them is what a step takes."""
SCRIPT: Final = ROOT / "examples" / "elastic.py"
RESTING: Final = ROOT / "benchmarks" / "train_resting.py"
SMALL: Final = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "32", "--bytes", "20000", "--batch", "6"]


@dataclass
class Widths:
    """What was measured."""

    narrowed: list[float] = field(default_factory=list)
    """Seconds from the loss of a node to the first step of those that are left."""
    grown: list[float] = field(default_factory=list)
    """Seconds by which the first step with the newcomer came later than a step takes from then on."""
    grown_steps: list[float] = field(default_factory=list)
    """The same in steps."""
    usual: list[float] = field(default_factory=list)
    """What a step takes with all ranks, at each growth."""
    missed: list[str] = field(default_factory=list)

    def play(self, place: Path, environment: dict[str, str], turns: int, rest: float = 0.0) -> None:
        """Have a node go and come *turns* times, in a job whose steps *rest* for so many seconds."""
        job = ControlledJob(
            place,
            environment,
            count=RANKS,
            script=str(RESTING if rest else SCRIPT),
            args=[*([str(rest)] if rest else []), *SMALL, "--steps", "1000000"],
            nnodes=f"{RANKS - 1}:{RANKS}",
            nproc_per_node=1,
            checkpoint={"interval": 0},
        )
        try:
            job.until(lambda: job.chaos.step() > 0 and bool((newest(job).facts or {}).get("copies")), "all ranks at work", seconds=180)
            for turn in range(turns):
                self.once(job, turn % RANKS)
        finally:
            job.close()

    def once(self, job: ControlledJob, rank: int) -> None:
        """Take the node of *rank* away, and give it back."""
        steps(job, SETTLED)
        known = len(job.incidents())
        at, node = job.chaos.power_off(rank)
        job.until(lambda: len(job.incidents()) > known and job.incidents()[-1].closed_at is not None, "the end of the incident")
        one = job.incidents()[-1]
        if one.action != "shrink-live" or one.downtime_s is None:
            self.missed.append(f"narrow: {one.action}, because {one.reason}")
        else:
            self.narrowed.append(one.fault_at + one.downtime_s - at)
        steps(job, SETTLED)
        job.chaos.power_on(node)
        job.until(lambda: newest(job).world_size == RANKS and newest(job).first_step_at is not None, f"rank {rank} to be back", seconds=180)
        steps(job, SETTLED)
        number = newest(job).number
        before, after = (queries.steps(job.history, job.row.id, generation=one) for one in (number - 1, number))
        usual = statistics.median(row.seconds for row in after[2 : SETTLED + 2])  # with all ranks: on few cores they take longer than two
        pause = max(0.0, after[0].at - before[-1].at - usual)
        self.usual.append(usual)
        self.grown.append(pause)
        self.grown_steps.append(pause / usual)


def newest(job: ControlledJob) -> models.Generation:
    """Return the job's newest generation."""
    row = queries.newest_generation(job.history, job.row.id)
    assert row is not None
    return row


def steps(job: ControlledJob, count: int) -> None:
    """Wait for that many more steps."""
    until = job.chaos.step() + count
    job.until(lambda: job.chaos.step() >= until, f"step {until}")
