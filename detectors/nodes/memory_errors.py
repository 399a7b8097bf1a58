"""What the kernel's counters of memory errors say of a line about an uncorrected one.

The driver writes the line and counts the error in one step, so that a line that has not been counted is an old one that was repeated.
https://docs.kernel.org/driver-api/edac.html, https://docs.kernel.org/admin-guide/RAS/main.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.line_check import LineCheck

UNCORRECTED: Final = "memory-uncorrected"
_LINE: Final = re.compile(r"\bEDAC MC(?P<controller>\d+): [1-9]\d* UE\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Uncorrected errors of each memory controller since its driver was loaded, by name (`mc0`)."""

    uncorrected: dict[str, int] | Unknown


def is_about_memory(kind: str) -> bool:
    """Return whether lines of *kind* are counted by the kernel."""
    return kind == CATALOGUE[UNCORRECTED].id


def check_memory_line(_kind: str, text: str, earlier: Sequence[MemoryErrors], now: MemoryErrors, seconds: float) -> LineCheck:
    """Return what the counters say of the line *text*: *now*, and the *earlier* ones, the last of which is *seconds* older."""
    found = _LINE.search(text)
    readings = [one.uncorrected for one in (*earlier, now)]
    known = [one for one in readings if not isinstance(one, Unknown)]
    if found is None or not earlier or len(known) < len(readings) or not all(known):
        return LineCheck()
    name = f"mc{found['controller']}"
    if not any(name in one for one in known):
        return LineCheck(contradicted=f"this node has no memory controller {name}")
    before, after = known[-2].get(name), known[-1].get(name)
    if before is None or after is None or after < before:
        return LineCheck()
    if after == before:
        return LineCheck(contradicted=f"by its counter {name} had no uncorrected error in {seconds:.0f} s around the line")
    return LineCheck(
        supported=f"{name} counted {after - before} uncorrected {'error' if after - before == 1 else 'errors'} in {seconds:.0f} s"
    )
