"""Check how nodes, programs and interfaces are named, and expand ranges of names: ``gpu[001-128]``, ``gpu-[1-4,7]``."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from typing import Annotated, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

MAX_NODES: Final = 10_000
"""Nodes that one text may name; a larger number is a typing error."""
_LIST: Final = re.compile(r"\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]")


def expand_names(text: str) -> list[str]:
    """Return the names that *text* stands for: itself, or one for each number in its brackets; the last bracket varies fastest.

    Numbers are padded to the width of the first number of their range. Raise `PydanticCustomError` for a descending or too long range.
    """
    parts = _LIST.split(text)
    if len(parts) == 1 or any(mark in between for between in parts[::2] for mark in "[]"):
        return [text]
    lists = [[number for part in numbers.split(",") for number in _numbers(part, text)] for numbers in parts[1::2]]
    if math.prod(map(len, lists)) > MAX_NODES:
        raise _bad_range(text)
    ends = parts[2::2]
    return [parts[0] + "".join(itertools.chain(*zip(numbers, ends, strict=True))) for numbers in itertools.product(*lists)]


def _numbers(part: str, text: str) -> list[str]:
    first, _, last = part.partition("-")
    begin, end = int(first), int(last or first)
    if not begin <= end < begin + MAX_NODES:
        raise _bad_range(text)
    return [f"{number:0{len(first)}}" for number in range(begin, end + 1)]


def _bad_range(text: str) -> PydanticCustomError:
    cure = f"Write an ascending range of at most {MAX_NODES:,} nodes, e.g. `node-[0-15]`"
    return PydanticCustomError("range", "{shown} is not a range of nodes", {"shown": repr(text)[:80], "cure": cure})


def matches(pattern: str, cure: str) -> AfterValidator:
    """Return a validator that refuses text that does not fully match *pattern*."""

    def checked(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("spelling", "{shown} is not allowed here", {"shown": repr(value)[:80], "cure": cure})
        return value

    return AfterValidator(checked)


def contradiction(field: str, reason: str, cure: str) -> PydanticCustomError:
    """Return the error for fields that are valid alone but not together."""
    return PydanticCustomError("contradiction", "{field}: {reason}. {cure}", {"field": field, "reason": reason, "cure": cure})


def _check_names(text: str) -> str:
    for name in expand_names(text):
        if not re.fullmatch(PLAIN_NAME, name):
            context = {"shown": repr(text)[:80], "name": repr(name)[:80], "cure": "Begin and end each name with a letter or a digit"}
            raise PydanticCustomError("spelling", "{shown} stands for {name}, which cannot name a node", context)
    return text


def _network_address(text: str) -> str:
    """Return a network by its first address, whichever of its addresses is written."""
    if "/" not in text:
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise PydanticCustomError("spelling", "{shown} is not a network", {"shown": repr(text)[:80], "cure": INTERFACE_CURE}) from None


def _without_home(text: str) -> str:
    if text.startswith("~"):
        cure = "Over SSH leave `~/` out: a relative path begins at the home of the login. Otherwise write an absolute path"
        context = {"shown": repr(text)[:80], "cure": cure}
        raise PydanticCustomError("spelling", "{shown} is not allowed here: `~` is not expanded", context)
    return text


PLAIN_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
NodeNames = Annotated[
    str,
    matches(
        PLAIN_NAME + r"|[A-Za-z0-9._-]{0,200}(\[[0-9,-]{1,200}\][A-Za-z0-9._-]{0,200}){1,4}",
        "Use letters, digits, dots and dashes, e.g. 'gpu-17.example.org', or a range such as 'gpu[001-128]'",
    ),
    AfterValidator(_check_names),
]
Program = Annotated[
    str,
    AfterValidator(_without_home),
    matches(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]{0,254}", "Write a name or a path of letters, digits and `_ . / + -`: a shell reads it"),
]
INTERFACE_CURE: Final = "Write an interface's name (`ib0`) or a network (`10.1.0.0/16`)"
Interface = Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9:._/-]{0,63}", INTERFACE_CURE), AfterValidator(_network_address)]
