"""How soon a process that is given a rank does its first useful step: a hot spare against a cold start, eager and compiled.

Two ranks of an MLP under DDP. The clock starts at the order that gives the place of a lost rank away, and ends with the first step of the
process that took it. A cold start is a new interpreter; ``compiled, no cache`` also compiles with an empty cache of torch.compile's.
``first`` is the length of that first step over the length of those that follow.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.driver import Driver, Starter
from benchmarks.measuring import ROOT, figure, spread

SCRIPT: Final = ROOT / "benchmarks" / "train.py"
SIZE: Final = ("--width", "512", "--layers", "4", "--batch", "64")
WAYS: Final = {"eager": (), "compiled": ("--compile",)}
COLD_OVER_WARM: Final = 10.0
FIRST: Final = 1.5
AFTER: Final = 8
"""Steps after a promotion, whose median is a steady one."""


def rounds(number: int, *, without_cache: bool = True) -> list[dict[str, Any]]:
    """Replace a rank in each way, *number* times; without a compile cache once, for that takes long."""
    found = []
    with tempfile.TemporaryDirectory(prefix="hf-warmup-") as folder:
        fork_server = Starter(Path(folder))
        try:
            for way in WAYS:
                found += _of(way, number, Path(folder), fork_server, without_cache=without_cache and way == "compiled")
        finally:
            fork_server.close()
    return found


def _of(way: str, number: int, folder: Path, fork_server: Starter, *, without_cache: bool) -> list[dict[str, Any]]:
    place = folder / way
    job = Driver(fork_server, place, [str(SCRIPT), *SIZE, *WAYS[way]], 2, {"TORCHINDUCTOR_CACHE_DIR": str(place / "cache")})
    found = []
    try:
        job.run(AFTER)
        for _ in range(number):
            found += [_replace(job, f"{way}, hot spare", job.hot_spare()), _replace(job, f"{way}, cold start")]
        if without_cache:
            found.append(_replace(job, f"{way}, no cache", TORCHINDUCTOR_CACHE_DIR=str(place / "empty")))
    finally:
        job.close()
    return found


def _replace(job: Driver, way: str, hot_spare: str | None = None, **environment: str) -> dict[str, Any]:
    at, recovered = job.replace(1, hot_spare, cold=hot_spare is None, **environment)
    job.run(AFTER)
    after = [one.seconds for one in job.done()[1] if one.pid == recovered.first.pid and one.step > recovered.first.step]
    found = {"way": way, "seconds": recovered.first.at - at, "first": recovered.first.seconds / statistics.median(after)}
    print(f"warmup: {found}", flush=True)
    return found


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figure: the time to the first useful step of a hot spare that runs compiled code."""
    ways = {one["way"]: [other for other in found if other["way"] == one["way"]] for one in found}
    seconds = {way: statistics.median(one["seconds"] for one in ones) for way, ones in ways.items()}
    ratio = {way: round(seconds[f"{way}, cold start"] / seconds[f"{way}, hot spare"], 1) for way in WAYS}
    first = {way: round(statistics.median(one["first"] for one in ones), 2) for way, ones in ways.items() if way.endswith("hot spare")}
    return figure(
        [one["seconds"] for one in ways["compiled, hot spare"]],
        f"a cold start with a warm cache takes at least {COLD_OVER_WARM:.0f} times as long; the first step at most {FIRST} of a steady one",
        {"ratio": ratio["compiled"] >= COLD_OVER_WARM, "first_step": first["compiled, hot spare"] <= FIRST},
        ratio=ratio,
        first_step=first,
        seconds={way: spread([one["seconds"] for one in ones]) for way, ones in ways.items()},
        simulated="no flow: the clock starts at the order",
    )
