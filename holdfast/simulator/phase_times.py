"""How long the phases of a recovery take: figures with their sources, from publications, from Holdfast's benchmarks, or from a history."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Final

TRAINMOVER: Final = "TrainMover (OSDI '26, arXiv:2412.12636)"
STACK: Final = f"{TRAINMOVER}, table 1: restart of a production job of 8,192 GPUs"
CLOCKWORK: Final = "cost model in Clockwork's fault tolerance benchmark (2026)"
BYTEROBUST: Final = "ByteRobust (SOSP '25, arXiv:2509.16293): inspections find faults in 10 to 30 s"
BAMBOO: Final = "Bamboo (NSDI '23, arXiv:2204.12013), its own simulator in github.com/uclasystem/bamboo"
TORCH: Final = "default timeout of a NCCL process group in PyTorch"
OURS: Final = "Holdfast's benchmarks, two CPU cores and gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """A distribution of seconds with its source: one value, values between two limits, or measured values."""

    low: float = 0.0
    high: float | None = None
    """None: always `low`."""
    steps: float = 0.0
    """Steps of the job that are added to it."""
    measured: Sequence[float] = field(default=())
    """Values that are drawn instead of the limits."""
    source: str

    def draw(self, numbers: random.Random, step: float) -> float:
        """Return seconds drawn by *numbers*, for a job with steps of *step* seconds."""
        if self.measured:
            return numbers.choice(self.measured)
        return (self.low if self.high is None else numbers.uniform(self.low, self.high)) + self.steps * step

    def mean(self, step: float) -> float:
        """Return the mean in seconds, for a job with steps of *step* seconds."""
        if self.measured:
            return mean(self.measured)
        return (self.low + (self.low if self.high is None else self.high)) / 2 + self.steps * step


Phases = tuple[tuple[str, PhaseTime], ...]
"""Names as in the history (`detect`, `reschedule`, `communication`, `load`, `warm-up`, ...) and how long each takes, in order."""


def seconds(value: float, source: str) -> PhaseTime:
    """Return a phase that always takes *value* seconds."""
    return PhaseTime(low=value, source=source)


STOP: Final = seconds(31.2, STACK)
RESCHEDULE: Final = seconds(90.0, STACK)
LOAD_DISK: Final = seconds(93.6, STACK)
COMMUNICATION: Final = seconds(65.4, STACK)
WARM_UP: Final = seconds(108.0, STACK)
LOAD_MEMORY: Final = seconds(7.2, f"a thirteenth of the load from storage (GEMINI, SOSP '23) in {STACK}")
DELTA: Final = seconds(7.0, f"{TRAINMOVER}, section 8.5: communication setup on the critical path")
SWITCH_HOT: Final = seconds(21.1, f"{TRAINMOVER}, figure 8: unexpected, with standby, 1,024 GPUs")
SWITCH_PLANNED: Final = seconds(16.6, f"{TRAINMOVER}, figure 8: expected, 1,024 GPUs")
SWITCH_COLD: Final = seconds(50.0, f"not published: implied by {TRAINMOVER}, section 8.2, for 8K GPUs without standby")
NODE_REPLACED: Final = seconds(600.0, CLOCKWORK)
STARTED: Final = seconds(300.0, CLOCKWORK)
NOTHING: Final = seconds(0.0, "")
