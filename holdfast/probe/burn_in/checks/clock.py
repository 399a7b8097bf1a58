"""Whether this node's clocks go, and go alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from detectors.burn_in_results import Check, CheckMark

NAME: Final = "clock"
STEP: Final = 0.05
"""Seconds by which the two clocks may part while they are watched: a step by hand or by a time server."""

Clock = Callable[[], float]


def ticking(seconds: float, monotonic: Clock = time.monotonic, wall: Clock = time.time) -> Check:
    """Read both clocks for *seconds*: the one may never fall, and the other must keep up with it."""
    begun, began_at = monotonic(), wall()
    before, reads = begun, 0
    real = time.perf_counter() + seconds
    while time.perf_counter() < real:
        now = monotonic()
        reads += 1
        if now < before:
            return Check(name=NAME, mark=CheckMark.FAILED, words=f"its monotonic clock fell by {before - now:.6f} s", seconds=now - begun)
        before = now
        time.sleep(0.001)
    passed = monotonic() - begun
    drift = (wall() - began_at) - passed
    figures = {"drift ms": 1000 * drift, "reads": float(reads)}
    if passed <= 0:
        return Check(
            name=NAME, mark=CheckMark.FAILED, words=f"its monotonic clock stood still for {seconds:g} s", figures=figures, seconds=seconds
        )
    if abs(drift) > STEP:
        words = f"its clock went {drift:+.3f} s against its monotonic clock within {passed:.2f} s"
        return Check(name=NAME, mark=CheckMark.FAILED, words=words, figures=figures, seconds=passed)
    return Check(name=NAME, mark=CheckMark.PASSED, words="it goes evenly", figures=figures, seconds=passed)
