"""What the gates of nodes answer, checked before anything is built on it: a node in the wrong hands must not end the flow.

Which fields the answer to an order needs, and of what type they are, stands here and nowhere else. What is not named is let through, so
that a gate may tell more than this version understands.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from detectors.codec import MalformedData, unpacked
from holdfast.agent.workers.log_files import NAME as LOG
from holdfast.protocol import MAX_LINE_BYTES, Message

MOST: Final = 2**53
MOST_LOGS: Final = 2**16
"""Logs in one folder: one for each rank of the largest jobs, where nodes share it."""
MOST_INTERFACES: Final = 4096


def _between(least: int, most: int) -> Callable[[int], int]:
    def checked(number: int) -> int:
        if least <= number <= most:
            return number
        raise ValueError(f"is not from {least} to {most}")

    return checked


def _at_most(most: int) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:  # noqa: ANN401 (a text or a collection)
        if len(value) <= most:
            return value
        raise ValueError(f"is longer than {most}")

    return checked


def _like(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def checked(text: str) -> str:
        if compiled.fullmatch(text):
            return text
        raise ValueError("has another form")

    return checked


def _is_duration(seconds: float) -> float:
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    raise ValueError("is no number of seconds")


def _is_base64(text: str) -> str:
    base64.b64decode(_at_most(MAX_LINE_BYTES)(text), validate=True)
    return text


Count = Annotated[int, _between(0, MOST)]
Port = Annotated[int, _between(1, 2**16 - 1)]
Real = Annotated[float, _is_duration]
Name = Annotated[str, _like(r"[^\x00\r\n]{0,4096}")]
"""One line: it goes into messages, environments and paths."""
Log = Annotated[str, _like(LOG.pattern)]
"""The name of a log: it becomes a path in a support bundle, and so on the machine of whoever unpacks that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    pid: Count
    job: Name | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    agent: _Agent | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interface:
    name: Name
    address: Name
    network: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entered(_Looked):
    directory: Name
    interpreter: Name
    interfaces: Annotated[list[_Interface], _at_most(MOST_INTERFACES)]
    reached: Name | None
    clock: Real | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fenced:
    killed: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    events: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logs:
    logs: Annotated[dict[Log, Count], _at_most(MOST_LOGS)]
    place: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    data: Annotated[str, _is_base64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listens:
    port: Port
    token: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    bytes: Count
    seconds: Real


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    why: Annotated[str, _at_most(1000)]


ANSWERS: Final[dict[str, type]] = {
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
        if verb in ANSWERS:
            unpacked(ANSWERS[verb], answer, where=verb)
    except MalformedData as error:
        return _printable(str(error)[:300])
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
