"""Which rank was done with which step when: written by the benchmarks' training scripts, read by what measures them.

A line a committed step, in a file a rank, in the working directory. Light enough for a script to import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

LAST_BYTES: Final = 1024
"""More than a line has."""


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's process was done with a step."""

    pid: int
    step: int
    at: float
    seconds: float
    """How long the step took."""
    work: float
    """The CPU time that the process had spent by then."""


class StepNotes:
    """Writes down the steps of this process, whichever rank it is at the time."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def note(self, rank: int, step: int, seconds: float) -> None:
        """Write a line."""
        if rank not in self._files:
            self._files[rank] = os.open(f"steps-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._files[rank], f"{os.getpid()} {step} {time.time():.6f} {seconds:.6f} {time.process_time():.6f}\n".encode())


def now() -> float:
    """Return the time, on the clock of the lines."""
    return time.time()


def read(folder: Path, ranks: int) -> dict[int, list[Done]]:
    """Return what every rank has written so far, in its order."""
    return {rank: list(_lines(folder / f"steps-{rank}.txt")) for rank in range(ranks)}


def _lines(path: Path) -> Iterator[Done]:
    if not path.exists():
        return
    for line in path.read_text().split("\n")[:-1]:
        pid, step, at, seconds, work = line.split()
        yield Done(int(pid), int(step), float(at), float(seconds), float(work))


def newest(steps: Mapping[int, list[Done]]) -> int:
    """Return the newest step that every rank is done with; 0 when there is none."""
    return min((lines[-1].step if lines else 0 for lines in steps.values()), default=0)


def newest_step(folder: Path, ranks: int) -> int:
    """Return the same from the last line of each file alone: for who asks again and again while training goes on."""
    return min((_last_step(folder / f"steps-{rank}.txt") for rank in range(ranks)), default=0)


def _last_step(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        *_, last, _unfinished = [b"", *file.read().split(b"\n")]
    return int(last.split()[1]) if last else 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """How training came back after a rank was lost."""

    at: float
    """When the last rank was done with the first new step."""
    steps_lost: int
    """Steps that had counted, and were computed again."""
    first: Done
    """The first new step, as the process saw it that took the lost rank's place."""


def recovery(steps: Mapping[int, list[Done]], rank: int, before: int) -> Recovered | None:
    """Return how training came back after process *before* of *rank* was lost; nothing while it has not."""
    places = [place for place, one in enumerate(steps[rank]) if one.pid == before]
    new = steps[rank][places[-1] + 1 :] if places else []
    if not new:
        return None
    first = new[0]
    ends = []
    for lines in steps.values():
        again = [one.at for one in lines if one.step == first.step]
        later = [one.at for one in lines if one.step > first.step]
        if not again and not later:
            return None
        ends.append(again[-1] if again else later[0])
    twice = {one.step for lines in steps.values() for one in lines if sum(other.step == one.step for other in lines[-40:]) > 1}
    return Recovered(max(ends), len({step for step in twice if step >= first.step}), first)


def gaps(lines: list[Done], begin: float = 0.0, end: float = float("inf")) -> list[tuple[float, float]]:
    """Return when each step ended that ended between *begin* and *end*, and the seconds since the one before."""
    return [(later.at, later.at - earlier.at) for earlier, later in pairwise(lines) if begin <= later.at <= end]
