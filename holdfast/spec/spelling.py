"""How names of nodes and programs may be spelled, in whatever kind of cluster; and how a contradiction is told."""

from __future__ import annotations

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


PLAIN_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
NodeNames = Annotated[
    str,
    spelled(
        PLAIN_NAME + r"|[A-Za-z0-9._-]{0,200}\[[0-9,-]{1,200}\][A-Za-z0-9._-]{0,200}",
        "Use letters, digits, dots and dashes, e.g. 'gpu-17.example.org', or a range such as 'gpu[001-128]'",
    ),
    AfterValidator(_of_names),
]
Program = Annotated[
    str, spelled(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]{0,254}", "Write a name or a path of letters, digits and `_ . / + -`: a shell reads it")
]

Inner = Annotated[str, spelled(r"[A-Za-z0-9][A-Za-z0-9:._/-]{0,63}", "Write an interface's name (`ib0`) or a network (`10.1.0.0/16`)")]


def contradiction(field: str, reason: str, cure: str) -> PydanticCustomError:
    """Return what says that fields, each fine alone, cannot stand together."""
    return PydanticCustomError("contradiction", "{field}: {reason}. {cure}", {"field": field, "reason": reason, "cure": cure})
