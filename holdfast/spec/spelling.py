"""How names of nodes and programs may be spelled, in whatever kind of cluster; and how a contradiction is told."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from holdfast.spec.ranges import names_in


def spelled(pattern: str, cure: str) -> AfterValidator:
    """Refuse text that is not wholly of *pattern*."""

    def checked(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("spelling", "{shown} cannot stand here", {"shown": repr(value)[:80], "cure": cure})
        return value

    return AfterValidator(checked)


def _of_names(text: str) -> str:
    for name in names_in(text):
        if not re.fullmatch(PLAIN_NAME, name):
            context = {"shown": repr(text)[:80], "name": repr(name)[:80], "cure": "Have it begin and end with a letter or a digit"}
            raise PydanticCustomError("spelling", "{shown} stands for {name}, which is no name", context)
    return text


def _of_network(text: str) -> str:
    """Return a network by its first address, whichever of it is written."""
    if "/" not in text:
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise PydanticCustomError("spelling", "{shown} is no network", {"shown": repr(text)[:80], "cure": INNER}) from None


def _without_home(text: str) -> str:
    if text.startswith("~"):
        cure = "Leave `~/` out where nodes are reached by SSH: there a path begins at the home of who logs in. Else write it from `/` on"
        context = {"shown": repr(text)[:80], "cure": cure}
        raise PydanticCustomError("spelling", "{shown} cannot stand here: nothing puts a home in place of `~`", context)
    return text


PLAIN_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
NodeNames = Annotated[
    str,
    spelled(
        PLAIN_NAME + r"|[A-Za-z0-9._-]{0,200}(\[[0-9,-]{1,200}\][A-Za-z0-9._-]{0,200}){1,4}",
        "Use letters, digits, dots and dashes, e.g. 'gpu-17.example.org', or a range such as 'gpu[001-128]'",
    ),
    AfterValidator(_of_names),
]
Program = Annotated[
    str,
    AfterValidator(_without_home),
    spelled(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]{0,254}", "Write a name or a path of letters, digits and `_ . / + -`: a shell reads it"),
]

INNER: Final = "Write an interface's name (`ib0`) or a network (`10.1.0.0/16`)"
Inner = Annotated[str, spelled(r"[A-Za-z0-9][A-Za-z0-9:._/-]{0,63}", INNER), AfterValidator(_of_network)]


def contradiction(field: str, reason: str, cure: str) -> PydanticCustomError:
    """Return what says that fields, each fine alone, cannot stand together."""
    return PydanticCustomError("contradiction", "{field}: {reason}. {cure}", {"field": field, "reason": reason, "cure": cure})
