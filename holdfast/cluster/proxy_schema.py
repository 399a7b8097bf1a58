"""What the gates of nodes answer, checked before anything is built on it: a node in the wrong hands must not end the flow.

Which fields the answer to an order needs, and of what type they are, stands here and nowhere else. What is not named is let through, so
that a gate may tell more than this version understands.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from holdfast.agent.workers.log_files import NAME as LOG
from holdfast.protocol import LONGEST_LINE, Message

MOST: Final = 2**53
MOST_LOGS: Final = 2**16
"""Logs in one folder: one for each rank of the largest jobs, where nodes share it."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Port = Annotated[int, Field(gt=0, lt=2**16)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00\r\n]*$")]
"""One line: it goes into messages, environments and paths."""
Log = Annotated[str, StringConstraints(pattern=rf"^(?:{LOG.pattern})$")]
"""The name of a log: it becomes a path in a support bundle, and so on the machine of whoever unpacks that."""
Words = Annotated[str, StringConstraints(max_length=1000)]


def _is_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


class _Said(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Agent(_Said):
    pid: Count
    job: Name | None


class _Looked(_Said):
    agent: _Agent | None


class _Interface(_Said):
    name: Name
    address: Name
    network: Name


class _Entered(_Looked):
    directory: Name
    interpreter: Name
    interfaces: Annotated[list[_Interface], Field(max_length=4096)]
    reached: Name | None
    clock: Real | None = None


class _Fenced(_Said):
    killed: list[Count]


class _Past(_Said):
    events: list[dict[str, Any]]


class _Logs(_Said):
    logs: Annotated[dict[Log, Count], Field(max_length=MOST_LOGS)]
    place: Name = ""


class _Log(_Said):
    data: Annotated[str, AfterValidator(_is_base64), StringConstraints(max_length=LONGEST_LINE)]


class _Listens(_Said):
    port: Port
    token: Name


class _Measured(_Said):
    bytes: Count
    seconds: Real


class _Met(_Said):
    why: Words


ANSWERS: Final[dict[str, type[_Said]]] = {
    "enter": _Entered,
    "look": _Looked,
    "fence": _Fenced,
    "past": _Past,
    "logs": _Logs,
    "log": _Log,
    "listen": _Listens,
    "measure": _Measured,
    "meet": _Met,
}
"""Orders to the answers that they need; of the others it is enough that they were carried out."""


def complaint(verb: str, answer: Message) -> str:
    """Say what is wrong with a gate's answer to the order *verb*; empty when it can be used as it is."""
    try:
        ANSWERS.get(verb, _Said).model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{_printable('.'.join(map(str, first['loc']))[:100])}: {first['msg']}"
    return ""


def superseded(answer: Message) -> int:
    """Return the epoch of the newer flow in whose favour a gate refuses an order; 0 where it has other reasons."""
    epoch = answer.get("epoch")
    return epoch if type(epoch) is int and 0 < epoch < MOST else 0


def refusal(answer: Message) -> OSError:
    """Return why a gate did not carry out an order."""
    number, why = answer.get("errno"), answer.get("why")
    return OSError(number if type(number) is int and 0 <= number < MOST else 0, _printable(str(why)[:1000]) or "it does not say why")


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in words)
