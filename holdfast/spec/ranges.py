"""Names of nodes as people and Slurm write many of them: ``gpu[001-128]``, ``gpu-[1-4,7]``."""

from __future__ import annotations

import re
from typing import Final

from pydantic_core import PydanticCustomError

MOST: Final = 10_000
"""Nodes that one text may name: more are a slip of the hand."""
_LIST: Final = re.compile(r"(?P<before>[^\[\]]*)\[(?P<numbers>\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*)\](?P<after>[^\[\]]*)")


def names_in(text: str) -> list[str]:
    """Return the names that *text* stands for: itself, or one for each number in its brackets.

    Numbers have as many digits as their range begins with. Raise pydantic's error for a range that runs downwards or is too long.
    """
    found = _LIST.fullmatch(text)
    if found is None:
        return [text]
    numbers = [one for part in found["numbers"].split(",") for one in _numbers(part, text)]
    if len(numbers) > MOST:
        raise _no_range(text)
    return [f"{found['before']}{number}{found['after']}" for number in numbers]


def _numbers(part: str, text: str) -> list[str]:
    first, _, last = part.partition("-")
    begin, end = int(first), int(last or first)
    if not begin <= end < begin + MOST:
        raise _no_range(text)
    return [f"{number:0{len(first)}}" for number in range(begin, end + 1)]


def _no_range(text: str) -> PydanticCustomError:
    cure = f"Write it upwards, with at most {MOST:,} nodes, e.g. `node-[0-15]`"
    return PydanticCustomError("range", "{shown} is no range of nodes", {"shown": repr(text)[:80], "cure": cure})
