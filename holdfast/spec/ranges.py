"""Names of nodes as people and Slurm write many of them: ``gpu[001-128]``, ``gpu-[1-4,7]``, ``rack[1-2]-gpu[1-8]``."""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

from pydantic_core import PydanticCustomError

MOST: Final = 10_000
"""Nodes that one text may name: more are a slip of the hand."""
_LIST: Final = re.compile(r"\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]")


def names_in(text: str) -> list[str]:
    """Return the names that *text* stands for: itself, or one for each number in its brackets; the last bracket's change first.

    Numbers have as many digits as their range begins with. Raise pydantic's error for a range that runs downwards or is too long.
    """
    parts = _LIST.split(text)
    if len(parts) == 1 or any(mark in between for between in parts[::2] for mark in "[]"):
        return [text]
    lists = [[number for part in numbers.split(",") for number in _numbers(part, text)] for numbers in parts[1::2]]
    if math.prod(map(len, lists)) > MOST:
        raise _no_range(text)
    ends = parts[2::2]
    return [parts[0] + "".join(itertools.chain(*zip(numbers, ends, strict=True))) for numbers in itertools.product(*lists)]


def _numbers(part: str, text: str) -> list[str]:
    first, _, last = part.partition("-")
    begin, end = int(first), int(last or first)
    if not begin <= end < begin + MOST:
        raise _no_range(text)
    return [f"{number:0{len(first)}}" for number in range(begin, end + 1)]


def _no_range(text: str) -> PydanticCustomError:
    cure = f"Write it upwards, with at most {MOST:,} nodes, e.g. `node-[0-15]`"
    return PydanticCustomError("range", "{shown} is no range of nodes", {"shown": repr(text)[:80], "cure": cure})
