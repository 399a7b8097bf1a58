"""Check that this node's clocks advance, and at the same rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark

NAME: Final = "clock"
MAX_DRIFT: Final = 0.05
"""Seconds by which the two clocks may diverge while they are watched; more is a step by hand or by a time server."""

Clock = Callable[[], float]


def ticking(seconds: float, monotonic: Clock = time.monotonic, wall: Clock = time.time) -> Check:
    """Read both clocks for *seconds*: the monotonic one must never go back, and the wall clock must keep up with it."""
    begun, began_at, both_read = _both(monotonic, wall)
    before, reads = begun, 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        now = monotonic()
        reads += 1
        if now < before:
            words = f"its monotonic clock went back by {before - now:.6f} s"
            return Check(name=NAME, mark=CheckMark.FAILED, words=words, seconds=now - begun)
        before = now
        time.sleep(0.001)
    ended, ended_at, last_read = _both(monotonic, wall)
    passed, by_wall = ended - begun, ended_at - began_at
    drift = min(max(0.0, by_wall - (last_read - begun)), by_wall - (ended - both_read))  # of all that may be so the least
    figures = {"drift ms": 1000 * drift, "reads": float(reads)}
    if passed <= 0:
        words = f"its monotonic clock did not advance for {seconds:g} s"
        return Check(name=NAME, mark=CheckMark.FAILED, words=words, figures=figures, seconds=seconds)
    if abs(drift) > MAX_DRIFT:
        words = f"its clock moved by {drift:+.3f} s against its monotonic clock within {passed:.2f} s"
        return Check(name=NAME, mark=CheckMark.FAILED, words=words, figures=figures, seconds=passed)
    return Check(name=NAME, mark=CheckMark.PASSED, words="it runs evenly", figures=figures, seconds=passed)


def _both(monotonic: Clock, wall: Clock) -> tuple[float, float, float]:
    """Read the wall clock between two reads of the monotonic one: this process may be stopped for seconds between any two reads."""
    return monotonic(), wall(), monotonic()
